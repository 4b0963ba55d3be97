"""Argument parsers and help texts of the commands."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any, get_args

from rayagi.algorithms.registry import DEFINITIONS
from rayagi.cli.arguments import (
    add_command,
    add_flag,
    add_trust,
    add_value,
    count_argument,
    duration_argument,
    seed_argument,
)
from rayagi.cli.comm_parser import add_comm
from rayagi.cli.profile_parser import add_profile
from rayagi.cli.replay_parser import add_replay
from rayagi.cli.serving_parser import add_serving
from rayagi.config.learning import Template
from rayagi.config.spec import Backend
from rayagi.run.versions import rayagi_version

_TRAIN_EXAMPLES = """\
examples:
  rayagi train Ant-v5                                 with the task's preset, on all cores
  rayagi train Ant-v5 --time 5m --gmis 2              two GMIs, five minutes
  rayagi train Hopper-v5 --env-steps 2M --set ppo.learning_rate=1e-4
  rayagi train Ant-v5 --evaluate-every 50 --stop-return 2000
  rayagi train Ant-v5 --algorithm appo              asynchronous collecting and learning
  rayagi train Ant-v5 --algorithm bc --dataset data/ant    from a recorded dataset, without simulation
  rayagi train Ant-v5 --algorithm td3 --init runs/ant-td3bc --dataset data/ant    from offline to online
  rayagi train Ant-v5 --config ant.yaml --seed 3 --name ant-seed3
  rayagi train --resume runs/Ant-v5-20260102-030405   continue after Ctrl-C or a crash
  rayagi train --resume runs/ant-seed3 --time 1h      continue until one hour of training in total

Limits count from the start of the run, resumed or not; the first one reached ends it. The default is the
configuration's total_env_steps, or ten minutes. With --resume, new limits replace the old ones. --stop-return is
compared with the mean return of an evaluation if --evaluate-every is on, else with that of the last 100 training
episodes, once there are 100. The best checkpoint is chosen by the same return.

Ctrl-C, SIGTERM or closing the terminal finishes the current request, saves, and prints how to resume; another
Ctrl-C quits at once.
"""
_CHANNELS_EXAMPLES = """\
examples:
  rayagi channels                        every channel of your processes on this machine
  rayagi channels --watch                repeat until Ctrl-C
  rayagi channels --json | jq '.[0].consumers'
  rayagi channels dump trajectory out.arrow     then: pyarrow.ipc.open_file("out.arrow").read_all()

Channels are anonymous shared memory (memfd). They are found through /proc, in the processes of your user, without Ray.
One line per producer:

  batches, batches/s, MB/s   committed since its start, and between two snapshots
  version                    policy version of its newest batch: number of parameter updates
  slots                      in use / total; in use: being filled, waiting, or not released by a consumer
  blocked                    share of time for which it waited for a slot, because its consumers are too slow
  consumers                  process: unreleased batches (those taken), lag: version of the newest batch less that of
                             the oldest unreleased one. `not attached`: it has not mapped this producer's memory yet

A producer that has ended is listed while a consumer still maps its memory.
"""
_CHANNELS_DUMP_EXAMPLES = """\
examples:
  rayagi channels dump trajectory out.arrow
  python -c 'import pyarrow as pa; print(pa.ipc.open_file("out.arrow").read_all())'

Writes the batch that was committed last, of any producer. Does not block the channel: if the batch is overwritten
meanwhile, it is copied again. While producers fill their only slot it waits for a batch, for up to a minute. Producer,
sequence number and policy version are in the schema's metadata.
"""
_EPILOG = """\
start here:
  rayagi envs                      list the tasks
  rayagi info                      what this machine has, and how its GPUs may be shared
  rayagi plan Ant-v5               how this machine would be partitioned, without starting anything
  rayagi search Ant-v5             which partition trains fastest, by measuring
  rayagi train Ant-v5 --time 5m    train, watch, save; ends with a report
  rayagi evaluate runs/NAME --video out.mp4
  rayagi serve runs/NAME --out DIR                     record a dataset of the policy's experience
  rayagi policy-server runs/NAME --port 8000           serve its actions to a robot or game
  rayagi export-policy runs/NAME ant.onnx              the policy as a file, to run without rayagi
  rayagi comm plan --layout 4x3    how 3 GMIs on each of 4 GPUs would reduce gradients
  rayagi comm bench                what reducing gradients costs on this machine
  rayagi replay info PATH          what a dataset holds: of rayagi serve, Minari, LeRobot, RLlib, D4RL or torch
  rayagi profile -- python x.py    record where the time of any program goes
  rayagi channels --watch          experience channels of this machine: contents, speed, slow consumers

