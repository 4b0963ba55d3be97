"""Arguments and help of ``rayagi comm``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayagi.cli.arguments import add_command, bytes_argument, count_argument, duration_argument

_BENCH_EXAMPLES = """\
examples:
  rayagi comm bench                                  2 and 4 processes, about a minute
  rayagi comm bench --layouts 2x3 --sizes 440kB 6MB  3 GMIs on each of two devices
  rayagi comm bench --layouts 2x1x2 --ray HOST:6379  two nodes of a Ray cluster
  rayagi comm bench --profile-out machine.json       then: rayagi comm plan --layout 4x3 --profile machine.json

One process is started per GMI. First each step of the compositions is timed at every size. These times are the profile:
the alpha-beta model is fitted to it, and the paper's projection takes its unit costs from it. Then every composition
that applies is checked against a float64 sum, and timed several times, interleaved with the others. A time is the mean of
consecutive sums on the slowest member. The table shows the median, the 10th and the 90th percentile over the repeats, and
the relative error of both models: (measured - projected) / projected.

If the machine has as many GPUs as the layout has devices, each member uses the GPU of its device. Otherwise, and on a
cluster, devices are nominal and other primitives replace those of GPUs; the table says so.

Ctrl-C ends the benchmark early and keeps the measurements so far.
"""


def add_comm(commands: Any) -> None:
    """Add ``rayagi comm`` and its subcommands."""
    text = "how GMIs exchange gradients"
    parser = commands.add_parser("comm", help=text, description=f"{text[0].upper()}{text[1:]}.")
    commands_of_comm = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_comm_plan(commands_of_comm)
    _add_comm_bench(commands_of_comm)


def _add_comm_plan(commands: Any) -> None:
    examples = (
        "examples:\n  rayagi comm plan --layout 4x3                     4 devices of 3 GMIs\n"
        "  rayagi comm plan --layout 2x4x3 --task Ant-v5     two such nodes, the task's own networks\n"
        "  rayagi comm plan --layout '3+2|4' --size 6MB      a node with 3 and 2 GMIs, a node with 4 on one device\n"
        "  rayagi comm plan --layout 4x3 --profile machine.json\n"
    )
    parser = add_command(
        commands,
        "plan",
        "show how a layout would reduce its gradients, the projected cost, and why",
        examples,
    )
    parser.set_defaults(command="comm plan")
    parser.add_argument(
        "--layout", required=True, metavar="LAYOUT", help="where the GMIs are: 4x3, 2x4x3, 3+2, '3+2|4'"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--size",
        type=bytes_argument,
        metavar="BYTES",
        help="of the gradients: 440000, 0.44MB, 1MiB (default 0.44MB)",
    )
    size.add_argument("--task", metavar="TASK", help="the gradients of this environment's networks")
    size.add_argument("--params", type=count_argument, metavar="N", help="float32 parameters: 110k")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="measured costs of operations on the target machine (JSON); default: nominal rates of a DGX A100",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds and bytes")


def _add_comm_bench(commands: Any) -> None:
    parser = add_command(
        commands,
        "bench",
        "measure the cost of compositions of collectives here, and compare the cost models with it",
        _BENCH_EXAMPLES,
    )
    parser.set_defaults(command="comm bench")
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--layouts",
        nargs="+",
        default=["2x1", "2x2"],
        metavar="LAYOUT",
        help="where the GMIs are: 4x3, 3+2, '3+2|4' (default 2x1 2x2)",
    )
    what.add_argument(
        "--sizes",
        nargs="+",
        type=bytes_argument,
        default=[440_000, 1_160_000, 6_000_000],
        metavar="BYTES",
        help="of float32 gradients: 440000, 1MiB (default 440kB 1160kB 6MB, the preprint's Table 7)",
    )
    what.add_argument(
        "--compositions",
        nargs="+",
        default=[],
        metavar="NAME",
        help="ip_only, rp_only, hybrid:K, har, mpr, mrr, device_rp, device_ip (default: all that apply)",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--time",
        type=duration_argument,
        default=45.0,
        metavar="TIME",
        help="for all timings together (default 45s)",
    )
    how.add_argument(
        "--repeats",
        type=count_argument,
        default=7,
        metavar="N",
        help="number of timings of each composition, interleaved with the others (default 7)",
    )
    how.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="measure between nodes of this Ray cluster, one per node of the layout",
    )
    where = parser.add_argument_group("where it goes")
    where.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="results.json, cost_model.png (default runs/comm-DATE-TIME)",
    )
    where.add_argument(
        "--profile-out",
        type=Path,
        metavar="FILE",
        help="profile for `rayagi comm plan --profile` (default FOLDER/profile.json)",
    )
