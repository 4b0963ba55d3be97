"""A GMI: a slice of a device and the roles that run on it, in one process."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from actors.host_memory import release_free_memory
from actors.protocols import EvaluationResult, IterationResult, Program, StateDict, Workload
from actors.rendezvous_actor import RendezvousActor
from collectives.communicator import Communicator
from collectives.connect import connect
from collectives.experience.directory import Directory
from collectives.experience.remote_transport import RemoteTransport
from collectives.rendezvous import Rendezvous, this_member
from collectives.solo import SoloCommunicator
from collectives.transport_factory import TransportName
from placement.backends import get_backend
from placement.backends.base import cuda_missing_error
from placement.types import Slice


@dataclass(frozen=True, kw_only=True, slots=True)
class GmiIdentity:
    """Who a GMI is."""

    index: int
    num_gmis: int
    slice: Slice
    roles: tuple[str, ...]
    task: str
    kinds: tuple[tuple[str, ...], ...] = ()
    """Roles of every GMI, where they differ; empty: all have these."""
    group: tuple[int, ...] | None = None
    """GMIs that its communicator connects, by rank; None: all. Where others may be lost and replaced, learners only."""

    @property
    def members(self) -> tuple[int, ...]:
        """GMIs that form the group, by rank."""
        return tuple(range(self.num_gmis)) if self.group is None else self.group

    @property
    def joins_group(self) -> bool:
        """Whether it has others to meet."""
        return self.index in self.members and len(self.members) > 1

    def hosting(self, role: str) -> tuple[int, ...]:
        """Indices of the GMIs that host a role."""
        kinds = self.kinds or (self.roles,) * self.num_gmis
        return tuple(index for index, roles in enumerate(kinds) if role in roles)

    def __str__(self) -> str:
        return f"GMI {self.index}/{self.num_gmis} {self.slice.label()} {'+'.join(self.roles)} {self.task}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
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
    """Of the GMIs in the identity's group; a GMI that is not among them has one of its own."""
    device: torch.device
    directory: Directory = field(default_factory=partial(RendezvousActor, 1))
    """Where GMIs say how experience and parameters reach them; one that is alone has its own."""
    node: str = ""
    """By which GMIs on other hosts name this one's, where they can reach it."""
    remote_transport: RemoteTransport | None = None
    """How this GMI reaches other hosts; None: it cannot."""


class ProgramFactory(Protocol):
    """Builds a GMI's program inside its process; picklable."""

    def __call__(self, context: GmiContext) -> Program:
        """Build the program."""
        ...


class WorkloadFactory(Protocol):
    """Builds a workload of another kind inside a GMI's process; picklable."""

    def __call__(self, context: GmiContext) -> Workload:
        """Build the workload."""
        ...


