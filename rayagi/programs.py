"""Workloads that are no reinforcement learning: the papers' programming interface (docs/programs.md).

::

    manager = GmiManager(GmiConfig(backend="cpu"))
    for gmi_id in range(2):
        manager.add_gmi(gmi_id, Average, torch.tensor([float(gmi_id)]))
    with manager:
        print(manager.gmi_run(num_rounds=3))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from actors.gmi import GmiContext
from actors.workload import GmiProgram
from placement.errors import PlanError
from placement.plan import PlacementPlan
from rayagi.config.spec import EnvSpec, GmiSpec, RunSpec
from rayagi.coordinator.session import ITERATION_TIMEOUT_S, Session, SessionClosedError

__all__ = ["GmiConfig", "GmiManager", "GmiProgram"]

GmiConfig = GmiSpec
"""How the machine is cut; what concerns environments and templates does not apply here."""


@dataclass(frozen=True, slots=True)
class _ProgramCall:
    """A program of one GMI, not yet built."""

    program: Callable[..., GmiProgram]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _ProgramPerGmi:
    """Builds in each GMI what was added for it; picklable if the programs and their arguments are."""

    added: tuple[_ProgramCall, ...]

    def __call__(self, context: GmiContext) -> GmiProgram:
        """Build this GMI's."""
        own = self.added[context.identity.index]
        return own.program(context, *own.args, **own.kwargs)


class GmiManager:
    """Says which GMIs there are, and on which GPUs; then starts them all, and runs them (the papers' GMI_manager)."""

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
            config: backend, threads, time limits; None: as the machine suggests
            name: of the workload, for Ray's lists
            ray_address: host:port of a cluster; None: RAY_ADDRESS, else this machine alone
            on_plan: called with the plan before anything is reserved
        """
        self.config = config or GmiConfig()
        self._name, self._ray_address, self._on_plan = name, ray_address, on_plan
        self._added: dict[int, _ProgramCall] = {}
        self._gpus: dict[int, int] = {}
        self._session: Session | None = None

    def add_gmi(self, gmi_id: int, program: Callable[..., GmiProgram], /, *args: Any, **kwargs: Any) -> None:
        """Add a GMI that will run ``program(context, *args, **kwargs)``: a subclass of GmiProgram, usually.

        Raises:
            ValueError: there is one of this number already.
        """
        if gmi_id in self._added:
            raise ValueError(f"GMI {gmi_id} was added before")
        self._added[gmi_id] = _ProgramCall(program, args, kwargs)

    def set_gpu(self, gmi_id: int, gpu_id: int) -> None:
        """Put a GMI on a GPU, which it shares evenly with the others that are put there.

        GPUs are counted as the plan fills them, from 0; GMIs count through them in order. Without this, the plan decides.

        Raises:
            ValueError: there is no such GMI or GPU.
        """
        if gmi_id not in self._added or gpu_id < 0:
            raise ValueError(f"GMI {gmi_id} on GPU {gpu_id}: add the GMI first, and count GPUs from 0")
        self._gpus[gmi_id] = gpu_id

    @property
    def plan(self) -> PlacementPlan:
        """What runs where."""
        return self._open().plan

    def gmi_run(self, *args: Any, timeout_s: float = ITERATION_TIMEOUT_S, **kwargs: Any) -> list[Any]:
        """Call every GMI's ``gmi_run`` with these arguments; what each returns, in GMI order.

        Raises:
            GmiLostError, GmiSilentError: a GMI is gone, or did not answer within ``timeout_s``.
            Exception: what a program raised, as itself.
        """
        return self._open().run(*args, timeout_s=timeout_s, **kwargs)

    def close(self) -> None:
        """Stop the GMIs and give back what was reserved. Safe to call twice."""
        if self._session is not None:
            self._session.close()

    def __enter__(self) -> Self:
        """Cut the machine, start the GMIs and build their programs.

        Raises:
            PlanError: the GMIs' numbers have gaps, or do not fit the config or the machine.
            Exception: as rayagi.coordinator.Session.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> Session:
        if self._session is None:
            raise SessionClosedError("it was not opened")
        return self._session

    def _gmi_config(self) -> GmiConfig:
        """The config for the GMIs that were added."""
        count = len(self._added)
        if sorted(self._added) != list(range(count)) or not count:
            raise PlanError(
                f"GMIs {sorted(self._added)}", "they count from 0 without gaps", "Add those that are missing"
            )
        if self.config.num_gmis not in (None, count):
            raise PlanError(
                f"num_gmis={self.config.num_gmis}", f"{count} GMIs were added", "Leave num_gmis out"
            )
        config = replace(self.config, template="program", num_envs=1, num_gmis=count)
        return replace(config, gmis_per_gpu=None, slices=self._shares(count)) if self._gpus else config

    def _shares(self, count: int) -> tuple[float, ...]:
        """Each GMI's share of its GPU, where GPUs are filled in order."""
        gpus = [self._gpus.get(gmi_id, -1) for gmi_id in range(count)]
        if -1 in gpus or gpus != sorted(gpus) or set(gpus) != set(range(max(gpus) + 1)):
            raise PlanError(
                f"GMIs on GPUs {gpus}",
                "either all GMIs are put on GPUs, and count through them from GPU 0 in order, or none is",
                "Number them like [[0, 1, 2], [3, 4]]",
            )
        return tuple(1 / gpus.count(gpu) for gpu in gpus)
