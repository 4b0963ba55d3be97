"""Profiles of small programs: annotations, schedules, forks, and misuse."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from rayagi import profiler
from rayagi.profiler import process_folder, scopes, session
from rayagi.profiler.fallback import PythonRecorder
from rayagi.profiler.layout import Category
from rayagi.profiler.native import OFF, RECORD, WARM_UP
from rayagi.profiler.summary import core_lines
from rayagi.profiler.trace import read_profile
from tests.unit.profiler import traces

SCOPES = ("PHASE", "OPERATION", "ITERATION")


def events(process):
    """Category and text of each scope of a process, in the order of their beginning."""
    return [
        (Category(event["category"]).name, process.name_of(int(event["name"])))
        for thread in process.threads
        for event in thread.events
        if Category(event["category"]).name in SCOPES
    ]


def only_process(folder):
    (process,) = read_profile(folder).processes
    return process


@pytest.fixture(params=["c", "python"])
def either_recorder(request, monkeypatch):
    if request.param == "python":
        recorder = PythonRecorder()
        monkeypatch.setattr(session, "load_recorder", lambda: recorder)


@pytest.mark.usefixtures("either_recorder")
def test_operations_phases_and_iterations_are_recorded_by_name(tmp_path):
    @profiler.operation("fib")
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    with profiler.profile(tmp_path / "p", name="trainer", metadata={"seed": 3}):
        with profiler.phase("collect"), profiler.iteration(), profiler.operation("act"):
            assert fib(3) == 2  # calls itself for 2, 1, 1, 0
        profiler.add_metadata(task="Ant-v5")
    process = only_process(tmp_path / "p")
    assert (process.name, process.metadata) == ("trainer", {"seed": 3, "task": "Ant-v5"})
    assert (process.pid, process.parent) == (os.getpid(), os.getppid())
    assert events(process)[:3] == [("PHASE", "collect"), ("ITERATION", "iteration"), ("OPERATION", "act")]
    assert events(process)[3:] == [("OPERATION", "fib")] * 5
    (thread,) = process.threads
    assert (thread.events["end"] >= thread.events["start"]).all()
    assert abs(process.clock.unix_ns - read_profile(tmp_path / "p").start_unix_ns) < 60e9
    assert process.clock.error_ns < 1e9


def test_without_a_profile_scopes_do_nothing_and_close_in_any_order():
    outer, inner = profiler.operation("a"), profiler.operation("b")
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert scopes.session is None


def test_an_exception_closes_scopes_and_the_profile(tmp_path):
    with pytest.raises(ZeroDivisionError), profiler.profile(tmp_path / "p"), profiler.operation("act"):
        _ = 1 / 0
    assert scopes.session is None
    assert (only_process(tmp_path / "p").threads[0].events["end"] > 0).all()


def test_a_timed_operation_is_timed_with_a_profile_and_without(tmp_path):
    act = profiler.timed_operation("act")
    with act:
        pass
    with profiler.profile(tmp_path / "p"):
        with pytest.raises(ZeroDivisionError), act:
            _ = 1 / 0
        with act:
            pass
    process = only_process(tmp_path / "p")
    assert events(process).count(("OPERATION", "act")) == 2
    recorded = process.threads[0].events
    recorded = recorded[recorded["category"] == Category.OPERATION]
    # The same clock, read within what is recorded.
    within_s = (recorded["end"] - recorded["start"]) / 1e9
    assert len(act.durations_s) == 3
    assert min(act.durations_s) >= 0
    assert (act.durations_s[1:] <= within_s + 1e-9).all()
    assert act.seconds == sum(act.durations_s)


def test_scopes_closed_in_the_wrong_order_are_both_named(tmp_path):
    with profiler.profile(tmp_path / "p"):
        outer, inner = profiler.operation("act"), profiler.phase("learn")
        outer.__enter__()
        inner.__enter__()
        with pytest.raises(
            profiler.ProfilerError, match="operation 'act' is closed while 'learn' is the innermost"
        ):
            outer.__exit__(None, None, None)
        with profiler.operation("afterwards"):  # the stack is in order again
            pass


def test_a_generator_suspended_within_a_scope_is_noticed(tmp_path):
    def items():
        with profiler.operation("items"):
            yield 1
            yield 2

    with profiler.profile(tmp_path / "p"):
        suspended = items()
        next(suspended)
        with (
            pytest.raises(
                profiler.ProfilerError, match="operation 'items' is closed while 'loop' is the innermost"
            ),
            profiler.operation("loop"),
        ):
            list(suspended)


@pytest.mark.parametrize("kind", ["def f(): yield", "async def f(): pass", "async def f(): yield"])
def test_functions_that_are_suspended_cannot_be_decorated(kind):
    namespace = {}
    exec(kind, namespace)
    with pytest.raises(TypeError, match=r"operation 'act' cannot decorate f, which is suspended"):
        profiler.operation("act")(namespace["f"])


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_is_text(name):
    with pytest.raises(TypeError, match="the name of timed_operation is text"):
        profiler.timed_operation(name)
    with pytest.raises(TypeError, match="the name of operation is text"):
        profiler.operation(name)


def test_a_scope_that_was_open_before_the_profile_is_not_recorded(tmp_path):
    with profiler.operation("early"):
        recording = profiler.profile(tmp_path / "p")
        recording.__enter__()
        with profiler.operation("in time"):
            pass
    recording.__exit__(None, None, None)
    assert events(only_process(tmp_path / "p")) == [("OPERATION", "in time")]


def test_a_schedule_says_which_iterations_are_recorded():
    schedule = profiler.Schedule(skip=2, warm_up=1, record=2, repeat=2)
    modes = [schedule.mode(i) for i in range(12)]
    assert modes == [OFF, OFF, WARM_UP, RECORD, RECORD, OFF, OFF, WARM_UP, RECORD, RECORD, OFF, OFF]


@pytest.mark.parametrize("wrong", [{"skip": -1}, {"record": 0}, {"repeat": True}, {"warm_up": 1.5}])
def test_a_schedule_of_nonsense_names_the_count(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} of a profile's schedule is an integer"):
        profiler.Schedule(**wrong)


@pytest.mark.usefixtures("either_recorder")
def test_a_profile_follows_its_schedule(tmp_path):
    schedule = profiler.Schedule(skip=1, warm_up=1, record=2, repeat=2)
    with profiler.profile(tmp_path / "p", schedule=schedule), profiler.phase("training"):
        for i in range(10):
            with profiler.iteration(), profiler.operation(f"step {i}"), profiler.iteration("inner"):
                pass
            with profiler.operation(f"between {i}"):
                pass
    first, second = only_process(tmp_path / "p").threads
    process = only_process(tmp_path / "p")

    def of(numbers):
        expected = [("PHASE", "training")]
        for i in numbers:
            expected += [("ITERATION", "iteration"), ("OPERATION", f"step {i}"), ("ITERATION", "inner")]
            expected += [("OPERATION", f"between {i}")] if i + 1 in numbers else []
        return expected

    assert events(process) == of([2, 3]) + of([6, 7])
    numbers = [
        int(event["flags"])
        for thread in (first, second)
        for event in thread.events
        if process.name_of(int(event["name"])) == "iteration"
    ]
    assert numbers == [2, 3, 6, 7]


def test_iterations_of_other_threads_do_not_drive_the_schedule(tmp_path):
    with profiler.profile(tmp_path / "p", schedule=profiler.Schedule(warm_up=0, record=1)):
        with profiler.iteration():

            def elsewhere():
                for _ in range(3):
                    with profiler.iteration("theirs"):
                        pass

            other = threading.Thread(target=elsewhere)
            other.start()
            other.join()
        with profiler.iteration("afterwards"):
            pass
    assert Counter(name for _, name in events(only_process(tmp_path / "p"))) == {"iteration": 1, "theirs": 3}


def test_one_profile_at_a_time(tmp_path):
    with (
        profiler.profile(tmp_path / "p"),
        pytest.raises(profiler.ProfilerError, match=r"is being recorded already, into .*/p$"),
        profiler.profile(tmp_path / "q"),
    ):
        pass


def test_a_profile_never_mixes_with_what_is_there(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(profiler.ProfilerError, match="is not empty"), profiler.profile(tmp_path):
        pass
    with (
        pytest.raises(profiler.ProfilerError, match=r"notes\.txt cannot hold a profile"),
        profiler.profile(tmp_path / "notes.txt"),
    ):
        pass
    assert scopes.session is None


def test_metadata_must_be_json(tmp_path):
    with (
        pytest.raises(profiler.ProfilerError, match=r"metadata is written as JSON: .*set"),
        profiler.profile(tmp_path / "p", metadata={"seeds": {1, 2}}),
    ):
        pass


def test_names_made_in_a_loop_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(process_folder, "MAX_NAMES", 10)
    with profiler.profile(tmp_path / "p", name="p", intercept=False):
        for i in range(30):
            with profiler.operation(f"step {i}"):
                pass
    process = only_process(tmp_path / "p")
    assert len(process.names) == 10
    found = Counter(name for _, name in events(process))
    assert found["more than 100000 names"] == 30 - 7  # ten less thread, too many, p


def test_names_that_cannot_be_written_become_numbers(tmp_path):
    with profiler.profile(tmp_path / "p", name="p", intercept=False):
        (folder,) = (each for each in (tmp_path / "p").iterdir() if each.is_dir())
        (folder / "names.jsonl").unlink()
        (folder / "names.jsonl").mkdir()
        with profiler.operation("lost"):
            pass
        (folder / "names.jsonl").rmdir()
        with profiler.operation("lost too"):  # after a failed write the file would be damaged
            pass
    assert [name for _, name in events(only_process(tmp_path / "p"))] == ["name 3", "name 4"]


def test_a_description_that_cannot_be_written_is_said_once(tmp_path, caplog):
    with profiler.profile(tmp_path / "p", name="p", intercept=False):
        (folder,) = (each for each in (tmp_path / "p").iterdir() if each.is_dir())
        (folder / f".process.json.{os.getpid()}.tmp").mkdir()
        profiler.name_process("q")
        profiler.add_metadata(seed=1)
    (record,) = caplog.records
    assert "process.json cannot be written: Is a directory" in record.getMessage()
    assert read_profile(tmp_path / "p").processes[0].name == "p"


FORKING = """
import multiprocessing, os, sys
from rayagi import profiler