class Gmi:
    """One GMI in one process: it enters its slice, meets the others, builds its program, and runs it when asked.

    Calls come in this order: ``worker_info``, ``enter``, ``join`` (where the group has others), ``build``, then the rest.
    When the program raises, the GMI leaves the group, so that the others fail at once and not at their time limit.
    """

    def __init__(self, identity: GmiIdentity, backend_name: str) -> None:
        self.identity = identity
        self._backend = get_backend(backend_name)
        self._communicator: Communicator | None = None
        self._program: Program | Workload | None = None
        self.directory: Directory = RendezvousActor(1)
        self.node = ""
        self.remote_transport: RemoteTransport | None = None

    def worker_info(self) -> WorkerInfo:
        """Say where this process is. CUDA is not touched: which share of which GPU it enters is not known yet."""
        return WorkerInfo(
            index=self.identity.index,
            node_id="",
            hostname=socket.gethostname(),
            pid=os.getpid(),
            cores=tuple(sorted(os.sched_getaffinity(0))),
            num_threads=torch.get_num_threads(),
            gpu_ids=(),
        )

    def enter(self, gmi_slice: Slice) -> WorkerInfo:
        """Enter the slice, and say where that is.

        Args:
            piece: on the GPU that was given, with the share that was carved there

        Raises:
            SliceError: its cores or its device are not here.
        """
        self.identity = replace(self.identity, slice=gmi_slice)
        self._backend.enter(gmi_slice)
        return self.worker_info()

    def join(
        self,
        rendezvous: Rendezvous,
        *,
        timeout_s: float,
        transport: TransportName = "auto",
        composition: str = "auto",
        address: str = "127.0.0.1",
        generation: int = 0,
    ) -> str:
        """Meet the other GMIs of the group and connect to them. ``address``: this host's, for GMIs elsewhere.

        Returns:
            what came of it: the composition, the layout it found, and what carries each primitive.

        Raises:
            RendezvousError: a GMI is missing, or two claim one rank.
            CompositionError: there is no such composition, or it does not apply to where the GMIs are.
            CommunicatorError: they met but could not connect.
            SliceError: CUDA is not there.
        """
        with self._needing_device() as device:  # to choose a composition is to try what the GPU can do
            self._communicator = connect(
                rendezvous,
                this_member(
                    self.identity.members.index(self.identity.index), address, self.identity.slice.gpu_uuid
                ),
                world_size=len(self.identity.members),
                timeout_s=timeout_s,
                transport=transport,
                composition=composition,
                device=device,
                generation=generation,
            )
        return repr(self._communicator)

    def build(self, factory: ProgramFactory | WorkloadFactory) -> None:
        """Build the program on this slice; one that was built there before is closed, and its memory given back.

        Raises:
            RuntimeError: there are other GMIs and this one has not joined them.
            SliceError: CUDA is not there, or shows that this process is not confined to its slice.
        """
        if self._communicator is None:
            if self.identity.joins_group:
                raise RuntimeError(f"{self} must join the other GMIs before its program is built")
            self._communicator = SoloCommunicator()
        with self._leave_on_error():
            self._close_program()
            with self._needing_device() as device:
                context = GmiContext(
                    identity=self.identity,
                    communicator=self._communicator,
                    device=device,
                    directory=self.directory,
                    node=self.node,
                    remote_transport=self.remote_transport,
                )
                self._program = factory(context)
            if torch.cuda.is_initialized():
                self._backend.verify(self.identity.slice)

    def iterate(self, num_iterations: int) -> list[IterationResult]:
        """Run iterations; one result each."""
        with self._leave_on_error():
            return [self._require_program().iterate() for _ in range(num_iterations)]

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a workload's ``gmi_run``; returns what it returns."""
        with self._leave_on_error():
            return self._require_program().gmi_run(*args, **kwargs)

    def evaluate(self, num_episodes: int, seed: int) -> EvaluationResult:
        """Run whole episodes without learning."""
        with self._leave_on_error():
            result: EvaluationResult = self._require_program().evaluate(num_episodes, seed)
            return result

    def state_dict(self, *, shared: bool = True) -> StateDict:
        """``{"shared": ..., "local": ...}``; without what all GMIs hold alike where that is not asked for."""
        state: StateDict = self._require_program().state_dict()
        return state if shared else {"local": state["local"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; ``local`` may be missing."""
        with self._leave_on_error():
            self._require_program().load_state_dict(state)

    def close(self) -> None:
        """Release the program and leave the group. Safe to call twice."""
        program, self._program = self._program, None
        try:
            if program is not None:
                program.close()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # to end a process with work in flight can harm its neighbours on the GPU
        finally:
            self._leave()

    def _close_program(self) -> None:
        """Close the program that is there, and leave none of its memory for the next one to find. [unverified on GPU]"""
        if self._program is None:
            return
        program, self._program = self._program, None
        program.close()
        del program
        release_free_memory()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _require_program(self) -> Any:
        """A Program, or a Workload where it is asked to ``run``: who opened the session knows which."""
        if self._program is None:
            raise RuntimeError(f"{self} has no program: it was not built yet, or is closed")
        return self._program

    @contextmanager
    def _leave_on_error(self) -> Iterator[None]:
        """Leave the group when the block raises: the others must not wait for one that will not come."""
        try:
            yield
        except BaseException:
            self._leave()
            raise

    @contextmanager
    def _needing_device(self) -> Iterator[torch.device]:
        """The slice's device; says so when the block fails since CUDA is not there."""
        device = torch.device(self._backend.device(self.identity.slice))
        try:
            yield device
        except (RuntimeError, AssertionError) as error:
            # torch raises these two themselves where it finds no CUDA; errors of ours are of classes of their own.
            by_torch = type(error) in (RuntimeError, AssertionError)
            if by_torch and device.type == "cuda" and not torch.cuda.is_available():
                raise cuda_missing_error(self.identity.slice) from error
            raise

    def _leave(self) -> None:
        if self._communicator is not None:
            self._communicator.close()

    def __repr__(self) -> str:
        return str(self.identity)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
