"""The recorders in C and in Python: what they write, read by the reader of traces."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

from rayagi.profiler.fallback import PythonRecorder
from rayagi.profiler.layout import Category
from rayagi.profiler.native import RECORD, WARM_UP, compile_native
from rayagi.profiler.trace import read_profile

MIB = 1 << 20
OPERATION, BACKEND = Category.OPERATION, Category.BACKEND


@pytest.fixture(scope="module", params=["c", "python"])
def recorder(request):
    return compile_native() if request.param == "c" else PythonRecorder()


@pytest.fixture
def process(tmp_path, recorder):
    """A process's folder, and a session that writes to it."""
    folder = make_profile(tmp_path)
    recorder.setup(str(folder), 64 * MIB)
    yield folder
    recorder.stop()


def make_profile(path):
    (path / "profile.json").write_text(
        json.dumps({"version": 1, "command": [], "start_unix_ns": 0, "intercepted": {}})
    )
    clock = {"monotonic_ns": 0, "unix_ns": 0, "error_ns": 0}
    about = {"name": "p", "pid": 1, "parent": 0, "argv": [], "metadata": {}, "python": "", "clock": clock}
    folder = path / "host-1-1"
    folder.mkdir()
    (folder / "process.json").write_text(json.dumps(about))
    return folder


def threads(folder):
    (process,) = read_profile(folder.parent).processes
    return process.threads


def kinds(thread):
    """Category and name of each event."""
    return [(Category(event["category"]).name, int(event["name"])) for event in thread.events]


def test_a_window_holds_its_thread_process_and_events(process, recorder):
    recorder.start(RECORD, 9)
    recorder.begin(OPERATION, 1, 0)
    recorder.begin(OPERATION, 2, 7)
    assert recorder.end(OPERATION, 2) is None
    assert recorder.end(OPERATION, 1) is None
    recorder.stop()
    (thread,) = threads(process)
    assert thread.thread_id == threading.get_native_id()
    assert kinds(thread) == [("THREAD", 0), ("PROCESS", 9), ("OPERATION", 1), ("OPERATION", 2)]
    life, whole, outer, inner = thread.events
    assert thread.start_ns == life["start"] == whole["start"] <= outer["start"] <= inner["start"]
    assert inner["start"] <= inner["end"] <= outer["end"] <= life["end"] == whole["end"]
    assert [int(each["depth"]) for each in (outer, inner)] == [0, 1]
    assert int(inner["flags"]) == 7


def test_nothing_is_recorded_outside_a_window(process, recorder):
    recorder.record(1, 2, BACKEND, 1, 0)
    recorder.begin(OPERATION, 1, 0)
    recorder.end(OPERATION, 1)
    assert not list(process.glob("*.events"))


def test_a_window_that_warms_up_leaves_nothing(process, recorder):
    recorder.start(WARM_UP, 9)
    recorder.begin(OPERATION, 1, 0)
    recorder.end(OPERATION, 1)
    recorder.stop()
    assert not list(process.glob("*.events"))


def test_each_window_is_a_file_and_begins_with_the_open_scopes(process, recorder):
    recorder.start(RECORD, 9)
    recorder.begin(Category.PHASE, 1, 0)
    recorder.stop()
    recorder.begin(OPERATION, 2, 0)  # between windows
    recorder.start(RECORD, 9)
    assert recorder.end(OPERATION, 2) is None
    assert recorder.end(Category.PHASE, 1) is None
    recorder.stop()
    first, second = threads(process)
    assert kinds(first) == [("THREAD", 0), ("PROCESS", 9), ("PHASE", 1)]
    assert first.events["end"][2] == 0  # open when the window ended
    assert kinds(second) == [("THREAD", 0), ("PHASE", 1), ("OPERATION", 2), ("PROCESS", 9)]
    assert (second.events["end"] > second.start_ns).all()


