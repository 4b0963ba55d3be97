"""Base class of user-defined workloads on GMIs, other than reinforcement learning: the papers' Listing 1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actors.gmi import GmiContext
from collectives.communicator import Communicator, Tensors, WorkHandle
from collectives.transports.base import ReduceOp


class GmiProgram(ABC):
    """A user's workload on one GMI (GMI-DRL, Listing 1 of both versions); subclass it and write ``gmi_run``.

    It is built inside the GMI's process, on its slice, once all GMIs are connected. ::

        class Average(GmiProgram):
            def __init__(self, context, values):
                super().__init__(context)
                self.values = values

            def gmi_run(self, num_rounds):
                for _ in range(num_rounds):
                    self.all_reduce(self.values, "mean")
                return self.values
    """

    def __init__(self, context: GmiContext) -> None:
        self.context = context

    @property
    def gmi_id(self) -> int:
        """Index of this GMI, from 0; equal to its rank among all."""
        return self.context.identity.index

    @property
    def num_gmis(self) -> int:
        """Number of GMIs."""
        return self.context.identity.num_gmis

    @property
    def device(self) -> torch.device:
        """This GMI's device: its share of a GPU, or the CPU."""
        return self.context.device

    @abstractmethod
    def gmi_run(self, *args: Any, **kwargs: Any) -> Any:
        """The main routine; all GMIs are called with the same arguments. Ray returns the result to the driver."""

    def get_group(self, gmi_ids: Sequence[int] | None = None) -> Communicator | None:
        """A group of GMIs for collectives, ranked as listed; None: all. Collective: every GMI calls it alike.

        Returns:
            None on GMIs outside the group.
        """
        everyone = self.context.communicator
        return everyone if gmi_ids is None else everyone.group(gmi_ids)

    def all_reduce(self, tensors: Tensors, op: ReduceOp = "sum", group: Communicator | None = None) -> None:
        """Reduce in place over a group of GMIs; None: all of them.

        Raises:
            CommunicatorError: a GMI is lost or did not join within the time limit.
        """
        (group or self.context.communicator).all_reduce(tensors, op)

    def send(self, tensor: Tensor, to: int) -> WorkHandle:
        """Start to send a tensor to another GMI and return; do not modify it before the handle's ``wait``."""
        return self.context.communicator.send(tensor, to)

    def recv(self, source: int) -> Tensor:
        """Wait for the next tensor of another GMI; same shape and dtype as sent, on this GMI's device.

        Raises:
            CommunicatorError: none arrived within the time limit, or the GMI is lost.
        """
        return self.context.communicator.recv(source).to(self.device)

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Release what the workload holds; called at the end, also after an error."""
