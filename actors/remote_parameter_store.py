"""Parameter store of a learner on another host, read through a relay there and Ray's object store."""

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
"""Timeout of a call of the relay. Includes the restart of a relay that died."""


@dataclass(frozen=True, slots=True)
class ParameterSnapshot:
    """Published parameters of a store."""

    version: int
    """-1: nothing was published, or the store no longer exists."""
    is_finished: bool
    """Whether the owner publishes no more."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Empty if the reader has this version already."""


class RelayParameterReader:
    """Relay side: reads the parameter stores of its host for readers on other hosts."""

    def __init__(self) -> None:
        self._parameter_stores: dict[str, ParameterStore] = {}

    def read_parameters(self, endpoint: str, known: int) -> ParameterSnapshot:
        """Published parameters, without the tensors if they are version ``known``.

        A store whose owner has ended can be opened no more: unless it is open here already, it counts as finished.
        """
        try:
            parameter_store = self._parameter_store(endpoint)
        except ChannelError:
            return ParameterSnapshot(version=-1, is_finished=True)
        # Read before the version: the last publication still counts.
        is_finished = parameter_store.is_finished
        if parameter_store.version in (known, -1):
            return ParameterSnapshot(parameter_store.version, is_finished)
        tensors = {
            field.name: torch.empty(field.shape, dtype=field.dtype) for field in parameter_store.schema.fields
        }
        return ParameterSnapshot(parameter_store.read_into(tensors), is_finished, tensors)

    def _parameter_store(self, endpoint: str) -> ParameterStore:
        if endpoint not in self._parameter_stores:
            opened = ParameterStore.attach(endpoint)
            # Close stores of former learners.
            for known, parameter_store in list(self._parameter_stores.items()):
                if parameter_store.is_finished:
                    self._parameter_stores.pop(known).close()
            self._parameter_stores[endpoint] = opened
        return self._parameter_stores[endpoint]


_GONE = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)
"""Of a call to a relay whose host is gone; the second where its node has left the cluster: Ray cannot restart it there."""


class RemoteParameterStore(ReadableParameterStore):
    """Reader side. Every read calls the relay, so it returns everything published before the call."""

    def __init__(self, relay: Any, endpoint: str) -> None:
        """Read through a relay on the owner's host."""
        self._relay, self._endpoint = relay, endpoint
        self._is_finished = False

    @property
    def is_finished(self) -> bool:
        """Whether the owner publishes no more, at the last read."""
        return self._is_finished

    def read_newer(self, tensors: Mapping[str, Tensor], known: int) -> int:
        """Copy the published tensors into ``tensors``, unless they are version ``known``. Returns their version.

        If the host or the store is gone, ``tensors`` are unchanged and ``known`` is returned.

        Raises:
            ChannelTimeoutError: the store is gone before anything was read from it, or the relay does not respond.
        """
        snapshot = ParameterSnapshot(version=-1, is_finished=True)
        try:
            with contextlib.suppress(*_GONE):
                snapshot = ray.get(
                    self._relay.read_parameters.remote(self._endpoint, known), timeout=_ANSWER_S
                )
        except ray.exceptions.GetTimeoutError as error:
            raise ChannelTimeoutError("parameters", "the relay does not respond", _ANSWER_S) from error
        self._is_finished = snapshot.is_finished
        if snapshot.version < 0:
            if known < 0:
                detail = f"{self._endpoint} on another host no longer exists"
                raise ChannelTimeoutError("parameters", detail, 0.0)
            return known
        for name, tensor in snapshot.tensors.items():
            tensors[name].detach().copy_(tensor)
        return snapshot.version

    def close(self) -> None:
        """Nothing to do: the relay closes stores that are finished."""
