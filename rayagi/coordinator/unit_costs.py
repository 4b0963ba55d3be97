"""Unit costs: measures the parameters of GMI-DRL's Table 1, with each of the three roles run alone in one GMI.

Every parameter is timed or counted on this machine, for this task.

- T_s, T_a, T_t: wall time of m simulator steps, m inferences, and one update, at N environments.
- R_s, R_a, R_t: share of the dominant resource (eq. 1). Compute on cores: busy cores (CPU time / wall time, rounded up to
  whole cores) over all cores. Compute on a GPU: its utilisation. Memory: what the process holds after the role has
  been built and run, including what every process holds.
- alpha, beta: t(K N) / (K t(N)) with K = ``SHARED``: cost per simulator of a shared agent (trainer), which works on a K-fold
  batch, relative to one of its own.
- BW: a copy from one GMI's memory to the host and from there to another GMI's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Any

import torch

from actors.gmi import GmiContext
from actors.host_memory import resident_bytes
from actors.noise import minibatch_orders
from actors.protocols import EnvFactory, EvaluationResult, IterationResult, StateDict, VecEnv
from actors.roles import Agent, LocalSimulator, collect
from placement.templates import UnitCosts, dominant_resource
from rayagi.algorithms.ppo.learner import PPOLearner
from rayagi.algorithms.program import DpOnlyProgram
from rayagi.algorithms.rollout_learner import OnPolicyBatch
from rayagi.config.spec import RunSpec
from rayagi.models.networks import make_model
from rayagi.models.policy import NetworkPolicy
from rayagi.models.recurrent import RolloutMemory

SHARED = 4
"""Simulators that share an agent or a trainer in the measurement of alpha and beta."""
COPIED_BYTES = 32 * 2**20
"""Larger than a core's caches, so that the copy is timed in memory."""
_SMALLEST = 1e-6
"""Lower bound of shares and times, since a coarse clock may measure zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Wall time of an operation, and its busy cores (on a GPU: its utilisation)."""

    wall_s: float
    busy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CostReadings:
    """Measurements of one round."""

    simulate: Timing
    act: Timing
    train: Timing
    act_shared_s: float
    train_own_s: float
    train_shared_s: float
    copy_bytes_per_s: float
    memory_bytes: dict[str, int]
    """Resident memory by role (on a GPU: device memory), including what every process holds."""
    sizes: dict[str, float]
    """state_bytes, action_bytes, reward_bytes of one environment, and model_bytes."""
    num_steps: int
    num_envs: int


def unit_costs(readings: Sequence[CostReadings], *, cores: int, memory_bytes: int, on_gpu: bool) -> UnitCosts:
    """Compute the model's parameters from the medians over the rounds.

    Args:
        readings: rounds; the first is a warm-up and is ignored if there are more
        cores: cores of the machine, which is the device without a GPU
        memory_bytes: memory of the device
        on_gpu: whether ``busy`` is a share of the GPU

    Raises:
        ValueError: ``readings`` is empty.
    """
    if not readings:
        raise ValueError("no readings")
    used = readings[1:] or readings

    def median(value: Callable[[CostReadings], float]) -> float:
        return max(_SMALLEST, statistics.median(value(each) for each in used))

    busy = {
        "simulator": median(lambda each: each.simulate.busy),
        "agent": median(lambda each: each.act.busy),
        "trainer": median(lambda each: each.train.busy),
    }
    # R as a share of all cores: ceil(CPU time / wall time) / cores. Minus 0.1, since the two clocks differ slightly.
    compute = (
        busy
        if on_gpu
        else {role: max(1, ceil(cores_used - 0.1)) / cores for role, cores_used in busy.items()}
    )
    memory = {role: readings[-1].memory_bytes[role] / memory_bytes for role in compute}
    # Eq. 1: the resource of which a role takes the larger share.
    resource = dominant_resource(compute_share=max(compute.values()), memory_share=max(memory.values()))
    shares: Mapping[str, float] = compute if resource == "compute" else memory
    act_s, last = median(lambda each: each.act.wall_s), readings[-1]
    return UnitCosts(
        simulate_s=median(lambda each: each.simulate.wall_s),
        act_s=act_s,
        train_s=median(lambda each: each.train.wall_s),
        simulator_share=min(1.0, max(_SMALLEST, shares["simulator"])),
        agent_share=min(1.0, max(_SMALLEST, shares["agent"])),
        trainer_share=min(1.0, max(_SMALLEST, shares["trainer"])),
        resource=resource,
        **last.sizes,
        bandwidth=median(lambda each: each.copy_bytes_per_s),
        # alpha = t_act(K N) / (K t_act(N)); beta alike with the update.
        alpha=median(lambda each: each.act_shared_s / (SHARED * each.act.wall_s)),
        beta=median(lambda each: each.train_shared_s / (SHARED * each.train_own_s)),
        num_steps=last.num_steps,
        num_envs=last.num_envs,
    )


