"""Variants gymnasium and gymnasium-vector: N environments in a Python loop, or Gymnasium's own vector environment."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor

from experiments.fusion.variants.variant import BenchmarkConfig, BenchmarkState, Counts, knobs_unknown
from rayagi.envs.errors import KernelError
from rayagi.envs.fused.simulator import Discrete

GYMNASIUM_IDS = {"CartPole": "CartPole-v1", "Pendulum": "Pendulum-v1", "Acrobot": "Acrobot-v1"}
"""Gymnasium ids of simulators by name; their states have the same order."""


class LoopStepper:
    """Implements Stepper: steps N environments in turn, in float64, with numpy's random numbers."""

    def __init__(self, work: BenchmarkConfig) -> None:
        self.work = work
        self._envs = [gymnasium.make(GYMNASIUM_IDS[work.simulator.name]) for _ in range(work.num_envs)]
        self._last = BenchmarkState.allocate(work)
        for index, env in enumerate(self._envs):
            env.reset(seed=work.seed + index)
        self._last.env_state.episode.zero_()
        self._rewards, self._ended = [0.0] * work.num_envs, [0] * work.num_envs

    def put(self, bench_state: BenchmarkState) -> None:
        """Set the environments' state. After a reset they differ from other variants, since random numbers differ."""
        env_state = bench_state.env_state
        for index, env in enumerate(self._envs):
            env.unwrapped.state = env_state.state[:, index].double().numpy()
            _time_limit(env)._elapsed_steps = int(env_state.elapsed[index])
        self._last.env_state.copy_(env_state)

    def prepare(self, actions: Tensor) -> list[list[Any]]:
        """Python integers, or arrays of reals."""
        if isinstance(self.work.simulator.actions, Discrete):
            return actions.tolist()
        return [list(one) for one in actions.movedim(1, -1).numpy()]

    def step(self, prepared: list[list[Any]]) -> None:
        """K steps."""
        rewards, ended = [0.0] * self.work.num_envs, [0] * self.work.num_envs
        for actions in prepared:
            for index, (env, action) in enumerate(zip(self._envs, actions, strict=True)):
                _, reward, terminated, truncated, _ = env.step(action)
                rewards[index] += reward
                if terminated or truncated:
                    env.reset()
                    ended[index] += 1
        self._rewards, self._ended = rewards, ended

    def wait(self) -> None:
        """``step`` is synchronous."""

    def get(self) -> BenchmarkState:
        """State of the environments; ended episodes are those of the last call."""
        env_state, totals = self._last.env_state, self._last.totals
        states = np.stack([np.asarray(env.unwrapped.state, np.float32) for env in self._envs], axis=1)
        env_state.state.copy_(torch.from_numpy(states))
        env_state.elapsed.copy_(torch.tensor([_time_limit(env)._elapsed_steps for env in self._envs]))
        totals.rewards.copy_(torch.tensor(self._rewards))
        totals.ended.copy_(torch.tensor(self._ended))
        return self._last.on_host(self.work)

    def counts(self) -> Counts:
        """One call per step of each environment; no kernels."""
        return Counts(self.work.steps_per_call * self.work.num_envs, 0)


class VectorStepper:
    """Implements Stepper with Gymnasium's CartPoleVectorEnv: numpy operations on all environments.

    It resets an ended environment in the next step, which does not advance it; such steps are counted too, as Gymnasium's
    users do.
    """

    def __init__(self, work: BenchmarkConfig) -> None:
        self.work = work
        self._env: Any = gymnasium.make_vec(
            GYMNASIUM_IDS[work.simulator.name], work.num_envs, vectorization_mode="vector_entry_point"
        )
        self._env.reset(seed=work.seed)
        self._last = BenchmarkState.allocate(work)
        self._last.env_state.episode.zero_()

    def put(self, bench_state: BenchmarkState) -> None:
        """Set the environments' state."""
        self._env.unwrapped.state = bench_state.env_state.state.double().numpy()
        self._env.unwrapped.steps = bench_state.env_state.elapsed.numpy().copy()
        self._env.unwrapped.prev_done = np.zeros(self.work.num_envs, bool)
        self._last.env_state.copy_(bench_state.env_state)

    def prepare(self, actions: Tensor) -> list[Any]:
        """One array per step."""
        return list(actions.numpy())

    def step(self, prepared: list[Any]) -> None:
        """K steps."""
        totals = self._last.totals
        rewards, ended = totals.rewards.zero_().numpy(), totals.ended.zero_().numpy()
        for actions in prepared:
            _, reward, terminated, truncated, _ = self._env.step(actions)
            rewards += reward
            ended += terminated | truncated

    def wait(self) -> None:
        """``step`` is synchronous."""

    def get(self) -> BenchmarkState:
        """State of the environments; ended episodes are those of the last call."""
        env_state = self._last.env_state
        env_state.state.copy_(torch.from_numpy(np.asarray(self._env.unwrapped.state, np.float32)))
        env_state.elapsed.copy_(torch.from_numpy(self._env.unwrapped.steps))
        return self._last.on_host(self.work)

    def counts(self) -> Counts:
        """One call per step; numpy operations within it do not count."""
        return Counts(self.work.steps_per_call, 0)


class GymnasiumVariant:
    """Implements Variant."""

    def __init__(self, *, vector: bool) -> None:
        self.vector = vector
        self.name = "gymnasium-vector" if vector else "gymnasium"

    def missing(self, work: BenchmarkConfig) -> str | None:
        """A reason if Gymnasium lacks the simulator or a vector environment of it."""
        known = GYMNASIUM_IDS.get(work.simulator.name)
        if known is None:
            return f"Gymnasium has no {work.simulator.name}"
        if self.vector and gymnasium.spec(known).vector_entry_point is None:
            return f"Gymnasium has no vector environment of {known}"
        return knobs_unknown(work)

    def make(self, work: BenchmarkConfig) -> LoopStepper | VectorStepper:
        """Construct the environments. Raises KernelError."""
        reason = self.missing(work)
        if reason:
            raise KernelError(f"{work.simulator.name} in {self.name}", reason)
        return VectorStepper(work) if self.vector else LoopStepper(work)


def _time_limit(env: Any) -> Any:
    """The wrapper that counts an episode's steps."""
    while not isinstance(env, gymnasium.wrappers.TimeLimit):
        env = env.env
    return env
