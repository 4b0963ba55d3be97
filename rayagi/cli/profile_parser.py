"""Arguments and help of ``rayagi profile``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from rayagi.cli.arguments import add_command, add_flag, add_value, count_argument, skip_argument
from rayagi.profiler.measurement import MOST_ROUNDS
from rayagi.profiler.session import DEFAULT_LIMIT_MB, MOST_LIMIT_MB

_EXAMPLES = """\
examples:
  rayagi profile -- python train.py --seed 3
  rayagi profile --simulator my_simulator -- python train.py
  rayagi profile --skip 20 --iterations 10 -- python train.py     iterations that the program annotates
  rayagi profile --gpu --iterations 10 -- python train.py         what the GPU did in them, too

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

If only some iterations were recorded, their times are extrapolated to all of the run, or to --iterations.

The time that recording itself took is removed where `rayagi profile calibrate` has measured it for this program, on this
machine, with this Python; of several calibrations the one with the most arguments in common counts.
"""
_CALIBRATE_EXAMPLES = """\
examples:
  rayagi profile calibrate -- python train.py --steps 20000
  rayagi profile calibrate -- rayagi train Ant-v5 --gmis 1 --iterations 40
  rayagi profile calibrate --rounds 30 -- python train.py --steps 20000      on a machine that is not quiet
  rayagi profile calibrate --gpu -- python train.py                         calls of CUDA, too

Measures what recording an event costs in this program on this machine, in CPU time of all its processes, so that `rayagi
profile report` can remove it. The program runs once to count events; then the same work is done uninstrumented and with each
kind of event that it has alone:

  call         an intercepted call of a native function
  annotation   an operation, phase or iteration
  activity     what rayagi's Python code records around its own kernels, collectives and waits

A cost is the difference of the total CPU times, by the number of events. A program that annotates its iterations, as `rayagi
train` does, changes between them from one iteration to the next: 30 or more in 10 to 30 s are best, and two runs are often
enough. Any other program runs again for each, ten times or more, and small costs drown in noise: annotate its iterations.

Rounds are repeated until the uninstrumented times of three in a row spread over at most 3 %, or those of more in a row so
little that their mean is as well known: six over 4.2 %, twelve over 6 %. The program must end by itself
and do the same work each time: give it a number of steps or iterations, not a time, and no fixed name for its output.
"""
_VALIDATE_EXAMPLES = """\
examples:
  rayagi profile validate -- python train.py --steps 20000
  rayagi profile validate --repetitions 8 --json -- python train.py --steps 20000

Runs the program in turns with and without the profiler, and compares CPU times: uninstrumented, instrumented, and
corrected by the calibration that `rayagi profile report` would use. The error is that of the corrected time. Calibrate
first.
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
  rayagi profile export profiles/ant ant.parquet            a table for pandas, Polars or DuckDB; or ant.arrow

