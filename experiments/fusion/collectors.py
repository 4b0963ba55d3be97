"""The data collection loop, simulation and inference (the paper's Figure 1b), in every form.

Each collects observations, actions, rewards and ends of N environments of CartPole, with the same policy (4-64-64-2, tanh,
actions sampled), K steps per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import gymnasium
import numpy as np
import torch
from torch import Tensor

from actors.policy_tensors import PolicyTensors
from actors.rollout import Rollout
from experiments.fusion.settings import Settings
from experiments.fusion.variants.catalogue import package_missing
from experiments.fusion.variants.torch_variants import Moved, TorchStepper, count_calls, count_generated
from experiments.fusion.variants.variant import BenchmarkConfig, Counts
from rayagi.envs import make_env_factory
from rayagi.envs.errors import KernelError
from rayagi.envs.fused.backends import EnvConfig, StepBatch
from rayagi.envs.fused.c.backend import CBackend
from rayagi.envs.fused.simulators import CartPole
from rayagi.models.networks import mlp

SIMULATOR = CartPole()
OBS_DIM, CHOICES = 4, 2


class Collector(Protocol):
    """``collect`` takes K steps; ``wait`` returns when they are done."""

    def collect(self) -> object:
        """K steps of every environment. Returns what was collected; it may not be there yet."""
        ...

    def wait(self) -> None:
        """Return when the device has done them."""
        ...

    def counts(self) -> Counts:
        """What the K steps take."""
        ...


def policy(seed: int = 0) -> torch.nn.Sequential:
    """The policy's network in torch."""
    generator = torch.Generator().manual_seed(seed)
    hidden = Settings().hidden
    return mlp(OBS_DIM, hidden, CHOICES, "tanh", output_gain=0.01, generator=generator)


def sampled(logits: Tensor) -> Tensor:
    """Actions by the Gumbel-max trick."""
    noise = -torch.log(-torch.log(torch.rand_like(logits).clamp_(1e-7, 1 - 1e-7)))
    return (logits + noise).argmax(-1)


class HostCollector:
    """Environments behind a call, and torch's policy: observations to a batch, actions back, K times."""

    def __init__(self, steps: int, obs: Any, step: Callable[[Tensor], Any], calls: int) -> None:
        """``step``: actions to the next observations. ``calls``: from Python, that it takes."""
        self._steps, self._obs, self._step, self._calls = steps, obs, step, calls
        self._policy = policy()

    @torch.no_grad()
    def collect(self) -> object:
        """K steps."""
        rows = []
        for _ in range(self._steps):
            obs = torch.as_tensor(self._obs, dtype=torch.float32)
            actions = sampled(self._policy(obs))
            self._obs, rewards, ended = self._step(actions)
            rows.append((obs, actions, rewards, ended))
        return rows

    def wait(self) -> None:
        """Nothing runs meanwhile."""

    def counts(self) -> Counts:
        """The policy's calls and kernels as torch counts them; the environments' kernels are their own affair."""
        found = count_calls(self.collect)
        return Counts(found.api_calls + self._calls * self._steps, found.launches)


def gymnasium_loop(num_envs: int, steps: int) -> HostCollector:
    """N of Gymnasium's environments, stepped one after another."""
    envs = [gymnasium.make("CartPole-v1") for _ in range(num_envs)]
    first = np.stack([env.reset(seed=index)[0] for index, env in enumerate(envs)])

    def step(actions: Tensor) -> tuple[Any, Any, Any]:
        obs, rewards, ended = (
            np.empty((num_envs, OBS_DIM), np.float32),
            np.empty(num_envs),
            np.empty(num_envs, bool),
        )
        for index, (env, action) in enumerate(zip(envs, actions.tolist(), strict=True)):
            obs[index], rewards[index], terminated, truncated, _ = env.step(action)
            ended[index] = terminated or truncated
            if ended[index]:
                obs[index] = env.reset()[0]
        return obs, rewards, ended

    return HostCollector(steps, first, step, num_envs)


def gymnasium_vector(num_envs: int, steps: int) -> HostCollector:
    """Gymnasium's vector environment, in numpy."""
    env: Any = gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")

    def step(actions: Tensor) -> tuple[Any, Any, Any]:
        obs, rewards, terminated, truncated, _ = env.step(actions.numpy())
        return obs, rewards, terminated | truncated

    return HostCollector(steps, env.reset(seed=0)[0], step, 1)