def test_a_scope_that_is_not_the_innermost_is_reported_and_closed(process, recorder):
    recorder.start(RECORD, 9)
    recorder.begin(OPERATION, 1, 0)
    recorder.begin(OPERATION, 2, 0)
    assert recorder.end(OPERATION, 1) == 2
    assert recorder.end(OPERATION, 2) is None  # closed already: nothing is open
    recorder.begin(OPERATION, 3, 0)
    assert recorder.end(OPERATION, 4) == 3  # never opened here
    assert recorder.end(OPERATION, 3) is None
    recorder.stop()
    assert (threads(process)[0].events["end"] > 0).all()


def test_a_scope_of_an_earlier_session_is_none_of_the_next(process, recorder):
    recorder.begin(OPERATION, 1, 0)
    recorder.setup(str(process), MIB)
    recorder.start(RECORD, 9)
    assert recorder.end(OPERATION, 1) is None
    recorder.stop()
    assert kinds(threads(process)[0]) == [("THREAD", 0), ("PROCESS", 9)]


def test_scopes_nest_deeper_than_a_record_can_say(process, recorder):
    recorder.start(RECORD, 9)
    for _ in range(1000):
        recorder.begin(OPERATION, 1, 0)
    for _ in range(1000):
        assert recorder.end(OPERATION, 1) is None
    recorder.stop()
    events = threads(process)[0].events[2:]
    assert events["depth"].tolist() == [min(depth, 255) for depth in range(1000)]
    assert (events["end"][:-1] >= events["end"][1:]).all()


def test_segments_follow_each_other_and_a_long_scope_is_completed_in_the_first(process, recorder):
    recorder.start(RECORD, 9)
    recorder.begin(OPERATION, 1, 0)
    for name in range(20_000):  # segments of 4096, 4096, 8192, 16384
        recorder.record(1 << 62, (1 << 62) + 1, BACKEND, name, 3)
    recorder.end(OPERATION, 1)
    recorder.stop()
    (thread,) = threads(process)
    assert thread.events["name"][3:].tolist() == list(range(20_000))
    assert (thread.events["end"][:3] > 0).all()
    assert thread.dropped == 0