All events. In a Perfetto trace about 60 bytes each, of which gzip leaves 10; the viewer reads compressed files too. In a
table a row each: process, thread, category, name, start_ns, end_ns, depth, iteration.
"""


def add_profile(commands: Any) -> None:
    """Add ``rayagi profile`` and its subcommands. `split_program` has taken away ``--`` and the program after it."""
    parser = add_command(commands, "profile", "record where the time of a program goes", _EXAMPLES)
    parser.usage = "rayagi profile [options] -- COMMAND ..."
    add_value(parser, "--out", "DIR", "new folder (default profiles/NAME-TIME)")
    _add_recording(parser)
    add_value(parser, "--iterations", "N", "record N iterations (default: everything)")
    parser.add_argument(
        "--skip",
        type=skip_argument,
        default=0,
        metavar="N",
        help="iterations before them; the last one warms recording up, so without any the first is not recorded (default 0)",
    )
    add_flag(
        parser,
        "--gpu",
        "record calls of CUDA, kernels and copies too, of processes that use torch on a GPU; they "
        "are in memory until recording ends, so name --iterations",
    )
    _mention_dashes(parser)
    more = parser.add_subparsers(
        metavar="COMMAND", prog="rayagi profile", title="with a recorded profile, or a program again"
    )
    report = add_command(
        more, "report", "print a profile's tables, and write its report as HTML", _REPORT_EXAMPLES
    )
    add_value(report, "profile", "DIR", "profile")
    add_value(report, "--html", "FILE", "page to write (default DIR/report.html)")
    add_value(report, "--calibration", "FILE", "calibration to use (default: the stored one that fits)")
    add_value(
        report,
        "--iterations",
        "N",
        "of the run, whose times are estimated (default: as many as the program made)",
    )
    add_flag(report, "--raw", "do not remove the time that recording took")
    diff = add_command(more, "diff", "compare two profiles", _DIFF_EXAMPLES)
    diff.add_argument("first", type=Path, metavar="A", help="profile")
    diff.add_argument("second", type=Path, metavar="B", help="profile to compare with it")
    export = add_command(more, "export", "write a profile as a Perfetto trace or a table", _EXPORT_EXAMPLES)
    add_value(export, "profile", "DIR", "profile")
    add_value(export, "out", "FILE", "file to write; .arrow and .parquet are tables")
    add_value(
        export,
        "--merge",
        "JSON",
        "a trace of torch.profiler or `ray timeline` to show beside it, on the same clock; may be repeated",
        action="append",
        default=[],
    )
    _add_calibrate(more)
    _add_validate(more)


def _mention_dashes(parser: argparse.ArgumentParser) -> None:
    """Where a program is given without two dashes, its name is an unknown command."""
    error = parser.error

    def error_with_dashes(message: str) -> NoReturn:
        is_command = "invalid choice" in message
        error(f"{message}; a program follows two dashes: {parser.usage}" if is_command else message)

    parser.error = error_with_dashes  # type: ignore[method-assign]


def _add_calibrate(commands: Any) -> None:
    parser = add_command(
        commands, "calibrate", "measure what recording costs in a program", _CALIBRATE_EXAMPLES
    )
    parser.usage = "rayagi profile calibrate [options] -- COMMAND ..."
    add_value(parser, "--rounds", "N", f"give up after N rounds (default {MOST_ROUNDS})", default=MOST_ROUNDS)
    add_flag(parser, "--gpu", "also measure what recording adds to calls of CUDA, in a loop of them")
    _add_recording(parser)


def _add_validate(commands: Any) -> None:
    parser = add_command(commands, "validate", "measure how well the correction works", _VALIDATE_EXAMPLES)
    parser.usage = "rayagi profile validate [options] -- COMMAND ..."
    add_value(parser, "--repetitions", "N", "of each (default 5, at least 2)", default=5)
    add_flag(parser, "--json", "print JSON, times in ns")
    _add_recording(parser)


def _add_recording(parser: Any) -> None:
    """Options of all commands that record a program."""
    add_value(
        parser,
        "--simulator",
        "MODULE",
        "a top-level module whose native functions count as a simulator's; may be repeated",
        action="append",
        default=[],
    )
    add_value(
        parser,
        "--native",
        "MODULE",
        "one whose native functions count as other native code, such as numpy, not as Python; may be repeated",
        action="append",
        default=[],
    )
    parser.add_argument(
        "--limit-mb",
        type=_limit_argument,
        metavar="MB",
        help=f"disk space for each process; the rest is dropped and counted (default {DEFAULT_LIMIT_MB})",
        default=DEFAULT_LIMIT_MB,
    )


def _limit_argument(text: str) -> int:
    limit_mb: int = count_argument(text)
    if limit_mb > MOST_LIMIT_MB:
        raise argparse.ArgumentTypeError(f"'{text}' is more than {MOST_LIMIT_MB:,}")
    return limit_mb


def split_program(argv: list[str]) -> tuple[list[str], list[str]]:
    """Arguments of ``rayagi profile``, and the program with its own; other commands have no program."""
    if argv[:1] != ["profile"] or "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]
