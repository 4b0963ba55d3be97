"""Rollout collection and evaluation: the loop of simulator and agent, local or remote (GMI-DRL §3.1.1)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from actors.agent import Agent
from actors.errors import NonFiniteError
from actors.protocols import EnvFactory, EvaluationResult, Policy, StepResult, VecEnv
from actors.rollout import Rollout

_MOST_ENVS = 64
"""Most environments that an evaluation steps in parallel."""
LONGEST_EPISODE_STEPS = 10_000
"""Time limit of an evaluation episode on a task without one: ten times the usual 1000."""


class StepSource(Protocol):
    """A local simulator, or the simulators of other GMIs (actors.stepping)."""

    @property
    def obs(self) -> Tensor:
        """Observations to act on next, (N, obs_dim)."""
        ...

    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment; ``actions`` on the host. The result is valid until the next step."""
        ...


@dataclass(slots=True)
class CollectTimes:
    """Wall seconds of one rollout by phase."""

    simulate_s: float = 0.0
    act_s: float = 0.0


def collect(simulator: StepSource, agent: Agent, rollout: Rollout, noise: Tensor) -> CollectTimes:
    """Fill ``rollout`` with T steps of every environment; ``noise`` (T, N, output_dim) is on the policy's device."""
    times = CollectTimes()
    rollout.finals.clear()
    clock = time.perf_counter
    act = agent.through(rollout, noise)
    for t, row in enumerate(rollout.steps()):
        started = clock()
        actions = act(t, simulator.obs)  # fills the agent's part of the row: obs, outputs, actions
        acted = clock()
        step = simulator.step(actions)
        times.simulate_s += clock() - acted
        row.rewards.copy_(step.rewards)
        row.terminated.copy_(step.terminated)
        row.truncated.copy_(step.truncated)
        if len(step.final_ids):
            agent.reset(step.final_ids)
            rollout.finals.append((t, step.final_ids.clone(), step.final_obs.clone()))
        times.act_s += acted - started
    rollout.last_obs.copy_(simulator.obs)
    return times


def check_finite(rollout: Rollout, iteration: int) -> None:
    """Raise on the first NaN or infinity that the simulator returned.

    Raises:
        NonFiniteError: with the quantity, the step within the rollout and the environment's number in this GMI.
    """
    for quantity, values in (("an observation", rollout.raw_obs), ("a reward", rollout.rewards)):
        # One cheap sum detects any; if finite values overflow it, the exact check below finds none.
        if not torch.isfinite(values.sum()):
            bad = (~torch.isfinite(values)).nonzero()
            if len(bad):
                step, env = int(bad[0, 0]), int(bad[0, 1])
                raise NonFiniteError(quantity, iteration, f"rollout step {step}, environment {env}")


def evaluate_in_new_envs(
    make_env: EnvFactory, policy: Policy, num_episodes: int, *, seed: int, num_threads: int
) -> EvaluationResult:
    """``evaluate`` with an agent of its own in new environments, separate from those of training."""
    env = make_env(
        num_envs=min(num_episodes, _MOST_ENVS), first_env_index=0, seed=seed, num_threads=num_threads
    )
    try:
        return evaluate(env, Agent(policy), num_episodes)
    finally:
        env.close()


def evaluate(env: VecEnv, agent: Agent, num_episodes: int) -> EvaluationResult:
    """Whole episodes with the policy's mode.

    Each environment contributes a fixed number of its first episodes, so that short episodes are not over-represented.
    Without a time limit, an episode is truncated after LONGEST_EPISODE_STEPS.
    """
    limit = env.info.max_episode_steps
    longest = LONGEST_EPISODE_STEPS if limit is None else limit
    quota = [num_episodes // env.num_envs + (i < num_episodes % env.num_envs) for i in range(env.num_envs)]
    simulator_obs = env.reset()
    running = torch.zeros(env.num_envs, dtype=torch.float64)
    lengths = torch.zeros(env.num_envs, dtype=torch.int64)
    found: list[list[tuple[float, int]]] = [[] for _ in range(env.num_envs)]
    while any(len(done) < wanted for done, wanted in zip(found, quota, strict=True)):
        step = env.step(agent.act_greedily(simulator_obs))
        simulator_obs = step.obs
        agent.reset(step.final_ids)
        running += step.rewards
        lengths += 1
        # On a task without a time limit, an endless episode counts with its return so far.
        ended = set(step.final_ids.tolist()) | set((lengths >= longest).nonzero().flatten().tolist())
        for i in sorted(ended):
            found[i].append((float(running[i]), int(lengths[i])))
            running[i], lengths[i] = 0.0, 0
    kept = [episode for done, wanted in zip(found, quota, strict=True) for episode in done[:wanted]]
    return EvaluationResult([value for value, _ in kept], [length for _, length in kept])
