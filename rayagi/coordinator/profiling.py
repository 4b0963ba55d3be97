"""Short profiles in a GMI of their own: a program that measures instead of training, asked through a Session."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from actors.gmi import GmiContext
from actors.protocols import EnvFactory, Program, StateDict
from placement.templates import UnitCosts, unit_costs_from_dict
from placement.types import Machine
from rayagi.algorithms.gradient_noise import GROUPS, GradientNoiseLearner, NoiseScale, noise_scale
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.program import DpOnlyProgram
from rayagi.config.spec import RunSpec
from rayagi.coordinator.search_store import SearchStore
from rayagi.coordinator.session import Session
from rayagi.coordinator.unit_costs import CostProgram, CostReadings, unit_costs
from rayagi.envs import make_env_factory
from rayagi.planning import uses_gpus

NOISE_ENVS = 64
"""Environments of the learning probe: eight groups of eight."""
NOISE_WARM_UP, NOISE_ITERATIONS = 5, 15
"""Iterations of learning before the noise is measured, so that normalisers have settled, and while it is."""
COST_ROUNDS = 3
"""Times that every unit cost is measured; the median counts."""
_COSTS_NOTE = "unit costs"
COST_ENVS = 64
"""Environments at which unit costs are measured where the run leaves them to a search."""


@dataclass(frozen=True, slots=True)
class ProfilingFactory:
    """Builds a measuring program in its GMI; picklable."""

    spec: RunSpec
    make_env: EnvFactory
    program: Callable[[RunSpec, EnvFactory, GmiContext], Program]

    def __call__(self, context: GmiContext) -> Program:
        """Build it."""
        return self.program(self.spec, self.make_env, context)


class NoiseProgram(DpOnlyProgram):
    """Learns as usual, and keeps the gradient norms that the noise scale is worked out from."""

    def __init__(self, spec: RunSpec, make_env: EnvFactory, context: GmiContext) -> None:
        super().__init__(spec, make_env, context)
        policy = self.training.policy
        assert isinstance(spec.learning, PPOSpec)  # the search is of PPO
        self.metered = GradientNoiseLearner(policy.model, spec.learning, context.communicator, spec.gmi.envs)
        self.training.learner = self.metered

    def state_dict(self) -> StateDict:
        """What was measured, in the place of a state."""
        return {"shared": {"measured": self.metered.pairs}, "local": {}}


def noise_scale_of(spec: RunSpec) -> NoiseScale:
    """Noise scale of a task's policy gradient, from a short run that learns.

    Raises:
        GmiLostError, GmiSilentError, ClusterUnreachableError, ReservationError: it could not be run.
    """
    gmi = replace(spec.gmi, num_gmis=1, gmis_per_gpu=None, num_envs=NOISE_ENVS, threads_per_gmi=None)
    run = replace(spec, gmi=gmi)
    pairs = _run_profile(run, NoiseProgram, NOISE_WARM_UP + NOISE_ITERATIONS)
    return noise_scale(pairs[NOISE_WARM_UP:], small_envs=NOISE_ENVS // GROUPS, big_envs=NOISE_ENVS)


def unit_costs_of(spec: RunSpec, machine: Machine) -> UnitCosts:
    """Table 1 of the paper for a task on this machine, from one GMI that has a device to itself.

    Raises:
        GmiLostError, GmiSilentError, ClusterUnreachableError, ReservationError: it could not be run.
    """
    on_gpu = uses_gpus(spec, machine)
    # On cores an instance is one thread, and the device is all of them.
    threads = None if on_gpu else spec.gmi.threads_per_gmi or 1
    num_envs = COST_ENVS if spec.gmi.num_envs == "auto" else spec.gmi.envs
    gmi = replace(spec.gmi, num_gmis=1, gmis_per_gpu=None, num_envs=num_envs, threads_per_gmi=threads)
    readings: list[CostReadings] = _run_profile(replace(spec, gmi=gmi), CostProgram, COST_ROUNDS)
    node = machine.nodes[0]
    memory = node.usable_gpus[0].memory_total_bytes if on_gpu else node.memory_total_bytes
    return unit_costs(readings, cores=len(node.usable_cores), memory_bytes=memory, on_gpu=on_gpu)


def cached_unit_costs(
    spec: RunSpec, machine: Machine, *, log: Callable[[str], None], folder: Path | None = None
) -> UnitCosts:
    """Unit costs as they were measured before, or now.

    Raises:
        GmiLostError, GmiSilentError, ClusterUnreachableError, ReservationError: they could not be measured.
        DiskError: they could not be kept.
    """
    store = SearchStore(spec, machine, folder)
    stored = store.load_note(_COSTS_NOTE)
    if stored is not None:
        with suppress(ValueError):  # of another layout: measured anew
            return unit_costs_from_dict(stored)
    log(f"Measuring what {spec.env.id} costs here, phase by phase: about a minute.")
    costs = unit_costs_of(spec, machine)
    store.save_note(_COSTS_NOTE, asdict(costs))
    return costs


def _run_profile(spec: RunSpec, program: Callable[..., Program], iterations: int) -> Any:
    """What a measuring program found in some iterations."""
    env = spec.env
    factory = ProfilingFactory(
        spec, make_env_factory(env.id, engine=env.engine, kwargs=dict(env.kwargs)), program
    )
    with Session(spec, factory=factory) as session:
        session.train(iterations)
        return session.state_dict()["shared"]["measured"]
