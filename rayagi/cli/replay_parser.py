"""Arguments and help of ``rayagi replay``."""

from __future__ import annotations

from typing import Any

from rayagi.cli.arguments import add_command, add_flag, add_value, seed_argument

SELECTORS = ("uniform", "sequences", "prioritized", "fifo", "lifo", "top-k", "without-replacement")
_INFO_EXAMPLES = """\
examples:
  rayagi replay info data/ant                    a dataset of rayagi serve
  rayagi replay info hopper_medium-v2.hdf5       D4RL's layout; needs `pip install 'rayagi[hdf5]'`
  rayagi replay info replays/ant --json | jq .returns

Reads every trajectory once. `cut` are those that neither terminated nor reached the time limit: the recording ended, or
they are pieces of longer ones. A learner bootstraps from their last observation, as from that of truncated ones.
"""
_IMPORT_EXAMPLES = """\
examples:
  rayagi replay import data/ant replays/ant                        then: rayagi replay sample replays/ant
  rayagi replay import hopper_medium-v2.hdf5 replays/hopper --max-length 100
  rayagi replay import pusht replays/pusht --columns next.success
  rayagi replay import low_dim.hdf5 replays/lift --mask train      the demonstrations of one of robomimic's masks
  rayagi replay import big.hdf5 replays/big --memory 2GiB          larger than memory: the rest is on disk meanwhile

Reads datasets of rayagi serve, Minari (HDF5, Arrow, Parquet), LeRobot v3, RLlib (episodes or steps), files of D4RL and
robomimic (.hdf5) and dicts of tensors (.pt). A row is a trajectory, and all rows have the space of the longest: if there are
many short ones and a few long ones, --max-length saves memory. Nothing in a file is run: no pickles, no environments.
"""
_EXPORT_EXAMPLES = """\
examples:
  rayagi replay export replays/ant --to d4rl ant.hdf5
  rayagi replay export data/ant --to lerobot data/ant-lerobot      from any format to any other
  rayagi replay export ant.hdf5 --to minari data/ant-v0            needs `pip install 'rayagi[minari]'`

The output appears when it is complete. RLlib and Minari have no cut trajectories: these count as truncated there.
Their spaces are as wide as the types of the columns; `rayagi export` writes a dataset of rayagi serve for them with the
bounds of its task.
"""
_SAMPLE_EXAMPLES = """\
examples:
  rayagi replay sample replays/ant
  rayagi replay sample replays/ant --select sequences --length 16 --batch 256
  rayagi replay sample data/ant --select prioritized --seed 3 --json

Selects a batch as a trainer would, prints its first rows, and statistics of each column over the whole batch. The same
seed gives the same batch. Priorities of an imported dataset are 1.

selectors:
  uniform              trajectories with equal probability, from their first step
  sequences            all sub-sequences of --length steps with equal probability; 1: single transitions
  prioritized          trajectories by priority, then a sub-sequence of --length
  fifo, lifo, top-k    the oldest, the newest, those of the highest priority
  without-replacement  by priority, each trajectory once
"""
_BENCH_EXAMPLES = """\
examples:
  rayagi replay bench                             transitions of Ant's size, 100,000 of them
  rayagi replay bench replays/ant --length 64 --batch 32

Selects and copies batches for --time, by turns with memcpy: one thread that copies as many bytes from a source that is not
in the cache. A ratio near 1 says that memory is the limit. Small rows cannot reach it: each is a cache miss or more.
"""


def add_replay(commands: Any) -> None:
    """Add ``rayagi replay`` and its subcommands."""
    text = "experience replay: look at datasets, convert them, sample from them"
    parser = commands.add_parser("replay", help=text, description=f"{text[0].upper()}{text[1:]}.")
    more = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_info(more)
    _add_import(more)
    _add_export(more)
    _add_sample(more)
    _add_bench(more)


def _add_info(commands: Any) -> None:
    parser = add_command(commands, "info", "show what a dataset or a saved replay holds", _INFO_EXAMPLES)
    _add_path(parser)
    add_flag(parser, "--json", "print JSON")


def _add_import(commands: Any) -> None:
    parser = add_command(commands, "import", "read a dataset into a replay, and save it", _IMPORT_EXAMPLES)
    _add_path(parser)
    add_value(parser, "out", "OUT", "folder to create")
    add_value(
        parser,
        "--max-length",
        "N",
        "cut longer trajectories into pieces of N steps (default: the longest trajectory's)",
    )
    _add_memory(parser)


def _add_export(commands: Any) -> None:
    parser = add_command(
        commands, "export", "write any dataset, or a saved replay, in any format", _EXPORT_EXAMPLES
    )
    _add_path(parser)
    add_value(parser, "out", "OUT", "folder to create; for d4rl a file .hdf5, for torch .pt")
    parser.add_argument(
        "--to",
        required=True,
        choices=("rayagi", "rayagi-arrow", "minari", "minari-hdf5", "lerobot", "rllib", "d4rl", "torch"),
        help="format; rayagi: as rayagi serve writes it",
    )


def _add_sample(commands: Any) -> None:
    parser = add_command(
        commands, "sample", "select a batch, and show its rows and statistics", _SAMPLE_EXAMPLES
    )
    _add_path(parser)
    parser.add_argument(
        "--select", choices=SELECTORS, default="sequences", help="selector (default sequences)"
    )
    _add_batch(parser)
    parser.add_argument("--seed", type=seed_argument, default=0, help="seed of the selection (default 0)")
    add_value(parser, "--rows", "N", "rows to print (default 5)", default=5)
    _add_memory(parser)
    add_flag(parser, "--json", "print JSON")


def _add_bench(commands: Any) -> None:
    parser = add_command(
        commands, "bench", "measure selecting and copying batches beside memcpy", _BENCH_EXAMPLES
    )
    add_value(parser, "path", "PATH", "dataset or saved replay", nargs="?")
    _add_columns(parser)
    _add_batch(parser)
    add_value(parser, "--time", "TIME", "of measuring (default 2s)", default=2.0)
    _add_memory(parser)
    add_flag(parser, "--json", "print JSON")


def _add_path(parser: Any) -> None:
    add_value(parser, "path", "PATH", "dataset (file or folder), or saved replay")
    _add_columns(parser)


def _add_columns(parser: Any) -> None:
    add_value(
        parser,
        "--columns",
        "NAME",
        "columns to read beyond the usual ones; `rayagi replay info` lists those that are left out. Parts of an observation "
        "(obs.PART): only the named ones are read",
        nargs="+",
        default=[],
    )
    add_value(
        parser,
        "--mask",
        "NAME",
        "of a file of robomimic: read the demonstrations that its mask/NAME lists (default: all)",
    )


def _add_batch(parser: Any) -> None:
    add_value(parser, "--batch", "N", "rows (default 256)", default=256)
    add_value(parser, "--length", "L", "steps of each (default 1)", default=1)


def _add_memory(parser: Any) -> None:
    add_value(
        parser,
        "--memory",
        "BYTES",
        "of the replay; rows beyond it are in an unnamed file in the temporary folder (default: all in memory)",
    )
