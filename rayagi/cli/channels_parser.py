"""Arguments and help of ``rayagi channels``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayagi.cli.arguments import add_command, duration_argument

_EXAMPLES = """\
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
_DUMP_EXAMPLES = """\
examples:
  rayagi channels dump trajectory out.arrow
  python -c 'import pyarrow as pa; print(pa.ipc.open_file("out.arrow").read_all())'

Writes the batch that was committed last, of any producer. Does not block the channel: if the batch is overwritten
meanwhile, it is copied again. Producer, sequence number and policy version are in the schema's metadata.
"""


def add_channels(commands: Any) -> None:
    """Add ``rayagi channels`` and its subcommands."""
    parser = add_command(commands, "channels", "show the experience channels on this machine", _EXAMPLES)
    parser.add_argument("--watch", action="store_true", help="repeat until Ctrl-C")
    parser.add_argument(
        "--every",
        type=duration_argument,
        default=1.0,
        metavar="TIME",
        help="time between two snapshots, for rates (default 1s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch, one line per snapshot")
    more = parser.add_subparsers(metavar="COMMAND")
    dump = add_command(more, "dump", "write a channel's newest batch to an Arrow file", _DUMP_EXAMPLES)
    dump.set_defaults(command="channels dump")
    dump.add_argument("channel", metavar="CHANNEL", help="its name, as `rayagi channels` shows it")
    dump.add_argument("out", type=Path, metavar="FILE", help="where to write, e.g. out.arrow")
