"""``rayagi channels dump``: writes a channel's newest batch to an Arrow file."""

from __future__ import annotations

import argparse

import pyarrow as pa

from collectives.experience.inspection import newest_batch
from placement.errors import counted
from rayagi.cli.output import say
from rayagi.run.atomic import replace_bytes
from rayagi.run.quantities import bytes_text

TIMEOUT_S = 60.0
"""How long to wait for a batch: the producer of a synchronous run fills its only slot for most of an iteration."""


def run(arguments: argparse.Namespace) -> int:
    """Write the file. Returns the exit code.

    Raises:
        NoChannelError: there is no such channel, or nothing in it.
        ChannelError: its slots are overwritten faster than they can be copied.
        DiskError: the file cannot be written.
    """
    dump = newest_batch(arguments.channel, TIMEOUT_S)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, dump.batch.schema) as writer:
        writer.write_batch(dump.batch)
    content = sink.getvalue().to_pybytes()
    replace_bytes(arguments.out, content)
    say(
        f"Batch {dump.sequence} of producer {dump.producer}, version {dump.version}: {counted(dump.batch.num_rows, 'row')}, "
        f"{bytes_text(len(content))}, written to {arguments.out}\n"
        f"Next:\n  python -c 'import pyarrow as pa; print(pa.ipc.open_file(\"{arguments.out}\").read_all())'"
    )
    return 0
