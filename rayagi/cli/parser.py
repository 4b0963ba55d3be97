"""What the commands take, and the help that teaches them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from rayagi.config.spec import Backend
from rayagi.run.quantities import parse_bytes, parse_count, parse_duration_s
from rayagi.run.versions import rayagi_version

_TRAIN_EXAMPLES = """\
examples:
  rayagi train Ant-v5                                 with the task's preset, on all cores
  rayagi train Ant-v5 --time 5m --gmis 2              two GMIs, five minutes
  rayagi train Hopper-v5 --env-steps 2M --set ppo.learning_rate=1e-4
  rayagi train Ant-v5 --evaluate-every 50 --stop-return 2000
  rayagi train Ant-v5 --config ant.yaml --seed 3 --name ant-seed3
  rayagi train --resume runs/Ant-v5-20260102-030405   go on after Ctrl-C or a crash
  rayagi train --resume runs/ant-seed3 --time 1h      go on until one hour of training in all

limits count from the start of the run, resumed or not; the first one reached ends it. Without any, the
configuration's total_env_steps decides, or ten minutes. With --resume, the limits given now replace those given
before. --stop-return is compared with the evaluation's mean return where --evaluate-every is on, else with the
mean return of the last 100 training episodes, once there are 100; the best checkpoint is chosen by the same.

Ctrl-C, SIGTERM or closing the terminal finishes what is being computed, saves, and says how to resume; Ctrl-C
after that quits at once.
"""
_BENCH_EXAMPLES = """\
examples:
  rayagi comm bench                                  2 and 4 processes, about a minute
  rayagi comm bench --layouts 2x3 --sizes 440kB 6MB  3 GMIs on each of two devices
  rayagi comm bench --layouts 2x1x2 --ray HOST:6379  two nodes of a Ray cluster
  rayagi comm bench --profile-out machine.json       then: rayagi comm plan --layout 4x3 --profile machine.json

A process is started for each GMI. Each step that compositions are made of is timed at every size: this is the profile, to
which the alpha-beta model is fitted and from which the paper's projection takes its unit costs. Then every
composition that applies is checked against a float64 sum, and timed: all of them in turns, several times. A time is the
mean of sums one right after another on the slowest member; shown are the median and the 10th and 90th percentile
over the repeats, and how far they are from what both models project: (measured - projected) / projected.

Where the machine has as many GPUs as the layout has devices, each member uses its device's. Else, and in a cluster,
devices are only labels, and other primitives stand in: the table says so.

Ctrl-C ends it early and keeps what was measured.
"""
_EPILOG = """\
start here:
  rayagi envs                      which tasks there are
  rayagi info                      what this machine has, and how its GPUs may be shared
  rayagi plan Ant-v5               how this machine would be cut, without starting anything
  rayagi search Ant-v5             how it should be cut to train fastest, by trying
  rayagi train Ant-v5 --time 5m    train, watch, save; ends with a report
  rayagi evaluate runs/NAME --video out.mp4
  rayagi comm plan --layout 4x3    how 3 GMIs on each of 4 GPUs would reduce gradients
  rayagi comm bench                what reducing gradients costs on this machine

