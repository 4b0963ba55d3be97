"""Member of a benchmark: connects compositions, checks their results and times them, on request."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from collectives.choice import supported_primitives
from collectives.composed import ComposedCommunicator, run_step
from collectives.compositions import compose
from collectives.failure_detector import FailureDetector
from collectives.layout import Layout
from collectives.profile import WARM_UP, mean_s
from collectives.rendezvous import Rendezvous, gather_members, this_member
from collectives.schedule import PRIMITIVES, Primitive, Step
from collectives.transport_factory import GroupContext, GroupTransportFactory
from collectives.transports.base import Transport

TIMEOUT_S = 120.0
"""How long an operation waits for the other members."""
_UNIT_ROUNDOFF = 2.0**-24
"""Of float32."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of reducing known numbers.

    Attributes:
        digest: of the result's bits; equal on all members
        wrong: elements that deviate from the float64 sum beyond the error bound of float32 sums; counted by rank 0
    """

    digest: str
    wrong: int


class BenchMember:
    """Connects compositions and primitives on request, and times them on registered memory.

    Every member gets the same requests in the same order. With a GPU, tensors are on it. [unverified on GPU]
    """

    def __init__(self, rank: int, layout: Layout, gpu: str | None = None, address: str = "127.0.0.1") -> None:
        """``gpu``: UUID of the GPU to use; None: the layout's devices and nodes are nominal."""
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # before CUDA starts in this process
        torch.set_num_threads(1)
        node, device = layout.places()[rank]
        me = this_member(rank, address, gpu or f"device {device}")
        self._me = replace(me, host_id=f"{me.host_id}/node {node}")
        self._rank, self._layout = rank, layout
        self._device = torch.device("cuda:0" if gpu is not None else "cpu")  # NCCL needs the index
        self._most_elements = 0
        self._failure_detector: FailureDetector | None = None
        self._opened: dict[str, tuple[ComposedCommunicator, Tensor]] = {}
        self._stepped: dict[tuple[Primitive, tuple[int, ...]], tuple[Transport, Tensor]] = {}

    def join(self, rendezvous: Rendezvous, most_bytes: int) -> set[Primitive]:
        """Rendezvous with the others; tensors have at most ``most_bytes``. Returns the primitives that work here."""
        self._most_elements = most_bytes // 4
        self._failure_detector = FailureDetector(self._me)
        context = GroupContext(
            rendezvous=rendezvous,
            generation=0,
            timeout_s=TIMEOUT_S,
            transport="auto",
            composition="auto",
            device=self._device,
            failure_detector=self._failure_detector,
        )
        size = self._layout.world_size
        members = gather_members(
            rendezvous, self._failure_detector, world_size=size, generation=0, timeout_s=TIMEOUT_S
        )
        self._transport_factory = GroupTransportFactory(context, members, self._rank, "")
        if self._device.type == "cpu":
            return set(PRIMITIVES)  # Gloo and shared memory replace primitives that need GPUs
        control = self._transport_factory.scoped("control").transport(
            "ip" if len(self._layout.nodes) == 1 else "net", tuple(range(size))
        )
        try:
            return supported_primitives(
                self._transport_factory, self._layout, self._rank, control, self._device, TIMEOUT_S
            )
        finally:
            control.close()

    def open(self, composition: str) -> str:
        """Connect a composition. Returns a description of the communicator, with this member's transports."""
        transport_factory = self._transport_factory.scoped(composition)
        communicator = ComposedCommunicator(self._rank, compose(composition, self._layout), transport_factory)
        self._opened[composition] = communicator, self._memory(communicator.buffer)
        return repr(communicator)

    def check(self, composition: str, nbytes: int) -> CheckResult:
        """Sum known numbers with a composition and compare with a float64 sum."""
        communicator, memory = self._opened[composition]
        flat = memory[: nbytes // 4]
        flat.copy_(_numbers(self._rank, flat.numel()))
        communicator.all_reduce(flat)
        found = flat.to("cpu", copy=True)
        flat.zero_()  # sums of zeros stay zero, however often they are timed
        digest = hashlib.sha256(found.numpy().tobytes()).hexdigest()
        return CheckResult(digest, self._wrong(found) if self._rank == 0 else 0)

    def time(self, composition: str, nbytes: int, runs: int) -> float:
        """Mean seconds of consecutive sums on this member."""
        communicator, memory = self._opened[composition]
        return self._mean_s(partial(communicator.all_reduce, memory[: nbytes // 4]), runs)

    def time_step(self, step: Step, nbytes: int, runs: int) -> float:
        """Mean seconds of one step; 0 where this member is not in it."""
        group = step.group_of(self._rank)
        if group is None:
            return 0.0
        key = (step.primitive, group)
        if key not in self._stepped:
            transport = self._transport_factory.scoped("profile").transport(*key)
            self._stepped[key] = transport, self._memory(transport.buffer)
        transport, memory = self._stepped[key]
        return self._mean_s(partial(run_step, step, transport, memory[: nbytes // 4], "sum"), runs)

    def end_steps(self) -> None:
        """Close the transports that steps were timed with."""
        for transport, _ in self._stepped.values():
            transport.close()
        self._stepped.clear()

    def close(self) -> None:
        """Leave all groups."""
        self.end_steps()
        for communicator, _ in self._opened.values():
            communicator.close()
        self._opened.clear()
        if self._failure_detector is not None:
            self._failure_detector.close()

    def _memory(self, registered: Callable[[int, torch.dtype], Tensor]) -> Tensor:
        """Memory as for a trainer's gradients (``FlatParameters``): registered memory, if it is on the device."""
        memory = registered(self._most_elements, torch.float32)
        if memory.device.type == self._device.type:
            return memory
        return torch.zeros(self._most_elements, device=self._device)

    def _mean_s(self, operation: Callable[[], object], runs: int) -> float:
        def finished() -> None:
            operation()
            if self._device.type == "cuda":
                torch.cuda.synchronize()

        return mean_s(finished, runs=runs, warm_up=min(WARM_UP, 1 + runs // 4))

    def _wrong(self, found: Tensor) -> int:
        """Elements beyond the error bound of sums in any order, (world_size - 1) u sum |x|; here with world_size."""
        total = torch.zeros(found.numel(), dtype=torch.float64)
        magnitude = torch.zeros_like(total)
        for rank in range(self._layout.world_size):
            numbers = _numbers(rank, found.numel()).double()
            total += numbers
            magnitude += numbers.abs()
        bound = self._layout.world_size * _UNIT_ROUNDOFF * magnitude
        return int(((found.double() - total).abs() > bound).sum())


def _numbers(rank: int, numel: int) -> Tensor:
    """The contribution of a rank to a check; all members can compute it."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))
