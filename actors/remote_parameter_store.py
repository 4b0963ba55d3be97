"""Parameters from a learner on another host: a relay there reads its board, and Ray's object store brings what is newer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import ray.exceptions
import torch
from torch import Tensor

from collectives.experience.errors import ChannelError, ChannelTimeoutError
from collectives.experience.parameters import ParameterStore, ReadableParameterStore

_ANSWER_S = 30.0
"""For a relay to answer: one that died is started anew meanwhile."""


@dataclass(frozen=True, slots=True)
class ParameterSnapshot:
    """What a board shows now."""

    version: int
    """-1: nothing was published, or the board is gone."""
    is_finished: bool
    """Whether no more will come."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Empty where the reader has this version."""


class RelayParameterReader:
    """A relay's side: reads the boards of its host for those elsewhere."""

    def __init__(self) -> None:
        self._parameter_stores: dict[str, ParameterStore] = {}

    def read_parameters(self, endpoint: str, known: int) -> ParameterSnapshot:
        """What is published there, unless it is version ``known``.

        A board whose owner has ended, and which was never looked at, cannot be opened any more: it is over.
        """
        try:
            parameter_store = self._parameter_store(endpoint)
        except ChannelError:
            return ParameterSnapshot(version=-1, is_finished=True)
        is_finished = (
            parameter_store.is_finished
        )  # asked before the version: what was published last still counts
        if parameter_store.version in (known, -1):
            return ParameterSnapshot(parameter_store.version, is_finished)
        tensors = {
            field.name: torch.empty(field.shape, dtype=field.dtype) for field in parameter_store.schema.fields
        }
        return ParameterSnapshot(parameter_store.read_into(tensors), is_finished, tensors)

    def _parameter_store(self, endpoint: str) -> ParameterStore:
        if endpoint not in self._parameter_stores:
            found = ParameterStore.attach(endpoint)
            for known, parameter_store in list(self._parameter_stores.items()):
                if parameter_store.is_finished:
                    self._parameter_stores.pop(known).close()
            self._parameter_stores[endpoint] = found
        return self._parameter_stores[endpoint]


class RemoteParameterStore(ReadableParameterStore):
    """A reader's side. Each reading asks, so that it brings what was published before."""

    def __init__(self, relay: Any, endpoint: str) -> None:
        """Through a relay on the board's host."""
        self._relay, self._endpoint = relay, endpoint
        self._is_finished = False

    @property
    def is_finished(self) -> bool:
        """Whether no more will come, as was said last."""
        return self._is_finished

    def read_newer(self, tensors: Mapping[str, Tensor], known: int) -> int:
        """Copy what is published into tensors, unless that is version ``known``. Returns its version.

        A host or board that is gone leaves what is known.

        Raises:
            ChannelTimeoutError: nothing of the board was ever read, and it is gone; or the relay does not answer.
        """
        snapshot = ParameterSnapshot(version=-1, is_finished=True)
        try:
            with contextlib.suppress(ray.exceptions.RayActorError):  # its host is gone
                snapshot = ray.get(
                    self._relay.read_parameters.remote(self._endpoint, known), timeout=_ANSWER_S
                )
        except ray.exceptions.GetTimeoutError as error:
            raise ChannelTimeoutError("parameters", "the relay does not answer", _ANSWER_S) from error
        self._is_finished = snapshot.is_finished
        if snapshot.version < 0:
            if known < 0:
                told = f"{self._endpoint} on another host is not there any more"
                raise ChannelTimeoutError("parameters", told, 0.0)
            return known
        for name, tensor in snapshot.tensors.items():
            tensors[name].detach().copy_(tensor)
        return snapshot.version

    def close(self) -> None:
        """Nothing to let go of here; the relay forgets boards that are over."""