def work(name):
    with profiler.operation(name):
        pass

def leave(name):
    work(name)
    os._exit(0)

with profiler.profile(sys.argv[1], name="main"):
    with profiler.operation("start"):
        context = multiprocessing.get_context("fork")
        for target, name in ((work, "returns"), (leave, "leaves")):
            child = context.Process(target=target, args=(name,))
            child.start()
            child.join()
            assert child.exitcode == 0
    if not os.fork():
        work("forked")
        os.kill(os.getpid(), 9)
    os.wait()
assert os._exit.__module__ == "posix"
"""


def test_forked_children_record_into_folders_of_their_own(tmp_path):
    subprocess.run([sys.executable, "-c", FORKING, str(tmp_path / "p")], check=True, timeout=100)
    processes = read_profile(tmp_path / "p").processes
    # A child is not in what its parent had open.
    by_work = {tuple(name for _, name in events(each)): each for each in processes}
    assert set(by_work) == {("start",), ("returns",), ("leaves",), ("forked",)}
    main = by_work["start",]
    assert {each.parent for key, each in by_work.items() if key != ("start",)} == {main.pid}
    ends = {key[0]: int(each.threads[0].events["end"][0]) for key, each in by_work.items()}
    assert ends.pop("forked") == 0  # killed
    assert min(ends.values()) > 0
    names = {key[0]: each.name for key, each in by_work.items()}
    assert names["start"] == "main"
    assert names["forked"] == "main (forked)"
    assert {names["returns"], names["leaves"]} == {"ForkProcess-1", "ForkProcess-2"}


def test_a_process_that_execs_has_a_second_folder(tmp_path):
    once = "import os, sys; from rayagi import profiler; own = profiler.profile(sys.argv[1]); own.__enter__()"
    again = "import sys, pathlib; from rayagi.profiler import session; session.start(pathlib.Path(sys.argv[1]), {})"
    code = f"{once}; os.execv(sys.executable, [sys.executable, '-c', {again!r}, sys.argv[1]])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "p")], check=True, timeout=100)
    first, second = read_profile(tmp_path / "p").processes
    assert first.pid == second.pid
    assert second.path.name == f"{first.path.name}-2"
    assert (first.is_replaced, second.is_replaced) == (True, False)
    # Its time is counted to its end, which is before the other program's first moment.
    (thread,) = first.threads
    assert thread.start_ns < thread.events["end"][0] <= first.end_ns < second.threads[0].start_ns


FAILING_EXEC = """
import os, sys
from rayagi import profiler
with profiler.profile(sys.argv[1], name="main"):
    with profiler.operation("before"):
        pass
    for replace_program in (lambda: os.execvp("no-such-program", ["x"]), lambda: os.execv(sys.argv[2], ["x"])):
        try:
            replace_program()
        except OSError:
            pass
    with profiler.operation("after"):
        pass
