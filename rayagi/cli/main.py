"""Entry point: parses the command line, runs the command, and maps errors to messages and exit codes."""

from __future__ import annotations

import argparse
import atexit
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from rayagi import refuse_hidden_packages
from rayagi.cli.failures import FAILED, INTERRUPTED, UsageError, explain, stopped_text
from rayagi.cli.output import complain, silence
from rayagi.cli.parser import build_parser
from rayagi.cli.profile_parser import split_program
from rayagi.config.trusted_modules import in_run_folder
from rayagi.coordinator.lost_ray import NotEndedError, RayLostError, tell_lost, when_ray_is_lost
from rayagi.run.interrupt import EARLY_LIMIT_S, EarlyEnd

_LISTINGS = (
    "envs",
    "info",
    "plan",
    "report",
    "comm plan",
    "channels",
    "replay info",
    "replay sample",
    "profile report",
    "profile diff",
)
"""Commands that succeed even if the reader of their output, such as `head`, closes early."""


_CHILD_ENDS_S = 2.0
"""That a process has to end by SIGTERM."""
_WITH_RAY = ("train", "search", "serve", "comm bench")
"""Commands that always start Ray's processes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 on success, 1 on failure, 2 for invalid input, 130 if interrupted.
    """
    own, program = split_program(list(sys.argv[1:] if argv is None else argv))
    arguments, unknown = build_parser().parse_known_args(own)
    if unknown:
        arguments.refuse(unknown)
    arguments.program = program
    try:
        _set_import_path(arguments)
        # ``comm plan`` is rayagi.cli.comm_plan, whose ``run(arguments)`` returns the exit code.
        module = arguments.command.replace(" ", "_").replace("-", "_")
        command: Callable[..., int] = import_module(f"rayagi.cli.{module}").run
        with EarlyEnd(_end_overdue) if arguments.command in _WITH_RAY else nullcontext():
            code = command(arguments)
        if arguments.command in _LISTINGS:
            sys.stdout.flush()
        return code
    except (KeyboardInterrupt, SystemExit) as error:  # Ray converts SIGTERM to SystemExit during its startup
        complain("\n".join([f"rayagi: {stopped_text(error)}", *_notes(error)]))
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and arguments.command in _LISTINGS:
            silence(sys.stdout)
            return 0
        return _report(error, debug=arguments.debug)


def _set_import_path(arguments: argparse.Namespace) -> None:
    """MODULE:ID finds modules in the working folder, as with `python -m rayagi`; Ray passes the path to the GMIs.

    A run folder may be somebody else's: its files must not take the place of modules that commands import.

    Raises:
        HiddenPackageError: a package in the working folder has the name of one of rayagi's.
        UsageError: the command uses Ray in a run folder; Ray's processes import from the driver's working folder.
    """
    folder = os.getcwd()
    if getattr(arguments, "trust_modules", False) or not in_run_folder(Path(folder)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
        if not arguments.command.startswith("profile"):  # the profiled program may have any packages
            refuse_hidden_packages()
        return
    if _uses_ray(arguments):
        raise UsageError(
            f"{folder} is in a run folder, whose files Ray's processes would import; start it elsewhere"
        )
    sys.path[:] = [
        entry for entry in sys.path if not Path(entry).resolve().is_relative_to(Path(folder).resolve())
    ]


def _uses_ray(arguments: argparse.Namespace) -> bool:
    """Whether a command starts Ray's processes, or asks those of a cluster, which take the driver's path too."""
    if arguments.command == "info":
        return bool(arguments.cluster)
    if arguments.command == "plan":
        asks_cluster = arguments.machine is None and os.environ.get("RAY_ADDRESS", "local") not in (
            "",
            "local",
        )
        return asks_cluster or arguments.explain or arguments.nodes is not None
    return arguments.command in _WITH_RAY


def _report(error: Exception, *, debug: bool) -> int:
    if debug:
        with suppress(OSError):
            traceback.print_exception(error)
    known = explain(error)
    if known is not None:
        message, code = str(known.error), known.exit_code
    else:
        first_line = (str(error).splitlines() or [""])[0]
        hint = "" if debug else "; --debug shows the traceback"
        message, code = f"unexpected {type(error).__name__}: {first_line}{hint}", FAILED
    complain("\n".join([f"rayagi: {message}", *_notes(error)]))
    return code


def _notes(error: BaseException) -> list[str]:
    """Notes that the command added to the error."""
    return list(getattr(error, "__notes__", ()))


def run_process() -> NoReturn:
    """Run the command and end the process, without the exit handlers of native libraries.

    Destructors and threads of these libraries (two gRPCs, Arrow's allocator, torch) are slow and can deadlock: one finished
    and saved training did not end. Python's own exit functions do run.
    """
    not_ours = _children()
    _open_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files have what its encoding may not have
        with suppress(OSError):  # it flushes; a full disk is reported at the end, if a command prints
            sys.stdout.reconfigure(errors="backslashreplace")
    with when_ray_is_lost(_end_at_once):
        code = main()
    _end_children()
    atexit._run_exitfuncs()
    # What else an environment's code has started in this process; Ray does so in the GMIs. And a Ray whose start a signal
    # has interrupted: its agents would outlive it by a minute.
    left = _children() - not_ours
    while left:
        further = set().union(*map(_children, left))
        for pid in left:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)
        left = further
    _end(code)


def _end_children() -> None:
    """End what an environment's code has left of multiprocessing's processes: Python would wait for them without end."""
    multiprocessing = sys.modules.get("multiprocessing")
    children = [] if multiprocessing is None else multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(_CHILD_ENDS_S)
        child.kill()


def _children(of: int | str = "self") -> set[int]:
    """Ids of a process's children. At this one's start: of a shell that it has replaced, as `> >(tee log)` starts one."""
    found: set[int] = set()
    for children in Path(f"/proc/{of}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found.update(map(int, children.read_text().split()))
    return found


def _open_closed_streams() -> None:
    """Give the process those standard streams that it was started without: they lead to /dev/null.

    Else nothing could be printed, and a file that a command opens would have the number of one of them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # has the least free number, which is this one
        if getattr(sys, name) is None:
            # Open to the end of the process.
            setattr(sys, name, open(os.devnull, "r" if number == 0 else "w"))  # noqa: SIM115


def _end_overdue(reason: str) -> None:
    """End a command that a signal has not ended."""
    # Imported here: it loads Ray, which the command has done before it could hang.
    from rayagi.coordinator.cluster import kill_local_ray

    tell_lost(NotEndedError(reason, EARLY_LIMIT_S, kill_local_ray))


def _end_at_once(error: RayLostError) -> None:
    """End the process beside its main thread, which waits for a Ray that is not there, or is about to be ended by it."""
    code = _report(error, debug=False)
    if isinstance(error, NotEndedError):
        code = INTERRUPTED
    error.end_others()
    _end(code)


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
            stream.flush()
    os._exit(code)
