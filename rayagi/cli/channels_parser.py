"""What ``rayagi channels`` takes, and the help that teaches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayagi.cli.arguments import add_command, duration_argument

_EXAMPLES = """\
examples:
  rayagi channels                        a look at every channel of yours on this machine
  rayagi channels --watch                again and again, until Ctrl-C
  rayagi channels --json | jq '.[0].consumers'
  rayagi channels dump trajectory out.arrow     then: pyarrow.ipc.open_file("out.arrow").read_all()

Experience travels through shared memory that has no name in the file system: channels are found through /proc, in the
processes of your user, without Ray. There is a line for each producer:

  batches, batches/s, MB/s   committed since its beginning, and between two looks
  version                    how often the parameters had been updated for its newest batch
  slots                      in use, of how many: being filled, waiting, or not released by their consumer
  blocked                    share of the time between the looks in which it waited for a slot: its consumers are too slow
  consumers                  process: batches that it has not released (taken of these), and lag: versions between the
                             newest batch and the oldest of these. `not found`: it has not looked at this producer yet

A producer that has ended is shown as long as a consumer still has batches of it.
"""
_DUMP_EXAMPLES = """\
examples:
  rayagi channels dump trajectory out.arrow
  python -c 'import pyarrow as pa; print(pa.ipc.open_file("out.arrow").read_all())'

The batch that was committed last, of any producer. Nobody is held up: a copy that was overwritten meanwhile is made
again. Producer, sequence number and policy version are in the schema's metadata.
"""


def add_channels(commands: Any) -> None:
    """Add ``rayagi channels`` and what is under it."""
    parser = add_command(commands, "channels", "show what experience travels on this machine now", _EXAMPLES)
    parser.add_argument("--watch", action="store_true", help="look again and again, until Ctrl-C")
    parser.add_argument(
        "--every",
        type=duration_argument,
        default=1.0,
        metavar="TIME",
        help="between two looks, from which rates follow (default 1s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch, a line per look")
    more = parser.add_subparsers(metavar="COMMAND")
    dump = add_command(
        more,
        "dump",
        "copy a channel's newest batch into a file that pyarrow opens",
        _DUMP_EXAMPLES,
    )
    dump.set_defaults(command="channels dump")
    dump.add_argument("channel", metavar="CHANNEL", help="its name, as `rayagi channels` shows it")
    dump.add_argument("out", type=Path, metavar="FILE", help="where to write, e.g. out.arrow")