assert (os.execv.__module__, os.execve.__module__) == ("posix", "posix")
"""


def test_a_program_that_could_not_be_replaced_is_recorded_further(tmp_path):
    (tmp_path / "no_program").write_text("#!/no/such/interpreter")
    (tmp_path / "no_program").chmod(0o755)
    command = [sys.executable, "-c", FAILING_EXEC, str(tmp_path / "p"), str(tmp_path / "no_program")]
    subprocess.run(command, check=True, timeout=100)
    process = only_process(tmp_path / "p")
    assert events(process) == [("OPERATION", "before"), ("OPERATION", "after")]
    # Recording was interrupted by the file that could be executed as far as one can see, and not by the search.
    assert len(process.threads) == 2
    assert all(thread.events["end"].all() for thread in process.threads)


def test_the_end_of_a_session_is_written_with_what_was_lost(tmp_path):
    with profiler.profile(tmp_path / "p"):
        pass
    process = only_process(tmp_path / "p")
    about = json.loads((process.path / "process.json").read_text())
    assert about["lost"] == 0
    assert about["end_monotonic_ns"] > process.threads[0].start_ns


def test_long_names_are_cut_off(tmp_path):
    name = 2000 * "n"
    with profiler.profile(tmp_path / "p", intercept=False):
        with profiler.operation(f"{name}1"), profiler.operation(f"{name}2"):
            pass
        profiler.iteration(name).__enter__()
        with pytest.raises(profiler.ProfilerError) as caught:
            profiler.phase("x").__exit__(None, None, None)
    assert len(str(caught.value)) < 800
    assert sorted(only_process(tmp_path / "p").names.values(), key=len)[-1] == name[:500]
    (names,) = (tmp_path / "p").glob("*/names.jsonl")
    assert names.stat().st_size < 2000


def test_a_profile_that_cannot_begin_leaves_no_folder(tmp_path):
    with (
        profiler.profile(tmp_path / "p", intercept=False),
        pytest.raises(profiler.ProfilerError, match="recorded already"),
        profiler.profile(tmp_path / "q"),
    ):
        pass
    for wrong in ({"limit_mb": 0}, {"limit_mb": 10**14}, {"metadata": {"a": {1}}}):
        with pytest.raises(profiler.ProfilerError), profiler.profile(tmp_path / "q", **wrong):
            pass
    assert [each.name for each in tmp_path.iterdir()] == ["p"]


def test_a_process_says_what_it_got_of_the_cores(tmp_path):
    schedule = profiler.Schedule(skip=1, warm_up=0, record=1)
    with profiler.profile(tmp_path / "p", schedule=schedule):
        for busy_ms in (50, 20, 50):
            with profiler.iteration():
                end = time.thread_time() + busy_ms / 1e3
                while time.thread_time() < end:
                    pass
    cores = only_process(tmp_path / "p").cores
    assert 0.02e9 <= cores["cpu_ns"] < 0.05e9  # of the iteration that was recorded
    assert cores["cpu_ns"] <= cores["wall_ns"] * 1.5
    assert min(cores["queue_ns"], cores["stolen_ns"]) >= 0


def test_a_process_that_is_killed_later_says_it_too(tmp_path):
    schedule = profiler.Schedule(skip=0, warm_up=0, record=1)
    with profiler.profile(tmp_path / "p", schedule=schedule):
        with profiler.iteration():
            sum(range(100_000))
        cores = only_process(tmp_path / "p").cores  # as if it went no further
    assert cores["cpu_ns"] > 0


def test_the_report_says_how_many_cores_a_process_used():
    found = traces.process([], name="trainer", cores={"wall_ns": 4_000, "cpu_ns": 6_000, "queue_ns": 900})
    (line,) = core_lines(traces.profile(found), "trainer")
    assert line == (
        "on 1.50 cores; threads ready without a core 900 ns; other machines took 0.00 of the host's cores"
    )
    assert not core_lines(traces.profile(traces.process([])), "trainer")
