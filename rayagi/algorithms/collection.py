"""Rollout collection inside a GMI: the one place that chooses how.

| implementation | where | needs |
|---|---|---|
| ``DeviceRollouts`` | one CUDA graph per rollout | simulator and policy on the same GPU, an MLP |
| ``WholeRollouts`` | one compiled call per rollout | an environment that evaluates the policy itself (RolloutEnv), an MLP |
| ``Stepwise`` | step by step: the agent, then the simulator, here or in other GMIs | nothing |
"""

from __future__ import annotations

import time

import torch

from actors.protocols import RolloutEnv, VecEnv
from actors.roles import Agent, CollectTimes, LocalSimulator, collect
from actors.rollout import Rollout
from actors.stepping import RemoteSimulators
from rayagi.algorithms.device_rollouts import DeviceRollouts, on_one_device
from rayagi.config.spec import RunSpec
from rayagi.models.policy import NetworkPolicy
from rayagi.profiler import operation


class Stepwise:
    """Steps the agent and the simulator by turns. ``rollout`` may be replaced between rollouts."""

    def __init__(
        self,
        simulator: LocalSimulator | RemoteSimulators,
        agent: Agent,
        rollout: Rollout,
        *,
        seed: int,
        first_env_index: int,
    ) -> None:
        self.simulator, self.agent, self.rollout = simulator, agent, rollout
        self._seed, self._first_env_index = seed, first_env_index

    def collect(self, number: int) -> CollectTimes:
        """Collect rollout ``number``."""
        self.simulator.begin(number)
        noise = self.agent.policy.noise(
            self.rollout.num_steps,
            self.rollout.num_envs,
            seed=self._seed,
            first_env_index=self._first_env_index,
            number=number,
        )
        return collect(
            self.simulator, self.agent, self.rollout, noise, lambda name, function: operation(name)(function)
        )


class WholeRollouts:
    """One call of the environments' own compiled program, which also acts. All of its time counts as ``simulate_s``."""

    def __init__(self, simulator: LocalSimulator, policy: NetworkPolicy, rollout: Rollout) -> None:
        self.simulator, self.rollout, self._policy = simulator, rollout, policy

    def collect(self, number: int) -> CollectTimes:
        """Collect rollout ``number``."""
        started = time.perf_counter()
        self.simulator.collect_rollout(self.rollout, self._policy.tensors(), number)
        return CollectTimes(simulate_s=time.perf_counter() - started)


Collection = DeviceRollouts | WholeRollouts | Stepwise
"""Fills a rollout with T steps of every environment; the number of ``collect`` is the position in the noise streams."""


def choose_collection(
    spec: RunSpec,
    env: VecEnv,
    policy: NetworkPolicy,
    agent: Agent,
    *,
    first_env_index: int,
    device: torch.device,
) -> Collection:
    """How to collect with an environment and a policy in one GMI: the fastest way that fits both."""
    if on_one_device(env, device) and policy.model.fits_kernels:
        return DeviceRollouts(env, policy, num_steps=spec.learning.rollout_length, seed=spec.seed)
    simulator, rollout = LocalSimulator(env), new_rollout(spec, policy, env.num_envs, device)
    if isinstance(env, RolloutEnv) and device.type == "cpu" and policy.model.fits_kernels:
        return WholeRollouts(simulator, policy, rollout)
    return Stepwise(simulator, agent, rollout, seed=spec.seed, first_env_index=first_env_index)


def new_rollout(spec: RunSpec, policy: NetworkPolicy, num_envs: int, device: torch.device) -> Rollout:
    """The buffer for a run's rollouts, with room for the states of a recurrent policy."""
    return Rollout.allocate(
        spec.learning.rollout_length,
        num_envs,
        policy.info,
        device,
        state_shape=(spec.learning.sequences, policy.state_dim) if policy.state_dim else None,
    )