def envpool_loop(num_envs: int, steps: int, threads: int) -> HostCollector:
    """EnvPool's environments. Raises KernelError without it."""
    reason = package_missing("envpool")
    if reason:
        raise KernelError("envpool", reason)
    import envpool

    pool: Any = envpool.make(
        "CartPole-v1", env_type="gymnasium", num_envs=num_envs, num_threads=threads, seed=0
    )

    def step(actions: Tensor) -> tuple[Any, Any, Any]:
        obs, rewards, terminated, truncated, _ = pool.step(actions.numpy())
        return obs, rewards, terminated | truncated

    return HostCollector(steps, pool.reset()[0], step, 1)


def c_unfused(num_envs: int, steps: int, threads: int) -> HostCollector:
    """The paper's C++: the simulators in compiled code, a step per call, inference in torch."""
    form = CBackend(EnvConfig(SIMULATOR, num_envs, max_episode_steps=SIMULATOR.max_episode_steps), threads)
    form.start()
    out = StepBatch.allocate(1, num_envs, OBS_DIM)

    def step(actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        form.run(actions.unsqueeze(0), out)
        return out.obs[0].t().contiguous(), out.rewards[0].clone(), (out.terminated | out.truncated)[0]

    return HostCollector(steps, form.observe().t().contiguous(), step, 1)


class TorchCollector:
    """Simulator and policy in torch on one device, an operation at a time or a compiled step at a time."""

    def __init__(self, num_envs: int, steps: int, threads: int, *, compiled: bool) -> None:
        work = BenchmarkConfig(simulator=SIMULATOR, num_envs=num_envs, num_threads=threads)
        # The simulator's step is compiled together with the policy, below.
        self._stepper = TorchStepper(work, compiled=compiled)
        self._steps, self._policy, self._compiled = steps, policy(), compiled
        self._one = torch.compile(self._acted, dynamic=False) if compiled else self._acted
        bench_state = self._stepper.get()
        env_state, totals = bench_state.env_state, bench_state.totals
        self._now = Moved(
            env_state.state,
            env_state.elapsed,
            env_state.episode,
            bench_state.copies,
            totals.rewards,
            totals.ended,
        )

    def _acted(self, now: Moved) -> tuple[Moved, Tensor, Tensor]:
        obs = now.state.t().contiguous()
        actions = sampled(self._policy(obs))
        before = now._replace(rewards=torch.zeros_like(now.rewards), ended=torch.zeros_like(now.ended))
        return self._stepper.moved(before, actions.to(torch.float32)), obs, actions

    @torch.no_grad()
    def collect(self) -> object:
        """K steps."""
        rows = []
        for _ in range(self._steps):
            self._now, obs, actions = self._one(self._now)
            rows.append((obs, actions, self._now.rewards, self._now.ended))
        return rows

    def wait(self) -> None:
        """Nothing runs meanwhile."""

    def counts(self) -> Counts:
        """As torch counts them; a compiled step is one call."""
        if not self._compiled:
            return count_calls(self.collect)
        with torch.no_grad():
            kernels = count_generated(lambda: self._one(self._now))
        return Counts(self._steps, self._steps * kernels)


class FusedCollector:
    """rayagi's FusedRollout: simulation, inference, sampling and reset of K steps in one kernel."""

    def __init__(self, num_envs: int, steps: int, threads: int) -> None:
        factory = make_env_factory("fused/CartPole-v1", engine="fused")
        self._env: Any = factory(num_envs=num_envs, first_env_index=0, seed=0, num_threads=threads)
        self._env.reset()
        self._rollout = Rollout.allocate(steps, num_envs, self._env.info, torch.device("cpu"))
        layers = [layer for layer in policy() if isinstance(layer, torch.nn.Linear)]
        self._policy = PolicyTensors(
            weights=tuple(layer.weight.detach() for layer in layers),
            biases=tuple(layer.bias.detach() for layer in layers),
            activation="tanh",
            shift=None,
            scale=None,
            clip=0.0,
            std=None,
        )
        self._running = torch.zeros(num_envs, dtype=torch.float64)
        self._iteration = 0

    def collect(self) -> object:
        """K steps."""
        self._env.collect_rollout(self._rollout, self._policy, self._iteration, self._running)
        self._iteration += 1
        return self._rollout

    def wait(self) -> None:
        """All threads are done when ``collect`` returns."""

    def counts(self) -> Counts:
        """One call and one pass over the environments, in parts where there are threads."""
        return Counts(1, 1)
