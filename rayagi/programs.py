"""General GMI workloads: the papers' programming interface, for tasks other than reinforcement learning.

docs/how-to/other-workloads.md is its guide.

::

    manager = GmiManager(GmiConfig(backend="cpu"))
    for gmi_id in range(2):
        manager.add_gmi(gmi_id, Average, torch.tensor([float(gmi_id)]))
    with manager:
        print(manager.gmi_run(num_rounds=3))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from actors.gmi import GmiContext
from collectives.communicator import Communicator, Tensors, WorkHandle
from collectives.transports.base import ReduceOp
from placement.errors import PlanError, counted
from placement.plan import PlacementPlan
from rayagi.config.spec import EnvSpec, GmiSpec, RunSpec
from rayagi.coordinator.session import ITERATION_TIMEOUT_S, Session, SessionClosedError

GmiConfig = GmiSpec
"""GMI settings of a run; those of environments and templates do not apply here."""


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


@dataclass(frozen=True, slots=True)
class _ProgramCall:
    """A GMI's program with its arguments, before it is built."""

    program: Callable[..., GmiProgram]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _ProgramPerGmi:
    """Builds each GMI's own program; picklable if the programs and their arguments are."""

    added: tuple[_ProgramCall, ...]

    def __call__(self, context: GmiContext) -> GmiProgram:
        """Build this GMI's program."""
        own = self.added[context.identity.index]
        return own.program(context, *own.args, **own.kwargs)


class GmiManager:
    """Defines GMIs and their GPUs, starts them, and runs their programs (the papers' GMI_manager)."""

    def __init__(
        self,
        config: GmiConfig | None = None,
        *,
        name: str = "program",
        ray_address: str | None = None,
        on_plan: Callable[[PlacementPlan], None] | None = None,
    ) -> None:
        """Nothing starts before the manager is entered.

        Args:
            config: backend, threads, time limits; None: defaults for the machine
            name: name of the workload, shown by Ray
            ray_address: host:port of a cluster; None: RAY_ADDRESS, else a local cluster
            on_plan: called with the plan before anything is reserved
        """
        self.config = config or GmiConfig()
        self._name, self._ray_address, self._on_plan = name, ray_address, on_plan
        self._added: dict[int, _ProgramCall] = {}
        self._gpus: dict[int, int] = {}
        self._session: Session | None = None

    def add_gmi(self, gmi_id: int, program: Callable[..., GmiProgram], /, *args: Any, **kwargs: Any) -> None:
        """Add a GMI that runs ``program(context, *args, **kwargs)``, usually a subclass of GmiProgram.

        Raises:
            ValueError: ``gmi_id`` was added before.
        """
        if gmi_id in self._added:
            raise ValueError(f"GMI {gmi_id} was added before")
        self._added[gmi_id] = _ProgramCall(program, args, kwargs)

    def set_gpu(self, gmi_id: int, gpu_id: int) -> None:
        """Assign a GMI to a GPU; the GMIs of a GPU share it evenly.

        GPUs are numbered from 0 in the order of the plan, and GMI ids ascend with them. Without this, the plan decides.

        Raises:
            ValueError: there is no such GMI or GPU.
        """
        if gmi_id not in self._added or gpu_id < 0:
            raise ValueError(f"GMI {gmi_id} on GPU {gpu_id}: add the GMI first, and count GPUs from 0")
        self._gpus[gmi_id] = gpu_id

    @property
    def plan(self) -> PlacementPlan:
        """The placement plan."""
        return self._open().plan

    def gmi_run(self, *args: Any, timeout_s: float = ITERATION_TIMEOUT_S, **kwargs: Any) -> list[Any]:
        """Call every GMI's ``gmi_run`` with these arguments; returns the results in GMI order.

        Raises:
            GmiLostError, GmiSilentError: a GMI was lost, or did not respond within ``timeout_s``.
            Exception: an exception of a program.
        """
        return self._open().run(*args, timeout_s=timeout_s, **kwargs)

    def close(self) -> None:
        """Stop the GMIs and release the reservation. Idempotent."""
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> Self:
        """Plan, start the GMIs, and build their programs.

        Raises:
            PlanError: the GMI ids have gaps, or do not fit the config or the machine.
            Exception: as in rayagi.coordinator.session.Session.
        """
        spec = RunSpec(env=EnvSpec(id=self._name), gmi=self._gmi_config())
        factory = _ProgramPerGmi(tuple(self._added[gmi_id] for gmi_id in sorted(self._added)))
        session = Session(
            spec,
            ray_address=self._ray_address,
            factory=factory,
            run_name=self._name,
            on_plan=self._on_plan,
        )
        self._session = session.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> Session:
        if self._session is None:
            raise SessionClosedError("it was not opened")
        return self._session

    def _gmi_config(self) -> GmiConfig:
        """The config for the added GMIs."""
        count = len(self._added)
        if sorted(self._added) != list(range(count)) or not count:
            raise PlanError(
                f"GMIs {sorted(self._added)}", "ids have to count from 0 without gaps", "Add the missing ids"
            )
        if self.config.num_gmis not in (None, count):
            raise PlanError(
                f"num_gmis={self.config.num_gmis}",
                f"the program has {counted(count, 'GMI')}",
                "Leave num_gmis out",
            )
        config = replace(self.config, template="program", num_envs=1, num_gmis=count)
        return replace(config, gmis_per_gpu=None, slices=self._shares(count)) if self._gpus else config

    def _shares(self, count: int) -> tuple[float, ...]:
        """Each GMI's share of its GPU; GPUs are filled in order."""
        gpus = [self._gpus.get(gmi_id, -1) for gmi_id in range(count)]
        if -1 in gpus or gpus != sorted(gpus) or set(gpus) != set(range(max(gpus) + 1)):
            raise PlanError(
                f"GMIs on GPUs {gpus}",
                "either all GMIs are assigned to GPUs, in order from GPU 0, or none is",
                "Number them like [[0, 1, 2], [3, 4]]",
            )
        return tuple(1 / gpus.count(gpu) for gpu in gpus)
