"""A GMI: a slice of a device and the roles that run on it, in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from actors.protocols import Program
from collectives.communicator import Communicator
from placement.types import Slice


@dataclass(frozen=True, kw_only=True, slots=True)
class GmiIdentity:
    """Who a GMI is. ``index`` is also its rank in the group of all GMIs."""

    index: int
    num_gmis: int
    slice: Slice
    roles: tuple[str, ...]
    task: str

    def __str__(self) -> str:
        return f"GMI {self.index}/{self.num_gmis} {self.slice.label()} {'+'.join(self.roles)} {self.task}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Landing:
    """Where a GMI really is, asked from inside its process."""

    index: int
    node_id: str
    hostname: str
    pid: int
    cores: tuple[int, ...]
    num_threads: int
    gpu_ids: tuple[str, ...]


@dataclass(slots=True)
class GmiContext:
    """What a program gets to build itself in a GMI's process."""

    identity: GmiIdentity
    communicator: Communicator
    device: torch.device


class ProgramFactory(Protocol):
    """Builds a GMI's program inside its process; picklable."""

    def __call__(self, context: GmiContext) -> Program:
        """Build the program."""
        ...
