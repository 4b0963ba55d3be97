"""Unit costs: measures what the throughput model needs (the parameters of GMI-DRL's Table 1), with the run's own programs.

A profile runs in as many GMIs as there are devices to share, and again in one GMI that has them all. Each measures, at N and
at ``SCALE`` N environments: a rollout and an update of ``dp_only``, and a rollout step by step, with its simulation and
inference. The GMIs also exchange steps without physics, and reduce gradients, which gives the costs of messages.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from actors.gmi import GmiContext
from actors.host_memory import device_bytes, resident_bytes
from actors.protocols import EnvFactory, EnvInfo, EvaluationResult, IterationResult, StateDict, StepResult
from actors.roles import collect
from actors.rollout import obs_type
from actors.stepping import RemoteSimulators, StepServer
from collectives.experience.directory import ScopedDirectory
from rayagi import profiler
from rayagi.algorithms.program import DpOnlyProgram
from rayagi.algorithms.returns import discounted_returns
from rayagi.algorithms.role_assignment import RoleAssignment, connect_simulators, connect_step_server
from rayagi.config.spec import RunSpec
from rayagi.coordinator.throughput_model import DeviceKind, RoleCost, UnitCosts

SCALE = 4
"""The second size, relative to the first."""
EXCHANGES, REDUCTIONS = 100, 50
"""Steps and reductions that are timed together."""
_SMALLEST_S = 1e-9
_QUARTILES = 1.349
"""Distance of a normal distribution's quartiles, in standard deviations: some steps are disturbed by other processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeReading:
    """Seconds of one iteration with one number of environments."""

    rollout_s: float
    simulate_s: float
    act_s: float
    update_s: float
    step_spread: float
    """Standard deviation of a simulation step, relative to the mean."""
    rollout_spread: float = 0.0
    """Standard deviation of the rollouts of all GMIs at the same time, relative to their mean; 0 with one GMI."""
    complete_s: float = 0.0
    """What a collector adds to a rollout before it sends it."""
    exchange_s: float = 0.0
    """One exchange of a step with all other GMIs, without physics; 0 with one GMI."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostReadings:
    """Measurements of one round."""

    small: SizeReading
    large: SizeReading
    reduce_s: float
    """One reduction of the gradients; 0 with one GMI."""
    num_gmis: int
    cores: int
    """Cores of this GMI."""
    num_envs: tuple[int, int]
    simulates_on_gpu: bool
    memory_bytes: tuple[int, int]
    """Memory of the GMI with the small size, and of both sizes together."""
    sizes: Mapping[str, float]
    """state_bytes, action_bytes, reward_bytes of one environment, and model_bytes."""


def unit_costs(
    shared: Sequence[CostReadings],
    alone: Sequence[CostReadings],
    *,
    num_steps: int,
    num_updates: int,
    on_gpu: bool,
) -> UnitCosts:
    """Compute the model's parameters from the medians over the rounds.

    Args:
        shared: rounds of one of two or more GMIs that divide the device; the first is a warm-up, ignored if there are more
        alone: the same of one GMI with the whole device
        num_steps: of a rollout
        num_updates: gradient reductions per iteration
        on_gpu: whether the device is a GPU
    """
    last, single = shared[-1], alone[-1]

    def role(name: str, divisor: int, device: DeviceKind) -> RoleCost:
        narrow, wide = (
            tuple(_median(of, f"{size}.{name}") / divisor for size in ("small", "large"))
            for of in (shared, alone)
        )
        if device == "gpu":
            # Occupancy: the whole device takes the small batch as fast as it can, and the large one as it is filled.
            return RoleCost(device="gpu", fixed_s=wide[0], per_env_s=wide[1] / single.num_envs[1])
        return _on_cores(narrow, wide, last.num_envs, single.cores / last.cores)

    networks: DeviceKind = "gpu" if on_gpu else "cores"
    physics: DeviceKind = "gpu" if single.simulates_on_gpu else "cores"
    message_s, bandwidth = _messages(shared)
    others, (small_envs, large_envs) = last.num_gmis - 1, last.num_envs
    env_bytes = max(0, single.memory_bytes[1] - single.memory_bytes[0]) / large_envs
    return UnitCosts(
        rollout=role("rollout_s", num_steps, physics),
        simulate=role("simulate_s", num_steps, physics),
        act=role("act_s", num_steps, networks),
        update=role("update_s", 1, networks),
        complete=role("complete_s", 1, networks),
        message_s=message_s,
        bandwidth=bandwidth,
        # Scaled from n GMIs to two: 2 (n - 1) / n.
        reduce_s=_median(shared, "reduce_s") * last.num_gmis / (2 * others),
        step_spread=_median(shared, "small.step_spread"),
        rollout_spread=_root_mean_square(shared, "small.rollout_spread", "large.rollout_spread"),
        gmi_bytes=max(0.0, single.memory_bytes[0] - small_envs * env_bytes),
        env_bytes=env_bytes,
        num_steps=num_steps,
        num_updates=num_updates,
        num_envs=last.num_envs,
        **last.sizes,
    )


def _messages(shared: Sequence[CostReadings]) -> tuple[float, float]:
    """Seconds of a message, and bytes per second: an exchange with k GMIs is k + 1 messages, and their bytes."""
    few, many = _median(shared, "small.exchange_s"), _median(shared, "large.exchange_s")
    sizes, others, (small_envs, large_envs) = shared[-1].sizes, shared[-1].num_gmis - 1, shared[-1].num_envs
    row = 2 * sizes["state_bytes"] + sizes["action_bytes"] + sizes["reward_bytes"]
    per_row = max(_SMALLEST_S, (many - few) / (others * (large_envs - small_envs)))
    message_s = max(_SMALLEST_S, (few - others * small_envs * per_row) / (others + 1))
    return message_s, row / per_row


def _on_cores(
    narrow: tuple[float, ...], wide: tuple[float, ...], num_envs: tuple[int, int], cores: float
) -> RoleCost:
    """Fit fixed_s + n per_env_s to the seconds of two sizes, on one core and on all."""
    (fixed_s, per_env_s), (wide_fixed_s, wide_per_env_s) = (_line(num_envs, each) for each in (narrow, wide))
    return RoleCost(
        device="cores",
        fixed_s=fixed_s,
        per_env_s=per_env_s,
        # Never more than W times as fast on W cores: beyond them the time would become negative.
        wide_fixed_s=max(wide_fixed_s, fixed_s / cores),
        wide_per_env_s=max(wide_per_env_s, per_env_s / cores),
        wide_cores=cores,
    )


def _line(num_envs: tuple[int, int], seconds: tuple[float, ...]) -> tuple[float, float]:
    """Intercept and slope through two sizes; neither is negative."""
    (few, many), (small, large) = num_envs, seconds
    slope = min(max(0.0, (large - small) / (many - few)), small / few)
    return small - few * slope, slope


def _median(readings: Sequence[CostReadings], name: str) -> float:
    """Median of an attribute, as ``small.update_s``, over the rounds without the first."""
    return statistics.median(map(attrgetter(name), readings[1:] or readings))


def _root_mean_square(readings: Sequence[CostReadings], *names: str) -> float:
    """Of some attributes, over the rounds without the first: the mean of variances."""
    squares = [attrgetter(name)(reading) ** 2 for reading in readings[1:] or readings for name in names]
    return math.sqrt(statistics.fmean(squares))


class CostProgram:
    """Program that runs dp_only at two sizes, the steps of its rollouts one by one, and messages to the other GMIs."""

    def __init__(self, spec: RunSpec, make_env: EnvFactory, context: GmiContext) -> None:
        self._context = context
        self._readings: list[CostReadings] = []
        few = spec.gmi.envs
        self._num_envs = (few, SCALE * few)
        self._programs: list[DpOnlyProgram] = []
        memory = []
        for count in self._num_envs:
            gmi = replace(spec.gmi, num_envs=count)
            program = DpOnlyProgram(replace(spec, gmi=gmi), make_env, context)
            program.iterate()
            self._programs.append(program)
            memory.append(self._memory_in_use())
        self._memory = (memory[0], memory[1])
        self._exchanges = [_StepExchange(make_env, context, count, spec) for count in self._num_envs]

    def iterate(self) -> IterationResult:
        """Run one round of measurements."""
        with profiler.timed_operation("measure unit costs") as measuring:
            self._readings.append(self._measure())
        steps = float(sum(each.rollout.num_steps * each.rollout.num_envs for each in self._programs))
        metrics = {"env_steps": steps, "iteration_s": measuring.seconds}
        return IterationResult(iteration=len(self._readings), metrics=metrics)

    def _measure(self) -> CostReadings:
        small, large = map(self._measure_size, self._programs, self._exchanges)
        program, group = self._programs[0], self._context.communicator
        rollout = program.rollout
        parameters = parameters_to_vector(program.learner.policy.model.parameters()).detach()
        reward_and_flags = (rollout.rewards[0], rollout.terminated[0], rollout.truncated[0])  # W
        return CostReadings(
            small=small,
            large=large,
            reduce_s=self._reduce_s(parameters) if group.world_size > 1 else 0.0,
            num_gmis=group.world_size,
            cores=self._context.identity.slice.num_threads,
            num_envs=self._num_envs,
            simulates_on_gpu=_on_device(program),
            memory_bytes=self._memory,
            sizes={
                "state_bytes": rollout.last_obs.nbytes / rollout.num_envs,
                "action_bytes": rollout.actions[0].nbytes / rollout.num_envs,
                "reward_bytes": sum(each.nbytes for each in reward_and_flags) / rollout.num_envs,
                "model_bytes": float(parameters.nbytes),
            },
        )

    def _measure_size(self, program: DpOnlyProgram, exchange: _StepExchange) -> SizeReading:
        self._context.communicator.barrier()
        metrics = program.iterate().metrics
        rollout_s = metrics["simulate_s"] + metrics["act_s"]
        simulate_s, act_s, spread = metrics["simulate_s"], 0.0, 0.0
        if not _on_device(program):  # else a rollout is one graph, which is not timed by phase
            acting, stepping = profiler.timed_operation("act"), profiler.timed_operation("simulate")
            noise = torch.randn_like(program.rollout.outputs)
            collect(
                program.simulator, program.agent, program.rollout, noise, acting=acting, stepping=stepping
            )
            simulate_s, act_s = stepping.seconds, acting.seconds
            first, median, third = statistics.quantiles(stepping.durations_s)
            spread = (third - first) / (_QUARTILES * median)
        self._context.communicator.barrier()
        return SizeReading(
            rollout_s=rollout_s,
            simulate_s=simulate_s,
            act_s=act_s,
            update_s=metrics["update_s"],
            step_spread=spread,
            rollout_spread=self._rollout_spread(rollout_s),
            complete_s=_complete_s(program),
            exchange_s=exchange.seconds(),
        )

    def _rollout_spread(self, rollout_s: float) -> float:
        """Of rollouts that all GMIs have just made. Cores may differ, and change their speed for seconds."""
        group = self._context.communicator
        if group.world_size == 1:
            return 0.0
        seconds = group.all_gather(torch.tensor(rollout_s, dtype=torch.float64))
        return float(seconds.std() / seconds.mean())

    def _reduce_s(self, parameters: Tensor) -> float:
        """Seconds of one reduction of a tensor like the gradients, between all GMIs."""
        group = self._context.communicator
        gradients = group.buffer(parameters.numel(), parameters.dtype)
        group.all_reduce(gradients)
        group.barrier()
        with profiler.timed_operation("reduce") as reducing:
            for _ in range(REDUCTIONS):
                group.all_reduce(gradients.zero_())
        return reducing.seconds / REDUCTIONS

    def _memory_in_use(self) -> int:
        if self._context.device.type == "cuda":
            return device_bytes(self._context.device)
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
        """Release the simulators, and disconnect."""
        for exchange in self._exchanges:
            exchange.close()
        for program in self._programs:
            program.close()


@torch.inference_mode()
def _complete_s(program: DpOnlyProgram) -> float:
    """Seconds of what a collector adds to its rollout (rayagi.algorithms.collector)."""
    rollout, policy = program.rollout, program.learner.policy
    done = (rollout.terminated | rollout.truncated).cpu()
    with profiler.timed_operation("complete") as completing:
        policy.model.head.log_prob(rollout.outputs, rollout.actions.to(policy.device)).cpu()
        discounted_returns(
            rollout.rewards.cpu(), done, torch.zeros(rollout.num_envs), program.spec.learning.gamma
        )
    return completing.seconds


def _on_device(program: DpOnlyProgram) -> bool:
    """Whether simulations and policy are on one GPU (rayagi.algorithms.device_rollouts)."""
    return program.rollout.final_obs is not None


class _StillSimulator:
    """A simulator without physics: every step returns the same result at once."""

    def __init__(self, num_envs: int, info: EnvInfo) -> None:
        self.obs = torch.zeros(num_envs, info.obs_dim, dtype=obs_type(info))
        none = torch.zeros(num_envs, dtype=torch.bool)
        self._result = StepResult(
            obs=self.obs,
            rewards=torch.zeros(num_envs),
            terminated=none,
            truncated=none,
            final_ids=torch.empty(0, dtype=torch.int64),
            final_obs=self.obs[:0],
        )

    def step(self, actions: Tensor) -> StepResult:
        return self._result


class _StepExchange:
    """Step exchange of e_at and dp_mp between GMI 0, as the agent, and all others, as simulators without physics."""

    def __init__(self, make_env: EnvFactory, context: GmiContext, num_envs: int, spec: RunSpec) -> None:
        self._index, self._iteration = context.identity.index, 0
        self._agent: RemoteSimulators | None = None
        self._server: StepServer | None = None
        others = context.communicator.world_size - 1
        if not others:
            return
        worker_types = (("agent",), *[("simulator",)] * others)
        assignment = RoleAssignment(worker_types, (0, *[num_envs] * others))
        limit_s = spec.gmi.collective_timeout_s
        context = replace(context, directory=ScopedDirectory(context.directory, f"{num_envs}/"))
        if self._index == 0:
            self._agent = connect_simulators(make_env, context, assignment, limit_s)
            info = self._agent.info
            self._actions = torch.zeros(num_envs * others, *info.action.shape)
            if info.action.is_discrete:
                self._actions = self._actions.long()
            return
        sample = make_env(num_envs=1, first_env_index=0, seed=0, num_threads=1)
        sample.close()
        still = _StillSimulator(num_envs, sample.info)
        self._server = connect_step_server(still, sample.info, context, assignment, limit_s)

    def seconds(self) -> float:
        """Seconds of one exchange; 0 with a single GMI."""
        self._iteration += 1
        exchanging = profiler.timed_operation("exchange")
        if self._agent is not None:
            self._agent.begin(self._iteration)
            with exchanging:
                for _ in range(EXCHANGES):
                    self._agent.step(self._actions)
        if self._server is not None:
            self._server.begin(self._iteration)
            for _ in range(EXCHANGES):
                self._server.step()
        return exchanging.seconds / EXCHANGES

    def close(self) -> None:
        """Disconnect."""
        for end in (self._agent, self._server):
            if end is not None:
                end.close()
