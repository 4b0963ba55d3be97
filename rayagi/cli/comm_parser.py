"""Arguments and help of ``rayagi comm``."""

from __future__ import annotations

from typing import Any

from rayagi.cli.arguments import add_command, add_flag, add_value

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
    add_value(parser, "--layout", "LAYOUT", "where the GMIs are: 4x3, 2x4x3, 3+2, '3+2|4'", required=True)
    size = parser.add_mutually_exclusive_group()
    add_value(size, "--size", "BYTES", "of the gradients: 440000, 0.44MB, 1MiB (default 0.44MB)")
    add_value(size, "--task", "TASK", "the gradients of this environment's networks")
    add_value(size, "--params", "N", "float32 parameters: 110k")
    add_value(
        parser,
        "--profile",
        "FILE",
        "measured costs of operations on the target machine (JSON); default: nominal rates of a DGX A100",
    )
    add_flag(parser, "--json", "print JSON, in seconds and bytes")


def _add_comm_bench(commands: Any) -> None:
    parser = add_command(
        commands,
        "bench",
        "measure the cost of compositions of collectives here, and compare the cost models with it",
        _BENCH_EXAMPLES,
    )
    what = parser.add_argument_group("what to measure")
    add_value(
        what,
        "--layouts",
        "LAYOUT",
        "where the GMIs are: 4x3, 3+2, '3+2|4' (default 2x1 2x2)",
        nargs="+",
        default=["2x1", "2x2"],
    )
    add_value(
        what,
        "--sizes",
        "BYTES",
        "of float32 gradients: 440000, 1MiB (default 440kB 1160kB 6MB, the preprint's Table 7)",
        nargs="+",
        default=[440_000, 1_160_000, 6_000_000],
    )
    add_value(
        what,
        "--compositions",
        "NAME",
        "ip_only, rp_only, hybrid:K, har, mpr, mrr, device_rp, device_ip (default: all that apply)",
        nargs="+",
        default=[],
    )
    how = parser.add_argument_group("how")
    add_value(how, "--time", "TIME", "for all timings together (default 45s)", default=45.0)
    add_value(
        how,
        "--repeats",
        "N",
        "number of timings of each composition, interleaved with the others (default 7)",
        default=7,
    )
    add_value(
        how, "--ray", "ADDRESS", "measure between nodes of this Ray cluster, one per node of the layout"
    )
    where = parser.add_argument_group("where it goes")
    add_value(where, "--out", "FOLDER", "results.json, cost_model.png (default runs/comm-DATE-TIME)")
    add_value(
        where,
        "--profile-out",
        "FILE",
        "profile for `rayagi comm plan --profile` (default FOLDER/profile.json)",
    )
