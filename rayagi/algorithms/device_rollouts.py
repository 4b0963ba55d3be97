"""Rollouts on the GPU as one CUDA graph: physics, observation, policy, sampling, resets and storage of T steps.

Exploration noise and minibatch orders are drawn on the device, with a counter-based generator of integer operations. The
numbers differ from those of ``actors.rollout``, but do not depend on the layout either: those of an environment are a
function of (seed, its index, iteration, step).
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch import Tensor

from actors.protocols import StateDict
from actors.roles import LocalSimulator
from actors.rollout import Rollout
from rayagi import profiler
from rayagi.algorithms.graphs import Replay
from rayagi.envs.tasks.masked import MaskedTaskVecEnv
from rayagi.envs.tasks.random_uniforms import uniform
from rayagi.models.policy import NetworkPolicy

# Added to the seed, so that these streams are disjoint from those of the tasks.
_EXPLORATION, _ORDER = 0x5DEECE66D0000001, 0x2545F4914F6CDD1D


def normal_noise(seed: int, envs: Tensor, iteration: Tensor, num_steps: int, dim: int) -> Tensor:
    """Standard normal numbers (Box and Muller 1958), (num_steps, N, dim) float32.

    Args:
        envs: global indices of the environments   (N,) int64
        iteration: of this rollout                 () int64
    """
    steps = torch.arange(num_steps, device=envs.device).unsqueeze(1)
    draws = uniform(seed + _EXPLORATION, envs, iteration, steps, 2 * dim)
    # Box-Muller: z = sqrt(-2 ln(1 - u1)) cos(2 pi u2).
    radius = torch.sqrt(-2.0 * torch.log(1.0 - draws[..., :dim]))
    return radius * torch.cos(2.0 * math.pi * draws[..., dim:])


def minibatch_orders(
    seed: int, envs: Tensor, iteration: Tensor, num_steps: int, num_epochs: int, num_minibatches: int
) -> Tensor:
    """Sample indices of each minibatch, (num_epochs, num_minibatches, T * N / num_minibatches), as in ``actors.rollout``.

    Args:
        envs: global indices of the environments   (N,) int64
        iteration: of this update                  () int64
    """
    draws = torch.arange(num_epochs * num_steps, device=envs.device).unsqueeze(1)
    keys = uniform(seed + _ORDER, envs, iteration, draws, 1).view(num_epochs, num_steps, len(envs))
    steps = keys.argsort(dim=1, stable=True)
    columns = torch.arange(len(envs), device=envs.device)
    return (steps * len(envs) + columns).reshape(num_epochs, num_minibatches, -1)


class DeviceRollouts:
    """Fills a rollout with T steps of every environment, like ``actors.roles.collect``, in one graph launch.

    The host synchronizes once per rollout, to read rewards and episode ends. On a CPU the same steps run eagerly, for
    tests.
    """

    def __init__(self, env: MaskedTaskVecEnv, policy: NetworkPolicy, *, num_steps: int, seed: int) -> None:
        """``policy`` is on the environments' device; the learner updates it in place between rollouts."""
        self.env, self.policy, self._seed = env, policy, seed
        self.simulator = LocalSimulator(env)
        """Counts episode returns and lengths, on the host."""
        self.rollout = Rollout.allocate(num_steps, env.num_envs, env.info, env.device, all_there=True)
        shape = (num_steps, env.num_envs, len(env.info.reward_terms))
        self.reward_terms = torch.zeros(shape, device=env.device)
        """Reward terms of the rollout, (T, N, terms)."""
        self.iteration = torch.zeros((), dtype=torch.int64, device=env.device)
        """Iteration of the rollout, () int64 on the device: the graph reads it."""
        self._replay = Replay(
            self.run, env.device, save=env.state_dict, undo=self._undo, captured=env.captured
        )

    def _undo(self, saved: StateDict) -> None:
        """Restore the environments. Simulation errors of the warm-up run do not count."""
        self.env.load_state_dict(saved)
        self.simulator.take_sim_errors()

    @torch.no_grad()
    def run(self) -> None:
        """The captured body: T steps of every environment."""
        env, policy, rollout = self.env, self.policy, self.rollout
        assert rollout.final_obs is not None
        noise = normal_noise(
            self._seed, env.world_indices, self.iteration, rollout.num_steps, env.info.action.dim
        )
        parts = noise.unbind(0), rollout.steps(), rollout.final_obs.unbind(0), self.reward_terms.unbind(0)
        for step_noise, row, final_obs, reward_terms in zip(*parts, strict=True):
            row.raw_obs.copy_(env.current_obs)
            row.obs.copy_(policy.observe(row.raw_obs))
            row.outputs.copy_(policy.outputs(row.obs))
            row.actions.copy_(policy.sample(row.outputs, step_noise))
            step = env.advance(row.actions)
            row.rewards.copy_(step.rewards)
            row.terminated.copy_(step.terminated)
            row.truncated.copy_(step.truncated)
            final_obs.copy_(step.final_obs)
            if step.reward_terms is not None:
                reward_terms.copy_(step.reward_terms)
        rollout.last_obs.copy_(env.current_obs)

    def collect(self, iteration: int) -> dict[str, float]:
        """Collect one rollout. All of its time counts as ``simulate_s``: the graph is not timed by phase."""
        with profiler.timed_operation("collect") as collecting:
            self.iteration.fill_(iteration)
            self._replay()
            rollout = self.rollout
            rewards, done = rollout.rewards.cpu(), (rollout.terminated | rollout.truncated).cpu()
            terms = self.reward_terms.cpu()
            for step_rewards, ended, step_terms in zip(
                rewards.unbind(0), done.unbind(0), terms.unbind(0), strict=True
            ):
                self.simulator.count_step(step_rewards, ended.nonzero().flatten(), step_terms)
        return {"simulate_s": collecting.seconds, "act_s": 0.0}


def on_one_device(env: Any, device: torch.device) -> TypeGuard[MaskedTaskVecEnv]:
    """Whether simulations and policy are on the same GPU, as DeviceRollouts needs."""
    return isinstance(env, MaskedTaskVecEnv) and env.device.type == "cuda" and env.device == device
