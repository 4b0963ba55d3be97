"""Arguments and help of ``rayagi profile``."""

from __future__ import annotations

import argparse
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
_REPORT_EXAMPLES = """\
examples:
  rayagi profile report profiles/ant                      prints tables, writes profiles/ant/report.html
  rayagi profile report profiles/ant --html ant.html

A row is an operation, or what is outside of all; a column a set of categories that were active together, in any thread. cpu,
gpu and wait: only that. Reads profiles of running programs too, as far as they are.
"""
_DIFF_EXAMPLES = """\
examples:
  rayagi profile diff profiles/before profiles/after

Compares the mean time per iteration, by operation and by set of categories. What is marked * differs by more than chance
would make it: a permutation test over iterations.
"""
_EXPORT_EXAMPLES = """\
examples:
  rayagi profile export profiles/ant ant.perfetto-trace     open it at ui.perfetto.dev, which keeps it in the browser
  rayagi profile export profiles/ant all.perfetto-trace --merge kineto.json --merge ray.json

All events: about 60 bytes each, of which gzip leaves 10. The viewer reads compressed files too.
"""
_CALIBRATE_EXAMPLES = """\
examples:
  rayagi profile calibrate -- python train.py --steps 20000
  rayagi profile calibrate --rounds 5 -- rayagi train Ant-v5 --iterations 20 --seed 0

Runs the program several times: plain, with everything intercepted, with native calls recorded, with everything recorded.
What a run takes longer, in CPU time of all its processes, by the number of events is the cost of one. Reports of this
program on this machine then subtract it. Give the program arguments with which it does the same work each time and ends by
itself, after some 10 to 30 seconds; rounds go on while runs that record nothing spread over more than 3 %.
"""
_VALIDATE_EXAMPLES = """\
examples:
  rayagi profile validate -- python train.py --steps 20000

After `rayagi profile calibrate`: plain and recorded runs by turns, and the error of the recorded ones' times before and
after the profiler's cost is subtracted.
"""


def add_profile(commands: Any) -> None:
    """Add ``rayagi profile`` and its subcommands. `split_program` has taken away ``--`` and the program after it."""
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
    more = parser.add_subparsers(metavar="COMMAND", prog="rayagi profile", title="with a recorded profile")
    report = _command(
        more, "report", "print a profile's tables, and write its report as HTML", _REPORT_EXAMPLES
    )
    report.add_argument("profile", type=Path, metavar="DIR", help="profile")
    report.add_argument("--html", type=Path, metavar="FILE", help="page to write (default DIR/report.html)")
    report.add_argument(
        "--uncorrected", action="store_true", help="do not subtract the profiler's own cost (see `calibrate`)"
    )
    diff = _command(more, "diff", "compare two profiles", _DIFF_EXAMPLES)
    diff.add_argument("first", type=Path, metavar="A", help="profile")
    diff.add_argument("second", type=Path, metavar="B", help="profile to compare with it")
    export = _command(more, "export", "write a profile as a Perfetto trace", _EXPORT_EXAMPLES)
    export.add_argument("profile", type=Path, metavar="DIR", help="profile")
    export.add_argument("out", type=Path, metavar="FILE", help="file to write")
    export.add_argument(
        "--merge",
        type=Path,
        action="append",
        default=[],
        metavar="JSON",
        help="a trace of torch.profiler or `ray timeline` to show beside it, on the same clock; may be repeated",
    )
    calibrate = _command(more, "calibrate", "measure what recording costs a program", _CALIBRATE_EXAMPLES)
    validate = _command(
        more, "validate", "check what is left of that cost in corrected times", _VALIDATE_EXAMPLES
    )
    for each in (calibrate, validate):
        each.usage = f"{each.prog} [options] -- COMMAND ..."
        each.add_argument(
            "--rounds",
            type=count_argument,
            default=3,
            metavar="N",
            help="runs of each kind, at least (default 3)",
        )
        # Options of the command above: not set here, its defaults stay.
        each.add_argument(
            "--simulator", action="append", default=argparse.SUPPRESS, metavar="MODULE", help="as of profile"
        )
        each.add_argument(
            "--limit-mb", type=count_argument, default=argparse.SUPPRESS, metavar="MB", help="as of profile"
        )
    validate.add_argument("--json", type=Path, metavar="FILE", help="also write all runs to this file")


def _command(commands: Any, name: str, text: str, examples: str) -> Any:
    parser = add_command(commands, name, text, examples)
    parser.set_defaults(command=f"profile {name}")
    return parser


def split_program(argv: list[str]) -> tuple[list[str], list[str]]:
    """Arguments of ``rayagi profile``, and the program with its own; other commands have no program."""
    if argv[:1] != ["profile"] or "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]
