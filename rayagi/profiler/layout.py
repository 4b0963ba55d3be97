"""Layout of traces on disk, which the recorder writes and the analysis reads. Standard library only.

A profile is one folder::

    profile.json                       version, command, start (Unix ns), what was intercepted, machine
    HOST-PID-STARTTICKS/process.json   name, pid, parent, argv, metadata, python, clock
    HOST-PID-STARTTICKS/end.json       monotonic_ns: when it ended, of a process that could not write it itself
    HOST-PID-STARTTICKS/names.jsonl    one {"id": 7, "name": "simulate"} a line, before the id is first used
    HOST-PID-STARTTICKS/TID-N.events   a header of 64 bytes, then records of 24
    HOST-PID-STARTTICKS/TID-N.cuda     the same: the thread's calls of CUDA
    HOST-PID-STARTTICKS/gpuD.S-N.events   the same: what stream S of GPU D did

    HOST-PID-STARTTICKS/blocks.jsonl   in calibrations: turn, variant, start_ns, end_ns, cpu_ns of each iteration

All numbers are little-endian. Times are CLOCK_MONOTONIC in nanoseconds.
"""

from __future__ import annotations

import struct
from enum import IntEnum

VERSION = 1
MAGIC = b"RAYAGIEV"
PROFILE, PROCESS, NAMES, END = "profile.json", "process.json", "names.jsonl", "end.json"
EVENTS, GPU_CALLS = ".events", ".cuda"
BLOCKS = "blocks.jsonl"

HEADER = struct.Struct("<8sIIQQQQqq")
"""Magic, version, bytes of a record, thread id, capacity in records, committed records, dropped records, start time, start
of the first dropped event (0: none, or a recording of an earlier version).

The committed count is written after the record: what it counts is complete, even if the process is killed.
"""
COMMITTED_AT, DROPPED_AT, DROPPED_FROM_AT = 32, 40, 56
"""Places of these fields in the header, in bytes."""

RECORD = struct.Struct("<qqIBBH")
"""Start, end, name, category, depth, flags. End 0: still open when recording stopped or the process died."""
END_AT = 8
"""Place of the end in a record, in bytes."""
MAX_NAME = 500
"""Characters of a name; longer ones are cut off."""
MAX_DEPTH = 255
"""Deeper events are recorded with this depth."""
FROM_PYTHON = 1
"""Flags of an event other than a scope that Python code recorded, which costs more than an intercepted call."""

CALL, ANNOTATION, ACTIVITY = "call", "annotation", "activity"
"""Kinds of hook: intercepted calls of native functions; phases, operations and iterations; what Python code records."""
HOOKS = frozenset({CALL, ANNOTATION, ACTIVITY})


class Category(IntEnum):
    """What a thread did between an event's start and its end."""

    PROCESS = 0
    """Its life while it was recorded."""
    THREAD = 1
    """The same for a thread: the first record of each file. Its end bounds all other events of the file."""
    PHASE = 2
    OPERATION = 3
    ITERATION = 4
    """Flags hold its number modulo 2^16."""
    SIMULATOR = 16
    BACKEND = 17
    COMMUNICATION = 18
    WAIT = 19
    KERNEL_ACT = 20
    KERNEL_UPDATE = 22
    OTHER_NATIVE = 24
    GPU_RUNTIME = 32
    GPU_KERNEL = 33
    GPU_COPY = 34

    @property
    def is_gpu(self) -> bool:
        """Whether the time is a GPU's, not the calling thread's."""
        return self in (Category.GPU_KERNEL, Category.GPU_COPY)
