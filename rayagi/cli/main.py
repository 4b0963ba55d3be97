"""Reads the command line, runs the command, and turns what went wrong into a message and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module

from rayagi.cli.failures import FAILED, INTERRUPTED, explain
from rayagi.cli.parser import build_parser

_COMMANDS = {
    "train": "rayagi.cli.train",
    "evaluate": "rayagi.cli.evaluate",
    "plan": "rayagi.cli.plan",
    "envs": "rayagi.cli.envs",
    "report": "rayagi.cli.report",
}
"""Module of each command; its ``run(arguments)`` returns the exit code."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 when it did what was asked, 1 when a run failed, 2 for bad input, 130 after Ctrl-C.
    """
    arguments = build_parser().parse_args(argv)
    try:
        # As with `python -m rayagi`: MODULE:ID finds modules of the working folder. Ray passes it on to the GMIs.
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        command: Callable[..., int] = import_module(_COMMANDS[arguments.command]).run
        return command(arguments)
    except KeyboardInterrupt:
        print("rayagi: stopped at once; what was saved before stands", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output, such as `head`, has seen enough; Python would complain again at exit.
        sys.stderr.close()
        return 0
    except Exception as error:
        return _report(error, debug=arguments.debug)


def _report(error: Exception, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    known = explain(error)
    if known is not None:
        message, code = known.message, known.exit_code
    else:
        first_line = (str(error).splitlines() or [""])[0]
        hint = "" if debug else "; --debug shows the traceback"
        message, code = f"unexpected {type(error).__name__}: {first_line}{hint}", FAILED
    print(f"rayagi: {message}", file=sys.stderr)
    for note in getattr(error, "__notes__", ()):
        print(note, file=sys.stderr)
    return code
