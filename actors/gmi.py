"""A GMI: one process with a slice of a device and the roles that run on it."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actors.errors import ProgramInterruptedError
from actors.host_memory import release_free_memory
from actors.ping import Address
from actors.protocols import EvaluationResult, IterationResult, Program, StateDict, Workload
from actors.rendezvous_actor import RendezvousActor
from actors.replay import ReplayCheckpointError
from collectives.closing import ClosesOnExit
from collectives.communicator import Communicator
from collectives.connect import connect
from collectives.experience.directory import Directory, ScopedDirectory
from collectives.experience.migrator import RemoteTransport
from collectives.rendezvous import Rendezvous, this_member
from collectives.solo import SoloCommunicator
from collectives.transport_factory import TransportName
from collectives.transports.shm.memory import MEMORY_LIMIT
from placement.backends import get_backend
from placement.backends.cuda_errors import cuda_missing_error, gpu_memory_error, unusable_gpu_error
from placement.inventory.limits import memory_bytes
from placement.role_layout import gmis_hosting
from placement.types import Slice


@dataclass(frozen=True, kw_only=True, slots=True)
class GmiIdentity:
    """Index, slice, roles and communication group of a GMI."""

    index: int
    num_gmis: int
    slice: Slice
    roles: tuple[str, ...]
    task: str
    worker_types: tuple[tuple[str, ...], ...] = ()
    """Roles of every GMI, if they differ; empty: all have the same."""
    group: tuple[int, ...] | None = None
    """GMIs that its communicator connects, by rank; None: all. Learners only, if other GMIs may be replaced."""

    @property
    def members(self) -> tuple[int, ...]:
        """GMIs that form the group, by rank."""
        return tuple(range(self.num_gmis)) if self.group is None else self.group

    @property
    def joins_group(self) -> bool:
        """Whether this GMI is in a group of more than one."""
        return self.index in self.members and len(self.members) > 1

    def hosting(self, role: str) -> tuple[int, ...]:
        """Indices of the GMIs that host a role."""
        return gmis_hosting(role, self.worker_types or (self.roles,) * self.num_gmis)

    def __str__(self) -> str:
        return f"GMI {self.index}/{self.num_gmis} {self.slice.label()} {'+'.join(self.roles)} {self.task}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """Placement of a GMI as seen from inside its process."""

    index: int
    node_id: str
    hostname: str
    pid: int
    cores: tuple[int, ...]
    num_threads: int
    gpu_ids: tuple[str, ...]
    ping_address: Address | None = None
    """Where its process answers pings; None: nowhere."""


_ONE_CORE = Slice(node="here", backend="cpu", cores=(0,))


@dataclass(slots=True)
class GmiContext:
    """What a program factory gets in a GMI's process."""

    identity: GmiIdentity
    communicator: Communicator
    """Communicator of the identity's group; a GMI outside the group has a solo communicator."""
    device: torch.device
    directory: Directory = field(default_factory=partial(RendezvousActor, 1))
    """Where GMIs announce the endpoints of experience channels and parameter stores; local for a single GMI."""
    node: str = ""
    """Id of this node for GMIs on other hosts; empty: not reachable from them."""
    remote_transport: RemoteTransport | None = None
    """Transport to other hosts; None: not available."""

    @classmethod
    def local(
        cls,
        task: str,
        communicator: Communicator | None = None,
        *,
        roles: tuple[str, ...] = ("simulator", "agent", "trainer"),
        gmi_slice: Slice = _ONE_CORE,
        device: str = "cpu",
    ) -> GmiContext:
        """For a program in this process, without Ray; without a communicator it is the only one."""
        communicator = communicator or SoloCommunicator()
        rank, size = communicator.rank, communicator.world_size
        identity = GmiIdentity(index=rank, num_gmis=size, slice=gmi_slice, roles=roles, task=task)
        return cls(identity=identity, communicator=communicator, device=torch.device(device))


ProgramFactory = Callable[[GmiContext], Program]
"""Builds a GMI's program inside its process; picklable."""

WorkloadFactory = Callable[[GmiContext], Workload]
"""Builds a user-defined workload inside a GMI's process; picklable."""