class CostProgram:
    """Program that builds the roles one after another and times each of them in every iteration."""

    def __init__(self, spec: RunSpec, make_env: EnvFactory, context: GmiContext) -> None:
        self._spec, self._device = spec, context.device
        self._readings: list[CostReadings] = []
        num_envs, threads = spec.gmi.envs, context.identity.slice.num_threads
        base = self._memory_in_use()
        env = make_env(num_envs=num_envs, first_env_index=0, seed=spec.seed, num_threads=threads)
        simulator = LocalSimulator(env)
        with_simulator = self._memory_in_use()
        model = make_model(env.info, spec.network, spec.seed).to(context.device)
        self._agent = Agent(NetworkPolicy(model, env.info, None, context.device))
        self._outputs = model.head.num_outputs
        self._act(simulator.obs, 1)
        with_agent = self._memory_in_use()
        self._program = DpOnlyProgram(spec, _existing_env_factory(env), context)
        self._program.iterate()
        with_trainer = self._memory_in_use()
        self._memory = {
            "simulator": with_simulator,
            "agent": base + with_agent - with_simulator,
            "trainer": base + with_trainer - with_agent,
        }

    def iterate(self) -> IterationResult:
        """Run one round of measurements."""
        started = time.perf_counter()
        self._readings.append(self._measure())
        steps = float(self._program.rollout.num_steps * self._program.rollout.num_envs)
        metrics = {"env_steps": steps, "iteration_s": time.perf_counter() - started}
        return IterationResult(iteration=len(self._readings), metrics=metrics)

    def _measure(self) -> CostReadings:
        program, spec = self._program, self._spec.learning
        steps, num_envs = program.rollout.num_steps, program.rollout.num_envs
        simulator, training = program.simulator, program.learner
        assert isinstance(training, PPOLearner), "unit costs are measured with PPO"
        collect(simulator, program.agent, program.rollout, torch.randn_like(program.rollout.outputs))
        obs, actions = simulator.obs, program.agent.policy.environment_actions(program.rollout.actions).cpu()
        simulate = self._timed(lambda: [simulator.step(each) for each in actions])
        act = self._timed(lambda: self._act(obs, steps))
        many = obs.repeat(SHARED, 1)
        act_shared = self._timed(lambda: self._act(many, steps))
        batch, _ = training.prepare(program.rollout)
        own, shared = self._orders(num_envs), self._orders(SHARED * num_envs)
        larger = _repeated(batch, steps)
        train_own = self._timed(lambda: training.updater.update(batch, own, 1, 0))
        train_shared = self._timed(lambda: training.updater.update(larger, shared, 1, 0))
        train = self._timed(lambda: program.trainer.update(program.rollout))
        step = simulator.step(actions[0])
        reward_and_flags = (step.rewards, step.terminated, step.truncated)  # W
        return CostReadings(
            simulate=simulate,
            act=act,
            train=train,
            act_shared_s=act_shared.wall_s,
            train_own_s=train_own.wall_s,
            train_shared_s=train_shared.wall_s,
            copy_bytes_per_s=self._copy_bytes_per_s(),
            memory_bytes=self._memory,
            sizes={
                "state_bytes": step.obs.nbytes / num_envs,
                "action_bytes": actions[0].nbytes / num_envs,
                "reward_bytes": sum(each.nbytes for each in reward_and_flags) / num_envs,
                "model_bytes": float(training.updater.flat.parameters.nbytes),
            },
            num_steps=spec.rollout_length,
            num_envs=num_envs,
        )

    def _act(self, obs: torch.Tensor, steps: int) -> None:
        noise = torch.randn(len(obs), self._outputs, device=self._device)
        agent = Agent(self._agent.policy)  # with states for as many environments as these
        for _ in range(steps):
            agent.act(obs, noise)

    def _orders(self, num_envs: int) -> torch.Tensor:
        spec = self._spec.learning
        return minibatch_orders(
            seed=self._spec.seed,
            first_env_index=0,
            num_envs=num_envs,
            iteration=0,
            num_steps=spec.rollout_length,
            num_epochs=spec.num_epochs,
            num_minibatches=spec.num_minibatches,
            sequence_length=self._program.rollout.sequence_length,
        ).to(self._device)

    def _timed(self, work: Callable[[], Any]) -> Timing:
        """Time an operation; on a GPU until the device has finished. [unverified on GPU]"""
        on_gpu = self._device.type == "cuda"
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        if on_gpu:
            torch.cuda.synchronize(self._device)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return Timing(wall_s=wall, busy=torch.cuda.utilization(self._device) / 100 if on_gpu else cpu / wall)

    def _copy_bytes_per_s(self) -> float:
        """BW: bandwidth of a copy from this slice's memory to the host and back to a slice's."""
        here = torch.ones(COPIED_BYTES // 4, device=self._device)
        between, there = torch.empty(COPIED_BYTES // 4), torch.empty_like(here)

        def copy() -> None:
            between.copy_(here)
            there.copy_(between)

        copy()
        return COPIED_BYTES / self._timed(copy).wall_s

    def _memory_in_use(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_reserved(self._device))
        return resident_bytes()

    def evaluate(self, num_episodes: int, seed: int) -> EvaluationResult:
        """Not supported."""
        raise NotImplementedError("a profile does not evaluate")

    def state_dict(self) -> StateDict:
        """The measurements, in place of a state."""
        return {"shared": {"measured": self._readings}, "local": {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Not supported."""
        raise NotImplementedError("a profile has no state")

    def close(self) -> None:
        """Release the simulators."""
        self._program.close()


def _existing_env_factory(env: VecEnv) -> EnvFactory:
    """A factory that returns the existing environments."""

    def make(*, num_envs: int, first_env_index: int, seed: int, num_threads: int) -> VecEnv:
        return env

    return make


def _repeated(batch: OnPolicyBatch, num_steps: int) -> OnPolicyBatch:
    """The batch with every environment repeated ``SHARED`` times."""

    def repeated(value: torch.Tensor) -> torch.Tensor:
        by_step = value.view(num_steps, -1, *value.shape[1:])
        return by_step.repeat(1, SHARED, *[1] * (value.dim() - 1)).flatten(0, 1)

    names = (field.name for field in fields(batch))
    larger: dict[str, Any] = dict(
        zip(names, map(repeated, batch.fields()), strict=False)
    )  # all but the memory
    if batch.memory is not None:
        states, done = batch.memory.states, batch.memory.done
        larger["memory"] = RolloutMemory(states.repeat(1, SHARED, 1), done.repeat(1, SHARED))
    return OnPolicyBatch(**larger)