def test_each_thread_has_a_file(process, recorder):
    recorder.start(RECORD, 9)
    ids = {}

    def work(name):
        ids[name] = threading.get_native_id()
        for _ in range(5000):
            recorder.begin(OPERATION, name, 0)
            recorder.end(OPERATION, name)

    workers = [threading.Thread(target=work, args=(name,)) for name in range(100, 104)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    recorder.stop()
    by_name = {int(thread.events["name"][-1]): thread for thread in threads(process)}
    assert {name: by_name[name].thread_id for name in ids} == ids
    for name in ids:
        events = by_name[name].events
        assert kinds(by_name[name])[1:] == [("OPERATION", name)] * 5000
        assert (events["end"] >= events["start"]).all()


def test_a_thread_s_first_event_may_have_begun_before_its_file(process, recorder):
    before = time.monotonic_ns()
    recorder.start(RECORD, 9)
    starts = []

    def wait():
        starts.append(time.monotonic_ns())
        recorder.record(before, time.monotonic_ns(), BACKEND, 4, 0)  # began before the window: left out
        recorder.record(starts[0], time.monotonic_ns(), BACKEND, 5, 0)

    other = threading.Thread(target=wait)
    other.start()
    other.join()
    recorder.stop()
    _, thread = threads(process)
    assert kinds(thread) == [("THREAD", 0), ("BACKEND", 5)]
    assert thread.start_ns == thread.events["start"][0] == thread.events["start"][1] == starts[0]


def test_the_limit_on_disk_drops_and_counts(tmp_path, recorder):
    folder = make_profile(tmp_path)
    recorder.setup(str(folder), 2 * 4096 * 24)
    recorder.start(RECORD, 9)
    for _ in range(10_000):
        recorder.record(1 << 62, 1 << 62, BACKEND, 1, 0)
    recorder.begin(OPERATION, 2, 0)
    recorder.end(OPERATION, 2)

    def another_thread():
        recorder.record(1 << 62, 1 << 62, BACKEND, 1, 0)

    other = threading.Thread(target=another_thread)
    other.start()
    other.join()
    recorder.stop()
    (thread,) = threads(folder)
    assert len(thread.events) == 8192
    assert thread.dropped == 10_000 + 3 - 8192
    assert thread.dropped_from_ns == 1 << 62
    assert recorder.lost() == 1  # no space for the other thread's file
    assert sum(each.stat().st_size for each in folder.glob("*.events")) <= 2 * 4096 * 24 + 4096
    assert thread.events["end"][0] > 0


def test_a_folder_that_is_gone_loses_events_and_not_the_program(tmp_path, recorder):
    recorder.setup(str(tmp_path / "gone"), MIB)
    recorder.start(RECORD, 9)
    recorder.begin(OPERATION, 1, 0)
    assert recorder.end(OPERATION, 1) is None
    recorder.record(1 << 62, 1 << 62, BACKEND, 1, 0)
    recorder.stop()
    assert recorder.lost() == 3  # the process, the operation, the call


def test_a_disk_that_is_full_drops_and_counts(process, recorder):
    """A limit on the size of files is what a test can set: allocation fails as on a full disk, but with EFBIG.

    A thread tries once in a window: what a try costs, a file opened and space allocated, is not paid by each event.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    recorder.start(RECORD, 9)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    try:
        for _ in range(9000):
            recorder.record(1 << 62, 1 << 62, BACKEND, 1, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    recorder.record(1 << 62, 1 << 62, BACKEND, 1, 0)  # there is space again
    recorder.stop()
    (thread,) = threads(process)
    assert (len(thread.events), thread.dropped) == (4096, 9001 + 2 - 4096)


def test_a_full_thread_keeps_when_it_dropped_first(tmp_path, recorder):
    folder = make_profile(tmp_path)
    recorder.setup(str(folder), 4096 * 24)
    recorder.start(RECORD, 9)
    for number in range(5000):
        recorder.record((1 << 62) + number, (1 << 62) + 5000, BACKEND, 1, 0)
    recorder.stop()
    (thread,) = threads(folder)
    assert (thread.num_events, thread.dropped) == (4096, 5000 + 2 - 4096)
    assert thread.dropped_from_ns == (1 << 62) + 4096 - 2


def test_the_next_window_has_space_again(tmp_path, recorder):
    folder = make_profile(tmp_path)
    recorder.setup(str(folder), 3 * 4096 * 24)
    for _ in range(2):
        recorder.start(RECORD, 9)
        for _ in range(8500):
            recorder.record(1 << 62, 1 << 62, BACKEND, 1, 0)
        recorder.stop()
    first, second = threads(folder)
    assert (first.dropped, second.dropped) == (8502 - 8192, 8502 - 4096)


KILLED = """
import os, signal, sys
from rayagi.profiler.fallback import PythonRecorder
from rayagi.profiler.native import compile_native
recorder = compile_native() if sys.argv[1] == "c" else PythonRecorder()
recorder.setup(sys.argv[2], 1 << 26)
recorder.start(2, 9)
recorder.begin(3, 1, 0)
for name in range(5000):
    recorder.record(1 << 62, 1 << 62, 17, name, 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("which", ["c", "python"])
def test_every_event_survives_a_kill(tmp_path, which):
    folder = make_profile(tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED, which, str(folder)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (thread,) = threads(folder)
    assert thread.events["name"][3:].tolist() == list(range(5000))
    assert thread.events["end"][:3].tolist() == [0, 0, 0]  # thread, process, operation: open when it died


CLOSING = """
import os, sys
from rayagi.profiler.native import compile_native
recorder = compile_native()
recorder.setup(sys.argv[1], 1 << 26)
recorder.start(2, 9)
recorder.begin(3, 1, 0)
os.closerange(3, 64)
own = [os.open(sys.argv[2], os.O_RDWR | os.O_CREAT) for _ in range(30)]
for name in range(10_000):
    recorder.record(1 << 62, 1 << 62, 17, name, 0)
recorder.end(3, 1)
recorder.stop()
assert [os.fstat(each).st_size for each in own] == [0] * 30
"""


def test_a_program_may_close_all_descriptors_and_reuse_their_numbers(tmp_path):
    folder = make_profile(tmp_path)
    command = [sys.executable, "-c", CLOSING, str(folder), str(tmp_path / "own")]
    subprocess.run(command, timeout=100, check=True)
    (thread,) = threads(folder)
    assert thread.events["name"][3:].tolist() == list(range(10_000))
    assert (thread.events["end"][:3] > 0).all()


def test_a_forked_child_writes_to_files_of_its_own(process, recorder, tmp_path):
    recorder.start(RECORD, 9)
    recorder.begin(OPERATION, 1, 0)
    (tmp_path / "child").mkdir()
    child = os.fork()
    if not child:
        code = 1
        try:
            recorder.begin(OPERATION, 50, 0)  # before the child has a folder: not recorded anywhere
            recorder.end(OPERATION, 50)
            recorder.setup(str(tmp_path / "child"), MIB)
            recorder.start(RECORD, 51)
            recorder.begin(OPERATION, 52, 0)
            recorder.end(OPERATION, 52)
            recorder.end(OPERATION, 1)  # the parent's
            recorder.stop()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    recorder.end(OPERATION, 1)
    recorder.stop()
    (thread,) = threads(process)
    assert kinds(thread) == [("THREAD", 0), ("PROCESS", 9), ("OPERATION", 1)]
    (tmp_path / "profile").mkdir()
    (tmp_path / "child").rename(make_profile(tmp_path / "profile") / "moved")
    (file,) = (tmp_path / "profile" / "host-1-1" / "moved").iterdir()
    file.rename(file.parent.parent / file.name)
    (thread,) = threads(tmp_path / "profile" / "host-1-1")
    assert kinds(thread) == [("THREAD", 0), ("PROCESS", 51), ("OPERATION", 52)]
    assert (thread.events["end"] > 0).all()


@pytest.mark.parametrize("which", ["c", "python"])
def test_a_process_that_is_killed_while_it_warms_up_has_no_thread(tmp_path, which):
    folder = make_profile(tmp_path)
    code = (
        "import os, signal, sys\n"
        "from rayagi.profiler.fallback import PythonRecorder\n"
        "from rayagi.profiler.native import WARM_UP, compile_native\n"
        f"recorder = {'compile_native' if which == 'c' else 'PythonRecorder'}()\n"
        f"recorder.setup(sys.argv[1], {MIB})\n"
        "recorder.start(WARM_UP, 9)\n"
        f"recorder.begin({int(OPERATION)}, 3, 0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == -signal.SIGKILL
    )
    assert len(list(folder.glob("*.events"))) == 1
    assert threads(folder) == ()


def test_threads_that_have_ended_give_back_the_space_that_they_did_not_use(tmp_path, recorder):
    """A thread reserves 98,304 bytes; the limit has room for 10 of them."""
    folder = make_profile(tmp_path)
    recorder.setup(str(folder), MIB)
    recorder.start(RECORD, 9)

    def work():
        recorder.begin(OPERATION, 3, 0)
        recorder.end(OPERATION, 3)

    for _ in range(100):
        one = threading.Thread(target=work)
        one.start()
        one.join()
    recorder.stop()
    found = threads(folder)
    assert recorder.lost() == 0
    assert len(found) == 101
    assert sum(kinds(each)[1:] == [("OPERATION", 3)] for each in found) == 100
    assert sum(path.stat().st_size for path in folder.glob("*.events")) < 2 * 98_304 + 100 * 200