class Gmi(ClosesOnExit):
    """One GMI in one process: enters its slice, joins its group, builds its program, and runs it on request.

    Order of calls: ``worker_info``, ``enter``, ``join`` (in a group of more than one), ``build``, then the others. When
    the program raises, the GMI leaves the group, so that its peers fail at once instead of at their time limit.
    """

    def __init__(self, identity: GmiIdentity, backend_name: str) -> None:
        self.identity = identity
        MEMORY_LIMIT.lower(memory_bytes())
        self._backend = get_backend(backend_name)
        self._communicator: Communicator | None = None
        self._program: Program | Workload | None = None
        self._num_builds = 0
        self.directory: Directory = RendezvousActor(1)
        self.node = ""
        self.remote_transport: RemoteTransport | None = None

    def worker_info(self) -> WorkerInfo:
        """Report this process's placement. Does not initialise CUDA: the slice is not entered yet."""
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
        """Enter the slice, which names the allocated GPU and the partition created there; report the placement.

        Raises:
            SliceError: its cores or its device are not available here.
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
        """Join the group: rendezvous with the other GMIs, and connect to them. ``address``: this host's, for remote GMIs.

        Returns:
            the communicator's description: composition, detected layout, and transport of each primitive.

        Raises:
            RendezvousError: a GMI is missing, or two claim one rank.
            CompositionError: unknown composition, or one that does not apply to this layout.
            CommunicatorError: the rendezvous succeeded, but connecting failed.
            SliceError: CUDA is not available.
        """
        with self._needing_device() as device:  # choosing a composition probes the GPU
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
        """Build the program on this slice. A previous program is closed first, and its memory released.

        Raises:
            RuntimeError: this GMI has not joined its group.
            SliceError: CUDA is not available, or this process is not confined to its slice.
        """
        if self._communicator is None:
            if self.identity.joins_group:
                raise RuntimeError(f"{self} must join the other GMIs before its program is built")
            self._communicator = SoloCommunicator()
        with self._leave_on_error():
            self._close_program()
            # The same in all GMIs: they build together, or once in each process where a session restarts some.
            self._num_builds += 1
            with self._needing_device() as device:
                context = GmiContext(
                    identity=self.identity,
                    communicator=self._communicator,
                    device=device,
                    # What an earlier program announced is gone, or about to be. Replay shards are in no scope.
                    directory=ScopedDirectory(self.directory, f"{self._num_builds}/"),
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
        """``{"shared": ..., "local": ...}``; only ``local`` if ``shared`` is False."""
        state: StateDict = self._require_program().state_dict()
        return state if shared else {"local": state["local"]}

    def save_replay(self, folder: str) -> str | None:
        """Write the program's replay into a new folder. Returns None if it has none, else why it failed, or ''."""
        save = getattr(self._require_program(), "save_replay", None)
        try:
            return "" if save is not None and save(Path(folder)) else None
        except ReplayCheckpointError as error:
            return str(error)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; ``local`` and ``replay`` may be missing."""
        with self._leave_on_error():
            self._require_program().load_state_dict(state)

    def close(self) -> None:
        """Release the program and leave the group. Safe to call twice."""
        program, self._program = self._program, None
        try:
            if program is not None:
                program.close()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # ending a process with pending kernels can harm its neighbours on the GPU
        finally:
            self._leave()

    def _close_program(self) -> None:
        """Close the current program, and release its memory before the next one is built. [unverified on GPU]"""
        if self._program is None:
            return
        program, self._program = self._program, None
        program.close()
        del program
        release_free_memory()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _require_program(self) -> Any:
        """The Program, or the Workload for ``run``; the session knows which one it built."""
        if self._program is None:
            raise RuntimeError(f"{self} has no program: it was not built yet, or is closed")
        return self._program

    @contextmanager
    def _leave_on_error(self) -> Iterator[None]:
        """Leave the group when the block raises, so that its peers do not wait for this GMI.

        Raises:
            ProgramInterruptedError: the block raised KeyboardInterrupt.
            GpuMemoryError: the block needed more memory of the GPU than there is.
        """
        try:
            yield
        except KeyboardInterrupt as error:
            self._leave()
            innermost = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{innermost.filename}:{innermost.lineno} in {innermost.name}"
            raise ProgramInterruptedError(str(self), where) from error
        except BaseException as error:
            self._leave()
            if (sent := _exit_by_ray(error)) is not None:  # an environment's error, caused by it
                raise sent from None
            if short := gpu_memory_error(self.identity.slice, error):
                raise short from error
            raise

    @contextmanager
    def _needing_device(self) -> Iterator[torch.device]:
        """The slice's device; raises SliceError if the block fails because CUDA is not available, or not on this GPU."""
        device = torch.device(self._backend.device(self.identity.slice))
        try:
            yield device
        except (RuntimeError, AssertionError) as error:
            # Without CUDA torch raises exactly these two classes; rayagi's own errors are subclasses.
            by_torch = type(error) in (RuntimeError, AssertionError)
            if by_torch and device.type == "cuda" and not torch.cuda.is_available():
                raise cuda_missing_error(self.identity.slice) from error
            if device.type == "cuda" and (known := unusable_gpu_error(self.identity.slice, error)):
                raise known from error
            raise

    def _leave(self) -> None:
        if self._communicator is not None:
            self._communicator.close()

    def __repr__(self) -> str:
        return str(self.identity)


def _exit_by_ray(error: BaseException | None) -> SystemExit | None:
    """What Ray's handler of SIGTERM has raised, in whatever code of the program; None if the error has another cause."""
    visited: set[int] = set()  # `raise error from error` is its own cause
    while error is not None and id(error) not in visited:
        if isinstance(error, SystemExit) and hasattr(error, "ray_terminate_msg"):
            return error
        visited.add(id(error))
        error = error.__cause__
    return None
