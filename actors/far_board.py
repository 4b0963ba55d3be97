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
from collectives.experience.parameters import ParameterBoard, ReadableBoard

_ANSWER_S = 30.0
"""For a relay to answer: one that died is started anew meanwhile."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What a board shows now."""

    version: int
    """-1: nothing was published, or the board is gone."""
    over: bool
    """Whether no more will come."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """Empty where the reader has this version."""


class Window:
    """A relay's side: reads the boards of its host for those elsewhere."""

    def __init__(self) -> None:
        self._boards: dict[str, ParameterBoard] = {}

    def show(self, endpoint: str, known: int) -> Shown:
        """What is published there, unless it is version ``known``.

        A board whose owner has ended, and which was never looked at, cannot be opened any more: it is over.
        """
        try:
            board = self._board(endpoint)
        except ChannelError:
            return Shown(version=-1, over=True)
        over = board.over  # asked before the version: what was published last still counts
        if board.version in (known, -1):
            return Shown(board.version, over)
        tensors = {field.name: torch.empty(field.shape, dtype=field.dtype) for field in board.schema.fields}
        return Shown(board.read_into(tensors), over, tensors)

    def _board(self, endpoint: str) -> ParameterBoard:
        if endpoint not in self._boards:
            found = ParameterBoard.attach(endpoint)
            for known, board in list(self._boards.items()):
                if board.over:
                    self._boards.pop(known).close()
            self._boards[endpoint] = found
        return self._boards[endpoint]


class FarBoard(ReadableBoard):
    """A reader's side. Each reading asks, so that it brings what was published before."""

    def __init__(self, relay: Any, endpoint: str) -> None:
        """Through a relay on the board's host."""
        self._relay, self._endpoint = relay, endpoint
        self._over = False

    @property
    def over(self) -> bool:
        """Whether no more will come, as was said last."""
        return self._over

    def read_newer(self, tensors: Mapping[str, Tensor], known: int) -> int:
        """Copy what is published into tensors, unless that is version ``known``. Returns its version.

        A host or board that is gone leaves what is known.

        Raises:
            ChannelTimeoutError: nothing of the board was ever read, and it is gone; or the relay does not answer.
        """
        shown = Shown(version=-1, over=True)
        try:
            with contextlib.suppress(ray.exceptions.RayActorError):  # its host is gone
                shown = ray.get(self._relay.show.remote(self._endpoint, known), timeout=_ANSWER_S)
        except ray.exceptions.GetTimeoutError as error:
            raise ChannelTimeoutError("parameters", "the relay does not answer", _ANSWER_S) from error
        self._over = shown.over
        if shown.version < 0:
            if known < 0:
                told = f"{self._endpoint} on another host is not there any more"
                raise ChannelTimeoutError("parameters", told, 0.0)
            return known
        for name, tensor in shown.tensors.items():
            tensors[name].detach().copy_(tensor)
        return shown.version

    def close(self) -> None:
        """Nothing to let go of here; the relay forgets boards that are over."""