exit codes: 0 done, 1 failed, 2 bad input, 130 told to stop (by Ctrl-C, SIGTERM or a closed terminal: saved; during
start-up or by Ctrl-C once more: what was saved before stands). Ray's cluster is taken from RAY_ADDRESS where that
is set, by `rayagi plan` too; else a local one is started.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command."""
    parser = argparse.ArgumentParser(
        prog="rayagi",
        description="Train robots with reinforcement learning on shared or sliced devices, on Ray.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_VersionAction, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_evaluate(commands)
    _add_info(commands)
    _add_plan(commands)
    _add_search(commands)
    _add_envs(commands)
    _add_report(commands)
    _add_cleanup(commands)
    _add_comm(commands)
    return parser


class _VersionAction(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"rayagi {rayagi_version()}")
        parser.exit()


def _add_train(commands: Any) -> None:
    parser = _command(commands, "train", "train a policy, save it, and report", _TRAIN_EXAMPLES)
    parser.add_argument("task", nargs="?", metavar="TASK", help="environment id; `rayagi envs` lists them")
    _add_spec_options(parser)
    limits = parser.add_argument_group("when to end")
    limits.add_argument("--time", type=_duration, metavar="TIME", help="training time: 90s, 5m, 1h30m")
    limits.add_argument(
        "--env-steps", type=_count, metavar="N", help="environment steps of all GMIs: 500k, 2M"
    )
    limits.add_argument("--iterations", type=_count, metavar="N", help="iterations (rollout and update)")
    limits.add_argument("--stop-return", type=_return, metavar="R", help="mean return at which to end")
    during = parser.add_argument_group("while it runs")
    during.add_argument("--evaluate-every", type=_count, metavar="N", help="evaluate every N iterations")
    during.add_argument(
        "--checkpoint-every",
        type=_interval,
        metavar="N|TIME",
        help="save every N iterations or every TIME (default 60s); always at the end too",
    )
    during.add_argument(
        "--dashboard",
        action="store_true",
        help="start Ray's dashboard with the local Ray, and say where it is",
    )
    folder = parser.add_argument_group("where it goes")
    folder.add_argument("--out", type=Path, help="folder of run folders (default runs)")
    folder.add_argument("--name", type=_name, help="name of the run folder (default TASK-DATE-TIME)")
    folder.add_argument("--resume", type=Path, metavar="RUN", help="go on with this run folder")


def _add_evaluate(commands: Any) -> None:
    examples = (
        "examples:\n  rayagi evaluate runs/NAME --episodes 20\n  rayagi evaluate runs/NAME --video out.mp4\n"
        "  rayagi evaluate runs/NAME --checkpoint last --seed 7\n"
    )
    parser = _command(
        commands, "evaluate", "run whole episodes with a trained policy, without noise", examples
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--episodes", type=_count, default=10, metavar="N", help="episodes (default 10)")
    parser.add_argument("--seed", type=_seed, default=0, help="seed of the episodes' starts (default 0)")
    parser.add_argument(
        "--checkpoint", default="best", metavar="WHICH", help="best (default), last, or a name"
    )
    parser.add_argument(
        "--video", type=Path, metavar="FILE", help="also film one episode, e.g. out.mp4 or out.gif"
    )


def _add_info(commands: Any) -> None:
    examples = (
        "examples:\n  rayagi info\n  rayagi info --json dgx.json      record it, to plan for it elsewhere\n"
        "  rayagi info --cluster            every node of the Ray cluster\n"
    )
    parser = _command(commands, "info", "show what there is to plan for, and how it may be shared", examples)
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write it as JSON, to FILE or standard output"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--cluster", action="store_true", help="the Ray cluster at RAY_ADDRESS, or the one of this machine"
    )
    source.add_argument("--machine", type=Path, metavar="FILE", help="a recorded machine (JSON)")


def _add_plan(commands: Any) -> None:
    examples = (
        "examples:\n  rayagi plan Ant-v5 --gmis 4\n  rayagi plan Ant-v5 --machine dgx.json\n"
        "  rayagi plan Ant-v5 --explain                  which roles should share a GMI, in numbers measured here\n"
        "  rayagi plan Ant-v5 --nodes 16 --gpus-per-node 8 --gpu H100    what such a cluster would do, and what binds it\n"
    )
    parser = _command(
        commands, "plan", "show how a machine would be cut, without starting anything", examples
    )
    parser.add_argument("task", metavar="TASK", help="environment id; `rayagi envs` lists them")
    _add_spec_options(parser)
    parser.add_argument(
        "--machine",
        type=Path,
        metavar="FILE",
        help="a recorded machine (JSON) instead of this one, or of the cluster at RAY_ADDRESS",
    )
    group = parser.add_argument_group("from unit costs, measured here by a short profile and kept")
    group.add_argument("--explain", action="store_true", help="compare the templates (GMI-DRL, Tables 1-3)")
    group.add_argument("--nodes", type=_count, metavar="N", help="forecast a cluster of 1, 2, 4, ... N nodes")
    group.add_argument("--gpus-per-node", type=_count, default=8, metavar="N", help="default 8")
    group.add_argument(
        "--gpu", default="H100", metavar="NAME", help="V100, A100-40, A100-80, H100 (default), H200"
    )
    group.add_argument(
        "--cores-per-node", type=_count, metavar="N", help="default: as in the vendor's own host"
    )


def _add_search(commands: Any) -> None:
    examples = (
        "examples:\n  rayagi search Ant-v5\n  rayagi search Ant-v5 --budget 5m --objective time_to_return\n"
        "  rayagi search Ant-v5 --gmis 2        only how many environments two GMIs should have\n\n"
        "Tries real training at each candidate (GMI-DRL, Algorithm 1). Measurements are kept by machine, task, code and\n"
        "library versions: a search goes on where the last one was interrupted, and `rayagi train --gmis auto` uses them.\n"
    )
    parser = _command(
        commands, "search", "find the numbers of GMIs and environments that train fastest here", examples
    )
    parser.add_argument("task", metavar="TASK", help="environment id; `rayagi envs` lists them")
    _add_spec_options(parser)
    group = parser.add_argument_group("how to search")
    group.add_argument(
        "--objective",
        choices=("throughput", "time_to_return"),
        default="throughput",
        help="steps per second, or those discounted by what a larger batch costs in learning",
    )
    group.add_argument("--budget", type=_duration, metavar="TIME", help="start no trial after this long: 5m")
    group.add_argument("--again", action="store_true", help="measure anew what was measured before")
    group.add_argument(
        "--cache", type=Path, metavar="DIR", help="measurements (default ~/.cache/rayagi/search)"
    )
    group.add_argument("--out", type=Path, metavar="DIR", help="figures (default runs/search-TASK)")
    group.add_argument("--json", action="store_true", help="print the result as JSON, progress on stderr")


def _add_envs(commands: Any) -> None:
    examples = (
        "examples:\n  rayagi envs\n  rayagi envs ant        what has 'ant' in its name, Gymnasium's own too\n"
    )
    parser = _command(commands, "envs", "list the environments there are", examples)
    parser.add_argument("pattern", nargs="?", metavar="PATTERN", help="part of a name, in any case")


def _add_report(commands: Any) -> None:
    parser = _command(
        commands, "report", "write a run's report.html and plots anew, and print its numbers", ""
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")


def _add_cleanup(commands: Any) -> None:
    parser = _command(
        commands,
        "cleanup",
        "undo on this host's GPUs what killed runs left: MPS daemons, MIG instances",
        "examples:\n  rayagi cleanup --dry-run     only list it\n  rayagi cleanup\n",
    )
    parser.add_argument("--dry-run", action="store_true", help="list what would be undone, and do nothing")


def _add_comm(commands: Any) -> None:
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
    parser = _command(
        commands, "plan", "show how a layout would reduce its gradients, at what cost, and why", examples
    )
    parser.set_defaults(command="comm plan")
    parser.add_argument(
        "--layout", required=True, metavar="LAYOUT", help="where the GMIs are: 4x3, 2x4x3, 3+2, '3+2|4'"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--size", type=_bytes, metavar="BYTES", help="of the gradients: 440000, 0.44MB, 1MiB (default 0.44MB)"
    )
    size.add_argument("--task", metavar="TASK", help="the gradients of this environment's networks")
    size.add_argument("--params", type=_count, metavar="N", help="float32 parameters: 110k")
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="what operations cost on the machine in question, measured (JSON); default: nominal rates of a DGX A100",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, in seconds and bytes")


def _add_comm_bench(commands: Any) -> None:
    parser = _command(
        commands,
        "bench",
        "measure what compositions of collectives cost here, beside what the cost models say",
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
        type=_bytes,
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
        "--time", type=_duration, default=45.0, metavar="TIME", help="for all timings together (default 45s)"
    )
    how.add_argument(
        "--repeats",
        type=_count,
        default=7,
        metavar="N",
        help="times that each composition is timed, in turns with the others (default 7)",
    )
    how.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="measure between nodes of this Ray cluster, one for each of the layout",
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
        help="what `rayagi comm plan --profile` reads (default FOLDER/profile.json)",
    )


def _command(commands: Any, name: str, text: str, examples: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _add_spec_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to run")
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="settings: .yaml, or .py that defines `config`"
    )
    group.add_argument(
        "--gmis",
        type=_count_or_auto,
        metavar="N",
        help="GMIs in all (default: one per core or GPU); auto: as `rayagi search` finds best",
    )
    group.add_argument(
        "--num-envs", type=_count_or_auto, metavar="N", help="environments of each GMI; auto: as searched"
    )
    group.add_argument("--backend", choices=get_args(Backend), help="how devices are shared")
    group.add_argument("--seed", type=_seed, help="seed of everything random (default 0)")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="one setting, e.g. ppo.learning_rate=1e-4; may be repeated, and wins over --config",
    )


def _checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


_duration = _checked(parse_duration_s)
_count = _checked(parse_count)
_bytes = _checked(parse_bytes)


def _count_or_auto(text: str) -> int | str:
    return "auto" if text == "auto" else _count(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number from 0")
    return int(text)


def _return(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number to compare a return with")
    return value


def _interval(text: str) -> tuple[str, float]:
    """``("iterations", 50)`` for a plain number, ``("time_s", 60.0)`` for one with a unit of time."""
    if text.strip().isdecimal():
        return "iterations", _count(text)
    return "time_s", _duration(text)


def _name(text: str) -> str:
    if not text.strip() or "/" in text or text.startswith("."):
        raise argparse.ArgumentTypeError(f"'{text}' is not a folder name; --out says where it goes")
    return text
