"""`rayagi profile -- COMMAND`: any program and all its Python processes are recorded, and behave as without."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rayagi.cli import main
from rayagi.cli.profile import summarize
from rayagi.cli.profile_parser import split_program
from rayagi.profiler import injection
from rayagi.profiler.layout import Category
from rayagi.profiler.trace import read_profile

PROGRAM = """
import multiprocessing, os, signal, subprocess, sys, threading

def work(name):
    from rayagi import profiler
    with profiler.operation(name):
        pass

def left_by_exit(name):
    work(name)
    os._exit(0)

def killed(name):
    work(name)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    work("main")
    thread = threading.Thread(target=work, args=("thread",))
    thread.start()
    thread.join()
    for method, target, name in (
        ("fork", work, "forked"), ("fork", left_by_exit, "left"), ("fork", killed, "killed"), ("spawn", work, "spawned"),
    ):
        child = multiprocessing.get_context(method).Process(target=target, args=(name,), name=f"worker {name}")
        child.start()
        child.join()
    subprocess.run([sys.executable, "-c", "import program; program.work('subprocess')"], check=True)
    raise SystemExit(3)
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])  # commands add the folder, in which tests write modules
    monkeypatch.chdir(tmp_path)


def operations(profile):
    """By name of the operation: its process and thread."""
    return {
        process.name_of(int(event["name"])): (process, thread)
        for process in profile.processes
        for thread in process.threads
        for event in thread.events
        if event["category"] == Category.OPERATION
    }


def test_threads_forks_spawns_and_subprocesses_are_recorded(tmp_path, capsys):
    (tmp_path / "program.py").write_text(PROGRAM)
    assert main(["profile", "--out", "p", "--", sys.executable, "program.py"]) == 3
    printed = capsys.readouterr().out
    assert "events of" in printed
    assert printed.endswith(f"Next:\n  rayagi profile report {tmp_path / 'p'}\n")
    profile = read_profile("p")
    assert profile.command == (sys.executable, "program.py")
    found = operations(profile)
    assert set(found) == {"main", "thread", "forked", "left", "killed", "spawned", "subprocess"}
    parent = found["main"][0]
    assert found["thread"][0] is parent
    assert found["thread"][1].thread_id != found["main"][1].thread_id == parent.pid
    children = {name: found[name][0] for name in set(found) - {"main", "thread"}}
    assert {each.parent for each in children.values()} == {parent.pid}
    assert len({each.pid for each in children.values()}) == len(children)
    assert {name: children[name].name for name in ("forked", "left", "spawned")} == {
        "forked": "worker forked",
        "left": "worker left",
        "spawned": "worker spawned",
    }
    # Only what was killed has no end; not even Python's tracker of resources is in the way.
    assert {name for name, (_, thread) in found.items() if not thread.events["end"][0]} == {"killed"}
    assert len(profile.processes) == 1 + len(children)


def test_a_program_that_is_killed_keeps_what_it_recorded_and_its_signal(tmp_path):
    code = "import os; from rayagi import profiler\nwith profiler.operation('act'): os.kill(os.getpid(), 9)"
    assert main(["profile", "--out", "p", "--", sys.executable, "-c", code]) == 128 + signal.SIGKILL
    assert set(operations(read_profile("p"))) == {"act"}


