"""Parameter store: a wait-free versioned broadcast of tensors in shared memory, from a learner to its collectors.

A triple-buffered seqlock. The file holds a header and three copies of the tensors. The owner fills a copy that is not
published, then publishes it by one word: version and copy. Each copy has a word with its version, 0 while it is filled.
A reader copies the published tensors and checks that word afterwards; if it changed, the reader retries. It has the time
of two publications, so retries are rare. If the owner dies while it fills a copy, the version before stays published.
``shared_words`` keeps loads and stores in program order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol, Self

import torch
from torch import Tensor

from collectives import futex
from collectives.closing import ClosesOnExit
from collectives.experience import file_layout
from collectives.experience.errors import ChannelClosedError, ChannelError, ChannelTimeoutError
from collectives.experience.file_layout import SharedFile
from collectives.experience.messages import MessageLayouts
from collectives.experience.schema import ExperienceSchema
from collectives.limits import WaitedTime
from collectives.process_watcher import ProcessWatcher
from collectives.transports.shm.memory import CACHE_LINE_BYTES, page_aligned

PARAMETER_STORE_MAGIC = 0x3130445242594152
COPIES = 3
"""Copies of the tensors: one is published, one may be filled, one may still be read."""
_OWNER, _SCHEMA_BYTES, _CLOSED = 1, 2, 3
_PUBLISHED = file_layout.LINE
"""Publishing word, by the owner; readers sleep on it. 0 before the first publication, else (version + 1) * 4 + copy."""
_HELD = 2 * file_layout.LINE
"""Version word of the first copy, by the owner: 0 while it is filled, else version + 1. One cache line per copy."""
_SCHEMA_AT = (2 + COPIES) * CACHE_LINE_BYTES
_SLEEP_S = 0.05
"""Longest sleep of a waiting reader before it checks whether the owner is alive."""
_MOST_READS = 1000
"""Retries before a reader gives up."""


class ReadableParameterStore(Protocol):
    """A parameter store for readers, on this host or another."""

    @property
    def is_finished(self) -> bool:
        """Whether the owner publishes no more, as far as is known."""

    def read_newer(self, tensors: Mapping[str, Tensor], known: int) -> int:
        """Copy the published tensors into ``tensors``, unless they are version ``known``. Returns their version."""

    def close(self) -> None:
        """Free its resources. Safe to call twice."""


class ParameterStore(ClosesOnExit):
    """One owner publishes; any number of processes of the host read. Not thread-safe.

    The tensors that are published, and those that are read into, may be on a device.

    ::

        store = ParameterStore.host({"parameters": flat, "mean": mean})   # readers attach to store.endpoint
        store.publish({"parameters": flat, "mean": mean}, version=0)

        store = ParameterStore.attach(endpoint)
        store.wait(version=1, timeout_s=60.0)
        version = store.read_into({"parameters": own_flat, "mean": own_mean})
    """

    def __init__(self, file: SharedFile, schema: ExperienceSchema, endpoint: str, *, hosts: bool) -> None:
        """See ``host`` and ``attach``."""
        self.schema, self.endpoint, self._hosts = schema, endpoint, hosts
        self._file, self._words = file, file.words
        begin = page_aligned(_SCHEMA_AT + self._words[_SCHEMA_BYTES])
        stride = page_aligned(_copy_bytes(schema))
        self._copies = tuple(_views(file, schema, begin + copy * stride) for copy in range(COPIES))
        self._owner = self._words[_OWNER]
        self._processes = ProcessWatcher([self._owner])
        self._closed = False

    @classmethod
    def host(cls, tensors: Mapping[str, Tensor], name: str = "parameters") -> Self:
        """Create a store for tensors of these names, shapes and types. Nothing is published yet.

        Raises:
            ChannelError: there is not enough memory, or this host is not supported.
            SchemaError: channels do not support a tensor's type.
        """
        schema = ExperienceSchema.from_tensors(name, _rows(tensors))
        message = MessageLayouts(schema).schema_message()
        begin = page_aligned(_SCHEMA_AT + len(message))
        file = SharedFile.create(name, begin + COPIES * page_aligned(_copy_bytes(schema)))
        file.bytes[_SCHEMA_AT : _SCHEMA_AT + len(message)] = message
        file.words[_OWNER], file.words[_SCHEMA_BYTES] = os.getpid(), len(message)
        file.words[file_layout.MAGIC] = PARAMETER_STORE_MAGIC
        return cls(file, schema, file.endpoint, hosts=True)

    @classmethod
    def attach(cls, endpoint: str, name: str = "parameters") -> Self:
        """Open the store of another process for reading.

        Raises:
            ChannelError: it no longer exists, or is of another kind.
        """
        file = SharedFile.open(name, endpoint, PARAMETER_STORE_MAGIC)
        message = file.bytes[_SCHEMA_AT : _SCHEMA_AT + file.words[_SCHEMA_BYTES]]
        return cls(file, file_layout.read_schema(message), endpoint, hosts=False)

    @property
    def version(self) -> int:
        """Published version; -1 before the first publication."""
        return (self._words[_PUBLISHED] >> 2) - 1

    @property
    def is_finished(self) -> bool:
        """Whether the owner has closed the store, or its process has ended. Published tensors stay readable."""
        return bool(self._words[_CLOSED]) or bool(self._processes.ended())

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Publish a copy of the tensors as this version. Never waits for readers.

        Raises:
            SchemaError: names, shapes or types differ from the store's.
            ValueError: a version that is not newer than the published one.
            ChannelError: this process is not the owner.
        """
        self._check_open()
        if not self._hosts:
            raise ChannelError(self.schema.name, f"only its owner, process {self._owner}, publishes")
        self.schema.refuse_tensors(_rows(tensors))
        if version <= self.version:
            raise ValueError(f"version {version} is published after version {self.version}")
        # Round-robin: the copy after the published one was published two versions ago.
        copy = ((self._words[_PUBLISHED] & 3) + 1) % COPIES
        held = _HELD + copy * file_layout.LINE
        self._words[held] = 0  # invalidate before the first byte changes
        for name, tensor in tensors.items():
            self._copies[copy][name].copy_(tensor.detach())
        self._words[held] = version + 1  # valid after the last byte, and before anyone is pointed to it
        self._words[_PUBLISHED] = version + 1 << 2 | copy
        futex.wake(self._file.word_address(_PUBLISHED))

    def wait(self, version: int, timeout_s: float) -> int:
        """Sleep until this version or a newer one is published. Returns which.

        Raises:
            ChannelClosedError: the owner closed the store, or its process ended, before that.
            ChannelTimeoutError: it was not published within the time limit.
        """
        waited = WaitedTime()
        while True:
            self._check_open()
            # Check for the owner's end before loading the word: its last publication still counts.
            ended = bool(self._processes.ended())
            closed, published = self._words[_CLOSED], self._words[_PUBLISHED]
            if self.version >= version:
                return self.version
            if closed or ended:
                how = "has closed it" if closed else "has ended"
                raise ChannelClosedError(
                    self.schema.name,
                    f"its owner, process {self._owner}, {how} at version {self.version}; version {version} was awaited",
                )
            waited_s = waited.look()
            if waited_s >= timeout_s:
                detail = f"its owner, process {self._owner}, is at version {self.version}; version {version} was awaited"
                raise ChannelTimeoutError(self.schema.name, detail, waited_s)
            futex.sleep(self._file.word_address(_PUBLISHED), published, _SLEEP_S)

    def read_into(self, tensors: Mapping[str, Tensor]) -> int:
        """Copy the published tensors into ``tensors``. Returns their version.

        Raises:
            SchemaError: names, shapes or types differ from the store's.
            ChannelError: nothing was published yet, or the owner publishes faster than this process can copy.
        """
        self._check_open()
        self.schema.refuse_tensors(_rows(tensors))
        for _ in range(_MOST_READS):
            published = self._words[_PUBLISHED]
            if not published:
                raise ChannelError(self.schema.name, "nothing was published yet: wait(version=0) first")
            copy = published & 3
            for name, tensor in tensors.items():
                tensor.detach().copy_(self._copies[copy][name])
            # Loaded after the copy: unchanged means that the owner did not write to it meanwhile.
            if self._words[_HELD + copy * file_layout.LINE] == published >> 2:
                return (published >> 2) - 1
        raise ChannelError(
            self.schema.name,
            f"process {self._owner} publishes faster than {_MOST_READS} copies could be read: publish less often",
        )

    def read_newer(self, tensors: Mapping[str, Tensor], known: int) -> int:
        """``read_into``, unless version ``known`` is published. Returns the published version."""
        return known if self.version == known else self.read_into(tensors)

    def close(self) -> None:
        """As owner, end publication and wake readers; as reader, detach. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._hosts:
            self._words[_CLOSED] = 1
            futex.wake(self._file.word_address(_PUBLISHED))
        self._processes.close()
        self._file.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ChannelClosedError(self.schema.name, "this parameter store is closed")


def _rows(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as one row of a schema."""
    return {name: tensor.detach().unsqueeze(0) for name, tensor in tensors.items()}


def _offsets(schema: ExperienceSchema) -> list[int]:
    """Byte offset of each tensor within a copy, aligned to cache lines; the last one is the size of the copy."""
    offsets = [0]
    for field in schema.fields:
        offsets.append(offsets[-1] + -(-field.row_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES)
    return offsets


def _copy_bytes(schema: ExperienceSchema) -> int:
    return _offsets(schema)[-1]


def _views(file: SharedFile, schema: ExperienceSchema, begin: int) -> dict[str, Tensor]:
    """The tensors of one copy, in place."""
    return {
        field.name: torch.frombuffer(
            file.bytes, dtype=field.dtype, count=field.row_numel, offset=begin + offset
        ).view(field.shape)
        for field, offset in zip(schema.fields, _offsets(schema), strict=False)
    }
