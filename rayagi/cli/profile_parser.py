"""Arguments and help of ``rayagi profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayagi.cli.arguments import add_command, count_argument
from rayagi.profiler.session import DEFAULT_LIMIT_MB

_EXAMPLES = """\
examples:
  rayagi profile -- python train.py --seed 3
  rayagi profile --simulator my_simulator -- python train.py
  rayagi profile --skip 20 --iterations 10 -- python train.py     iterations that the program annotates

Records the program, its threads, and all Python processes that it starts, without a change to it: calls of MuJoCo,
EnvPool, torch and Ray's core, and what it annotates itself:

  from rayagi import profiler
  with profiler.iteration():
      with profiler.operation("simulate"):
          ...

The exit code is the program's. Everything recorded so far survives its death.
"""


def add_profile(commands: Any) -> None:
    """Add ``rayagi profile``. What follows ``--`` is the program's; `split_program` takes it away before."""
    parser = add_command(commands, "profile", "record where the time of a program goes", _EXAMPLES)
    parser.usage = "rayagi profile [options] -- COMMAND ..."
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder (default profiles/NAME-TIME)")
    parser.add_argument(
        "--simulator",
        action="append",
        default=[],
        metavar="MODULE",
        help="a top-level module whose native functions count as a simulator's; may be repeated",
    )
    parser.add_argument(
        "--iterations", type=count_argument, metavar="N", help="record N iterations (default: everything)"
    )
    parser.add_argument(
        "--skip", type=count_argument, default=0, metavar="N", help="iterations before them (default 0)"
    )
    parser.add_argument(
        "--limit-mb",
        type=count_argument,
        default=DEFAULT_LIMIT_MB,
        metavar="MB",
        help=f"disk space for each process; the rest is dropped and counted (default {DEFAULT_LIMIT_MB})",
    )


def split_program(argv: list[str]) -> tuple[list[str], list[str]]:
    """Arguments of ``rayagi profile``, and the program with its own; other commands have no program."""
    if argv[:1] != ["profile"] or "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]