def test_the_program_s_own_sitecustomize_still_runs(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.customized = getattr(sys, 'customized', 0) + 1"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    code = "import sys, sitecustomize; sys.exit(10 * ('startup' in sitecustomize.__file__) + sys.customized)"
    assert main(["profile", "--out", "p", "--", sys.executable, "-c", code]) == 1
    (process,) = read_profile("p").processes
    assert process.argv[-1] == code


def test_a_process_that_cannot_be_recorded_runs_all_the_same(tmp_path):
    again = "subprocess.run([sys.executable, '-c', 'print(5)'], check=True)"
    code = f"import subprocess, shutil, sys; shutil.rmtree('p'); {again}"
    command = [sys.executable, "-m", "rayagi", "profile", "--out", "p", "--", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.startswith("5\n")
    assert "is not recorded: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_of_an_older_python_runs_and_is_told_which_it_needs(tmp_path):
    startup = Path(injection.__file__).parent / "startup" / "sitecustomize.py"
    code = f"import runpy, sys; sys.version_info = (3, 10, 2); runpy.run_path({str(startup)!r}); print(5)"
    environment = injection.injected({}, tmp_path / "p", {}, None, 1)
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout == "5\n"
    (line,) = done.stderr.splitlines()
    assert line.endswith("is not recorded: it runs Python 3.10, and the profiler needs 3.11 or later")


def test_a_schedule_waits_for_iterations(tmp_path):
    code = (
        "from rayagi import profiler\n"
        "for i in range(6):\n"
        "    with profiler.iteration(f'iteration {i}'): pass\n"
    )
    options = ["--out", "p", "--skip", "2", "--iterations", "2"]
    assert main(["profile", *options, "--", sys.executable, "-c", code]) == 0
    (process,) = read_profile("p").processes
    names = [process.name_of(int(event["name"])) for thread in process.threads for event in thread.events]
    assert names[2:] == ["iteration 2", "iteration 3"]  # number 1 warms up


def test_nothing_is_skipped_by_skip_0(tmp_path):
    code = "from rayagi import profiler\nfor i in range(3):\n    with profiler.iteration(f'iteration {i}'): pass\n"
    options = ["--out", "p", "--skip", "0", "--iterations", "1"]
    assert main(["profile", *options, "--", sys.executable, "-c", code]) == 0
    (process,) = read_profile("p").processes
    names = [process.name_of(int(event["name"])) for thread in process.threads for event in thread.events]
    assert names[2:] == ["iteration 1"]  # number 0 warms up


def test_a_program_of_fewer_iterations_is_told_which_is_the_first(capsys):
    code = "from rayagi import profiler\nwith profiler.iteration(): pass\n"
    assert main(["profile", "--out", "p", "--iterations", "1", "--", sys.executable, "-c", code]) == 0
    *_, line = capsys.readouterr().out.splitlines()
    assert line == (
        "No iteration was recorded: recording begins with iteration 2 of a process, and they made at most 1 iteration."
    )


@pytest.mark.parametrize(
    ("command", "helps"),
    [
        (["-c", "from multiprocessing.resource_tracker import main;main(5)"], True),
        (["-u", "/lib/ray/dashboard/agent.py", "--log"], True),
        (["/lib/ray/_private/runtime_env/agent/main.py"], True),
        (["-m", "ray.util.client.server"], True),
        (["-c", "from multiprocessing.forkserver import main; main(3)"], False),
        (["train.py", "--log", "/data/ray/dashboard/"], False),
        (["-m", "train", "/ray/autoscaler/"], False),
        (["-c", "print('/ray/dashboard/')"], False),
        ([], False),
    ],
)
def test_helpers_are_known_by_what_runs_and_not_by_its_arguments(command, helps):
    assert injection.is_helper(["/venv/bin/python3", *command]) == helps


def test_reasons_why_nothing_was_recorded_are_possibilities(tmp_path, capsys):
    assert main(["profile", "--out", "p", "--", "true"]) == 0
    (first, line) = capsys.readouterr().out.splitlines()
    assert "no processes" in first
    assert line.startswith("No Python process was recorded. Perhaps the program starts none, or")
    (tmp_path / "p" / "host-1-1").mkdir()  # it could not describe itself
    summarize(tmp_path / "p")
    (_, line) = capsys.readouterr().out.splitlines()
    assert line == "1 process missing: the disk was full, or they died at their start."


def test_a_package_without_native_functions_is_named_with_the_module_that_has_them(capsys):
    code = "import socket, json; socket.gethostname()"
    options = ["--native", "socket", "--native", "time", "--native", "select"]
    assert main(["profile", "--out", "p", *options, "--", sys.executable, "-c", code]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "rayagi profile: socket has no native functions of its own, so only calls by ctypes are recorded of it; those that "
        "it calls may be in _socket: --native _socket"
    )


def test_a_folder_whose_name_is_in_no_encoding_holds_a_profile(tmp_path, capfd):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff")
    code = "from rayagi import profiler\nwith profiler.operation('act'): pass"
    assert main(["profile", "--out", folder, "--", sys.executable, "-c", code]) == 0
    captured = capfd.readouterr()
    assert (captured.err, "bad\N{REPLACEMENT CHARACTER}: " in captured.out) == ("", True)
    assert set(operations(read_profile(folder))) == {"act"}
    assert main(["profile", "report", folder]) == 0


SUBINTERPRETER = """
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
other = interpreters.create()
interpreters.run_string(other, "import sys; assert 'rayagi.profiler.injection' not in sys.modules")
interpreters.destroy(other)
"""


def test_a_further_interpreter_of_a_process_is_no_process(capfd):
    assert main(["profile", "--out", "p", "--", sys.executable, "-c", SUBINTERPRETER]) == 0
    assert capfd.readouterr().err == ""
    assert len(read_profile("p").processes) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["python", "train.py"], "; a program follows two dashes: rayagi profile [options] -- COMMAND ..."),
        (["--limit-mb", "99999999999999", "--", "true"], "'99999999999999' is more than 1,000,000,000"),
    ],
)
def test_what_the_parser_refuses_is_explained(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["profile", *arguments])
    assert caught.value.code == 2
    assert capsys.readouterr().err.rstrip().endswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the program after two dashes"),
        (["--"], "give the program after two dashes"),
        (["--", "no-such-program-here"], "no-such-program-here cannot be run: No such file"),
        (["--simulator", "no_such_module", "--", "true"], "there is no module 'no_such_module'"),
        (["--out", ".", "--", "true"], "is not empty"),
        (["--skip", "3", "--", "true"], "--skip needs --iterations"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(arguments, message, capsys, tmp_path):
    (tmp_path / "mine.txt").write_text("")
    assert main(["profile", *arguments]) == 2
    assert not list(tmp_path.rglob("*.json"))
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("options", [[], ["--out", "mine"], ["--out", "new/a/b"], ["--out", "mine/a/b"]])
def test_a_program_that_cannot_be_run_leaves_the_folders_that_were_there(options, tmp_path):
    (tmp_path / "mine").mkdir()
    assert main(["profile", *options, "--", "./no-such-program"]) == 2
    assert [str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*")] == ["mine"]


def test_what_follows_two_dashes_is_the_program_s():
    given = ["profile", "--out", "p", "--", "python", "x.py", "--", "--out", "q"]
    assert split_program(given) == (["profile", "--out", "p"], ["python", "x.py", "--", "--out", "q"])
    assert split_program(["train", "--", "x"]) == (["train", "--", "x"], [])


def test_the_exit_code_is_the_program_s_even_without_a_profile(capfd):
    code = "import shutil; shutil.rmtree('p'); raise SystemExit(5)"
    assert main(["profile", "--out", "p", "--", sys.executable, "-c", code]) == 5
    assert "is not a profile" in capfd.readouterr().err


WAITS = """
import os, signal, sys, time
counts = {number: 0 for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)}
def count(number, frame):
    counts[number] += 1
    os.write(1, b"*")
for number in counts:
    signal.signal(number, count)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(counts[signal.SIGINT] + 10 * counts[signal.SIGHUP] + 40))
os.write(1, b"ready")
while True:
    time.sleep(0.05)  # a pause would miss a signal that comes just before it
"""


def wrapped(code, **options):
    command = [sys.executable, "-m", "rayagi", "profile", "--out", "p", "--", sys.executable, "-c", code]
    return subprocess.Popen(command, **options)


@pytest.mark.usefixtures("default_signals")
def test_signals_to_the_command_alone_reach_the_program():
    with wrapped(WAITS, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.read(5) == b"ready"
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            process.send_signal(number)
            assert process.stdout.read(1) == b"*"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 51


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_reaches_the_program_once_and_nohup_is_inherited():
    here, there = os.openpty()

    def in_terminal():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.login_tty(there)

    code = WAITS.replace("signal.SIGHUP, signal.SIGUSR1", "signal.SIGUSR1")
    code = code.replace("counts[signal.SIGHUP]", "(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)")
    with wrapped(code, pass_fds=(there,), preexec_fn=in_terminal) as process:
        os.close(there)
        read = b""
        while b"ready" not in read:
            read += os.read(here, 100)
        os.write(here, b"\x03")
        while b"*" not in read:
            read += os.read(here, 100)
        # The command handles its own SIGINT before the SIGTERM that comes later.
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        os.close(here)
    assert code == 51


def test_programs_that_start_in_the_same_second_get_folders_of_their_own(monkeypatch):
    monkeypatch.setattr("time.strftime", lambda _format: "now")
    for _ in range(2):
        assert main(["profile", "--", "true"]) == 0
    assert main(["profile", "--", sys.executable, "-m", "json.tool", "--help"]) == 0
    assert sorted(os.listdir("profiles")) == ["json.tool-now", "true-now", "true-now-2"]
    (process,) = read_profile("profiles/json.tool-now").processes
    assert process.name == "json.tool"


@pytest.mark.parametrize("leads_nowhere", [False, True])
def test_a_default_folder_that_cannot_be_made_is_one_sentence(leads_nowhere, tmp_path, capsys):
    if leads_nowhere:
        (tmp_path / "profiles").symlink_to("nothing")
    else:
        (tmp_path / "profiles").write_text("")
    assert main(["profile", "--", "true"]) == 2
    assert "cannot hold a profile" in capsys.readouterr().err


def test_a_program_s_module_named_collectives_is_its_own(tmp_path):
    (tmp_path / "collectives.py").write_text("code = 6")
    (tmp_path / "program.py").write_text("import collectives; raise SystemExit(collectives.code)")
    assert main(["profile", "--out", "p", "--", sys.executable, "program.py"]) == 6
    assert len(read_profile("p").processes) == 1