exit codes: 0 success, 1 failure, 2 invalid input, 130 interrupted (Ctrl-C, SIGTERM or a closed terminal: saved;
during startup, or by a second Ctrl-C: earlier checkpoints stay). If RAY_ADDRESS is set, this cluster is used, by
`rayagi plan` too; else a local Ray is started.
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
    add_serving(commands)
    add_comm(commands)
    _add_channels(commands)
    add_profile(commands)
    add_replay(commands)
    return parser


class _VersionAction(argparse.Action):
    """Looks up the version only when it is printed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"rayagi {rayagi_version()}")
        parser.exit()


def _add_train(commands: Any) -> None:
    parser = add_command(commands, "train", "train a policy, save it, and report", _TRAIN_EXAMPLES)
    add_value(parser, "task", "TASK", "environment id; `rayagi envs` lists them", nargs="?")
    _add_spec_options(parser)
    add_value(
        parser,
        "--init",
        "RUN",
        "begin a new run of an off-policy algorithm with the networks of this run's best checkpoint, of an "
        "offline algorithm, say",
    )
    limits = parser.add_argument_group("when to end")
    add_value(limits, "--time", "TIME", "training time: 90s, 5m, 1h30m")
    add_value(limits, "--env-steps", "N", "environment steps of all GMIs: 500k, 2M")
    add_value(limits, "--iterations", "N", "iterations (rollout and update)")
    limits.add_argument("--stop-return", type=_return, metavar="R", help="mean return that ends the run")
    during = parser.add_argument_group("while it runs")
    add_value(during, "--evaluate-every", "N", "evaluate every N iterations")
    during.add_argument(
        "--checkpoint-every",
        type=_interval,
        metavar="N|TIME",
        help="save every N iterations or every TIME (default 60s); always at the end too",
    )
    add_flag(during, "--dashboard", "start Ray's dashboard with the local Ray, and print its address")
    add_value(
        during,
        "--profile",
        "N",
        "record where the time of N iterations goes, of all GMIs, into the run's folder `profile`; with a local Ray",
    )
    add_flag(
        during,
        "--replan",
        "if a GMI is too slow or memory runs out, continue with another plan at the next checkpoint; the "
        "total batch may change (default: only report it)",
    )
    folder = parser.add_argument_group("where it goes")
    folder.add_argument("--out", type=Path, help="folder of run folders (default runs)")
    folder.add_argument("--name", type=_name, help="name of the run folder (default TASK-DATE-TIME)")
    add_value(folder, "--resume", "RUN", "continue this run folder")


def _add_evaluate(commands: Any) -> None:
    examples = (
        "examples:\n  rayagi evaluate runs/NAME --episodes 20\n  rayagi evaluate runs/NAME --video out.mp4\n"
        "  rayagi evaluate runs/NAME --checkpoint last --seed 7\n"
    )
    parser = add_command(commands, "evaluate", "run episodes with a trained policy, without noise", examples)
    add_value(parser, "run", "RUN", "run folder")
    add_trust(parser)
    add_value(parser, "--episodes", "N", "episodes (default 10)", default=10)
    parser.add_argument(
        "--seed", type=seed_argument, default=0, help="seed of the episodes' starts (default 0)"
    )
    add_value(parser, "--checkpoint", "WHICH", "best (default), last, or a name", default="best")
    add_value(parser, "--video", "FILE", "also record a video of one episode, e.g. out.mp4 or out.gif")


def _add_info(commands: Any) -> None:
    examples = (
        "examples:\n  rayagi info\n  rayagi info --json dgx.json      record it, to plan for it elsewhere\n"
        "  rayagi info --cluster            every node of the Ray cluster\n"
    )
    parser = add_command(
        commands, "info", "show this machine's devices, and how they can be shared", examples
    )
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write it as JSON, to FILE or standard output"
    )
    source = parser.add_mutually_exclusive_group()
    add_flag(source, "--cluster", "the Ray cluster at RAY_ADDRESS, or the one of this machine")
    add_value(source, "--machine", "FILE", "a recorded machine (JSON)")


def _add_plan(commands: Any) -> None:
    examples = (
        "examples:\n  rayagi plan Ant-v5 --gmis 4\n  rayagi plan Ant-v5 --machine dgx.json\n"
        "  rayagi plan Ant-v5 --explain                  compare templates by unit costs measured here\n"
        "  rayagi plan Ant-v5 --nodes 16 --gpus-per-node 8 --gpu H100    forecast such a cluster, with its bottleneck\n"
    )
    parser = add_command(
        commands, "plan", "show how a machine would be partitioned, without starting anything", examples
    )
    add_value(parser, "task", "TASK", "environment id; `rayagi envs` lists them")
    _add_spec_options(parser)
    add_value(
        parser,
        "--machine",
        "FILE",
        "a recorded machine (JSON) instead of this one, or of the cluster at RAY_ADDRESS",
    )
    group = parser.add_argument_group("from unit costs, measured by a short profile and cached")
    add_flag(group, "--explain", "compare the templates by the throughput model")
    add_value(group, "--nodes", "N", "forecast a cluster of 1, 2, 4, ... N nodes")
    add_value(group, "--gpus-per-node", "N", "with --nodes: default 8")
    add_value(group, "--gpu", "NAME", "with --nodes: V100, A100-40, A100-80, H100 (default), H200")
    add_value(group, "--cores-per-node", "N", "with --nodes: default as in the vendor's own host")


def _add_search(commands: Any) -> None:
    examples = (
        "examples:\n  rayagi search Ant-v5\n  rayagi search Ant-v5 --budget 5m --objective time_to_return\n"
        "  rayagi search Ant-v5 --gmis 2        only the number of environments of two GMIs\n\n"
        "Tries real training at each candidate (GMI-DRL, Algorithm 1). Measurements are kept by machine, task, code and\n"
        "library versions: an interrupted search continues, and `rayagi train --gmis auto` uses them.\n"
    )
    parser = add_command(
        commands, "search", "find the numbers of GMIs and environments that train fastest here", examples
    )
    add_value(parser, "task", "TASK", "environment id; `rayagi envs` lists them")
    _add_spec_options(parser)
    group = parser.add_argument_group("how to search")
    group.add_argument(
        "--objective",
        choices=("throughput", "time_to_return"),
        default="throughput",
        help="steps per second, or these divided by the cost of larger batches in learning",
    )
    add_value(group, "--budget", "TIME", "start no trial after this long: 5m")
    add_flag(group, "--again", "measure again what this search tries; other cached measurements stay")
    add_value(group, "--cache", "DIR", "measurements (default ~/.cache/rayagi/search)")
    add_value(group, "--out", "DIR", "figures (default runs/search-TASK)")
    add_flag(
        group,
        "--explain",
        "then profile the best and the second, and show where their time differs; with a local Ray",
    )
    add_flag(group, "--json", "print the result as JSON, progress on stderr")


def _add_envs(commands: Any) -> None:
    examples = (
        "examples:\n  rayagi envs\n  rayagi envs ant        ids that contain 'ant', Gymnasium's own too\n"
    )
    parser = add_command(commands, "envs", "list the available environments", examples)
    add_value(parser, "pattern", "PATTERN", "part of a name, ignoring case", nargs="?")


def _add_report(commands: Any) -> None:
    parser = add_command(
        commands, "report", "rewrite a run's report.html and plots, and print its figures", ""
    )
    add_value(parser, "run", "RUN", "run folder")


def _add_cleanup(commands: Any) -> None:
    parser = add_command(
        commands,
        "cleanup",
        "restore this host's GPUs after killed runs: MPS daemons, MIG instances",
        "examples:\n  rayagi cleanup --dry-run     only list it\n  rayagi cleanup\n",
    )
    add_flag(parser, "--dry-run", "only list what would be undone")


def _add_channels(commands: Any) -> None:
    parser = add_command(
        commands, "channels", "show the experience channels on this machine", _CHANNELS_EXAMPLES
    )
    add_flag(parser, "--watch", "repeat until Ctrl-C")
    add_value(parser, "--every", "TIME", "time between two snapshots, for rates (default 1s)", default=1.0)
    add_flag(parser, "--json", "print JSON; with --watch, one line per snapshot")
    more = parser.add_subparsers(metavar="COMMAND")
    dump = add_command(
        more, "dump", "write a channel's newest batch to an Arrow file", _CHANNELS_DUMP_EXAMPLES
    )
    add_value(dump, "channel", "CHANNEL", "its name, as `rayagi channels` shows it")
    add_value(dump, "out", "FILE", "where to write, e.g. out.arrow")


def _add_spec_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to run")
    add_value(group, "--config", "FILE", "settings: .yaml, or .py that defines `config`")
    add_trust(group)
    group.add_argument(
        "--algorithm",
        choices=tuple(DEFINITIONS),
        help="; ".join(f"{name}: {each.summary}" for name, each in DEFINITIONS.items()) + " (default: ppo)",
    )
    add_value(
        group,
        "--dataset",
        "DIR",
        "what an offline algorithm learns from, or an off-policy one's replay begins with: of `rayagi serve`, or "
        "Minari, D4RL, ...",
    )
    group.add_argument(
        "--obs-keys",
        type=_names,
        metavar="A,B",
        help="parts of that dataset's observations that make up the task's, in their order (robomimic's, Minari's, ...)",
    )
    group.add_argument(
        "--template",
        choices=[*(template for template in get_args(Template) if template != "program"), "auto"],
        help="which roles share a GMI (default: the algorithm's first of "
        + "; ".join(f"{each.name}: {', '.join(each.templates)}" for each in DEFINITIONS.values())
        + "); auto: predicted by the throughput model, decided by short runs",
    )
    group.add_argument(
        "--gmis",
        type=_count_or_auto,
        metavar="N",
        help="total number of GMIs (default: one per core, or a layout with its source on GPUs); auto: by `rayagi search`",
    )
    group.add_argument(
        "--num-envs", type=_count_or_auto, metavar="N", help="environments of each GMI; auto: by search"
    )
    group.add_argument("--backend", choices=get_args(Backend), help="how devices are shared")
    group.add_argument("--seed", type=seed_argument, help="seed of all random numbers (default 0)")
    add_value(
        group,
        "--set",
        "KEY=VALUE",
        "one setting, e.g. ppo.learning_rate=1e-4; may be repeated, and overrides --config",
        action="append",
        default=[],
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _count_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return count_argument(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or 'auto'") from error


def _return(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number to compare a return with")
    return value


def _interval(text: str) -> tuple[str, float]:
    """Parse ``50`` as ``("iterations", 50)`` and ``60s`` as ``("time_s", 60.0)``."""
    if text.strip().isdecimal():
        return "iterations", count_argument(text)
    return "time_s", duration_argument(text)


def _name(text: str) -> str:
    if not text.strip() or "/" in text or text.startswith("."):
        raise argparse.ArgumentTypeError(f"'{text}' is not a folder name; --out says where it goes")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # bytes that are no UTF-8: Ray, and files of settings, take text
        raise argparse.ArgumentTypeError(f"{text!a} is no text in UTF-8") from error
    return text
