"""Short profiling runs: a Session with one GMI whose program measures unit costs or the gradient noise scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from actors.gmi import GmiContext
from actors.protocols import EnvFactory, Program, StateDict
from placement.errors import PlanError
from placement.types import Machine
from rayagi.algorithms.gradient_noise import GROUPS, GradientNoiseUpdater, NoiseScale, noise_scale
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.program import DpOnlyProgram
from rayagi.algorithms.rollout_learner import RolloutLearner
from rayagi.config.off_policy import OffPolicySpec
from rayagi.config.spec import RunSpec
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.search_store import SearchStore
from rayagi.coordinator.session import Session
from rayagi.coordinator.throughput_model import UnitCosts, unit_costs_from_dict
from rayagi.coordinator.unit_costs import CostProgram, unit_costs
from rayagi.planning import uses_gpus

NOISE_ENVS = 64
"""Environments of the noise profile: eight groups of eight."""
NOISE_WARM_UP, NOISE_ITERATIONS = 5, 15
"""Learning iterations before the noise measurement, until normalisers are stable; and during it."""
COST_ROUNDS = 5
"""Rounds of measurements of the unit costs; the first warms up, and the median of the others counts."""
COST_GMIS = 8
"""Most GMIs that are measured at the same time."""
COST_ENVS = 64
"""Environments for unit costs if the run's number is "auto"."""


class NoiseProgram(DpOnlyProgram):
    """Learns as usual, and records the gradient norms from which the noise scale is computed."""

    def __init__(self, spec: RunSpec, make_env: EnvFactory, context: GmiContext) -> None:
        super().__init__(spec, make_env, context)
        assert isinstance(self.learner, RolloutLearner)
        policy = self.learner.policy
        assert isinstance(spec.learning, PPOSpec)  # only PPO is searched
        self.metered = GradientNoiseUpdater(policy.model, spec.learning, context.communicator, spec.gmi.envs)
        self.learner.updater = self.metered

    def state_dict(self) -> StateDict:
        """The measurements, in place of a state."""
        return {"shared": {"measured": self.metered.pairs}, "local": {}}


def noise_scale_of(spec: RunSpec) -> NoiseScale:
    """Noise scale of a task's policy gradient, from a short training run.

    Raises:
        GmiLostError, GmiSilentError, ClusterUnreachableError, ReservationError: the run failed.
    """
    run = spec.with_gmi(num_gmis=1, gmis_per_gpu=None, num_envs=NOISE_ENVS, threads_per_gmi=None)
    pairs = _run_profile(run, NoiseProgram, NOISE_WARM_UP + NOISE_ITERATIONS)
    return noise_scale(pairs[NOISE_WARM_UP:], small_envs=NOISE_ENVS // GROUPS, big_envs=NOISE_ENVS)


def unit_costs_of(spec: RunSpec, machine: Machine) -> UnitCosts:
    """Unit costs of a task on this machine, from several GMIs that share a device, and from one that has it.

    Raises:
        PlanError: the machine has a single core, so that no messages can be measured.
        GmiLostError, GmiSilentError, ClusterUnreachableError, ReservationError: the run failed.
    """
    on_gpu = uses_gpus(spec, machine)
    cores = len(machine.nodes[0].usable_cores)
    if cores < 2:
        raise PlanError(
            "a profile of unit costs",
            f"messages are measured between two GMIs, and node {machine.nodes[0].name} has one core",
            "Give --template dp_only",
        )
    common = _profiled_spec(spec)
    if on_gpu:
        # Each with a core: its threads launch kernels.
        several = common.with_gmi(num_gmis=2, gmis_per_gpu=2, threads_per_gmi=1)
        single = common.with_gmi(num_gmis=1, threads_per_gmi=None)
    else:
        several = common.with_gmi(num_gmis=min(cores, COST_GMIS), threads_per_gmi=1)
        single = common.with_gmi(num_gmis=1, threads_per_gmi=cores)
    with connected():
        shared, alone = (_run_profile(run, CostProgram, COST_ROUNDS) for run in (several, single))
    return unit_costs(
        shared,
        alone,
        num_steps=spec.learning.rollout_length,
        num_updates=spec.learning.num_epochs * spec.learning.num_minibatches,
        on_gpu=on_gpu,
    )


def _profiled_spec(spec: RunSpec) -> RunSpec:
    """The run whose unit costs a spec needs: dp_only with equal GMIs, whatever template and sizes it asks for."""
    profiled = spec.with_gmi(
        template="dp_only",
        num_learners=None,
        num_envs=COST_ENVS if spec.gmi.num_envs == "auto" else spec.gmi.envs,
        slices=None,
        left_out=(),
        gmis_per_gpu=None,
        replan=False,
    )
    return without_filling(profiled)


def without_filling(spec: RunSpec) -> RunSpec:
    """The run with learning from the first rows of a replay on: while it is filled, updates cost nothing."""
    if not isinstance(spec.learning, OffPolicySpec):
        return spec
    return replace(spec, learning=replace(spec.learning, learning_starts=0))


def cached_unit_costs(
    spec: RunSpec,
    machine: Machine,
    *,
    log: Callable[[str], None],
    may_measure: bool = True,
) -> UnitCosts:
    """Unit costs from the cache; measures and caches them if they are missing.

    Raises:
        PlanError: they are missing, and ``may_measure`` is False; or the machine has a single core.
        GmiLostError, GmiSilentError, ClusterUnreachableError, ReservationError: the measurement failed.
    """
    profiled = _profiled_spec(spec)
    store, note = SearchStore(profiled, machine), f"unit costs, {profiled.gmi.num_envs} environments"
    stored = store.load_note(note)
    if stored is not None:
        return unit_costs_from_dict(stored)
    if not may_measure:
        raise PlanError(
            "a choice left to the throughput model",
            f"the unit costs of {spec.env.id} were not measured on this machine with this version",
            f"Run `rayagi plan {spec.env.id} --explain` first, or give values",
        )
    log(f"Measuring the unit costs of {spec.env.id} on this machine: about a minute.")
    costs = unit_costs_of(spec, machine)
    store.try_save_note(note, asdict(costs), log)
    return costs


def _run_profile(spec: RunSpec, program: Callable[..., Program], iterations: int) -> Any:
    """Run a measuring program for some iterations and return its measurements."""
    with Session(spec, factory=partial(program, spec, spec.env.factory())) as session:
        session.train(iterations)
        return session.state_dict()["shared"]["measured"]
