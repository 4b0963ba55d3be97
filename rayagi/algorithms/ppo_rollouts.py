"""From a raw rollout to PPO's batch: statistics merged across GMIs, values, advantages; then the update."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actors.noise import minibatch_orders
from actors.protocols import StateDict
from actors.rollout import Rollout
from collectives.communicator import Communicator
from collectives.statistics import Moments, all_merge
from rayagi.algorithms.normalisers import RewardScaler, moments_from_state, moments_state
from rayagi.algorithms.policy import NetworkPolicy
from rayagi.algorithms.ppo import PPOBatch, PPOLearner
from rayagi.algorithms.returns import explained_variance, gae
from rayagi.config.spec import PPOSpec


class PPOTraining:
    """Implements actors.trainer.Learner for PPO. The policy that acts is the model that learns."""

    def __init__(
        self,
        *,
        policy: NetworkPolicy,
        spec: PPOSpec,
        communicator: Communicator,
        num_envs: int,
        first_env_index: int,
        total_envs: int,
        seed: int,
        total_env_steps: int | None,
    ) -> None:
        """``num_envs``: of this GMI, ``total_envs``: of all, in which GMIs need not be equal."""
        self.policy, self.spec, self.communicator = policy, spec, communicator
        self.num_envs, self.first_env_index, self.seed = num_envs, first_env_index, seed
        self.total_envs = total_envs
        weight = num_envs * communicator.world_size / total_envs
        self.learner = PPOLearner(policy.model, spec, communicator, total_env_steps, weight=weight)
        self.reward_scaler = RewardScaler(num_envs, spec.gamma) if spec.normalize_rewards else None
        self.sync_s = 0.0
        self.env_steps = 0
        """Steps of all GMIs so far; counted, since a resumed run may have another number of environments."""

    def learn(self, rollout: Rollout, iteration: int) -> dict[str, float]:
        """Statistics, advantages, update; then the observation statistics for the next rollout."""
        self.sync_s = 0.0
        batch, fit = self.prepare(rollout)
        orders = minibatch_orders(
            seed=self.seed,
            first_env_index=self.first_env_index,
            num_envs=self.num_envs,
            iteration=iteration,
            num_steps=rollout.num_steps,
            num_epochs=self.spec.num_epochs,
            num_minibatches=self.spec.num_minibatches,
        ).to(batch.obs.device)
        metrics = self.learner.update(batch, orders, iteration + 1, self.env_steps)
        self.env_steps += rollout.num_steps * self.total_envs
        self.sync_s += self.learner.sync_s
        if self.policy.normaliser is not None:
            seen = Moments.of(rollout.raw_obs.reshape(-1, rollout.raw_obs.shape[-1]))
            self.policy.normaliser.update(self._merge(seen))
        return {**metrics, "explained_variance": fit}

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> tuple[PPOBatch, float]:
        """PPO's batch of a rollout, and the explained variance of its value estimates."""
        spec, model = self.spec, self.policy.model
        values, next_values = self._values(rollout)
        done = rollout.terminated | rollout.truncated
        rewards = rollout.rewards
        if self.reward_scaler is not None:
            self.reward_scaler.update(self._merge(self.reward_scaler.observe(rewards, done)))
            rewards = self.reward_scaler(rewards)
        device = values.device
        advantages, targets = gae(
            rewards=rewards.to(device),
            values=values,
            next_values=next_values,
            terminated=rollout.terminated.to(device),
            done=done.to(device),
            gamma=spec.gamma,
            gae_lambda=spec.gae_lambda,
        )
        fit = explained_variance(values, targets)
        if spec.normalize_advantages:
            moments = self._merge(Moments.of(advantages.reshape(-1).cpu()))
            std = float(moments.variance().sqrt())
            advantages = (advantages - float(moments.mean)) / (std + 1e-8)
        flat = rollout.actions.flatten(0, 1)
        return (
            PPOBatch(
                obs=rollout.obs.flatten(0, 1),
                actions=flat,
                log_probs=model.head.log_prob(rollout.outputs.flatten(0, 1), flat),
                values=values.reshape(-1),
                advantages=advantages.reshape(-1),
                targets=targets.reshape(-1),
            ),
            fit,
        )

    def _values(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """V of each state acted on and V of the state each action led to, (T, N) each.

        Where an episode ended, the latter is V of the true last observation, so that a time limit is bootstrapped.
        """
        last = self.policy.observe(rollout.last_obs)
        finals = [self.policy.observe(obs) for _, _, obs in rollout.finals]
        shape = rollout.rewards.shape
        found = self.policy.model.values(torch.cat([rollout.obs.flatten(0, 1), last, *finals]))
        values = found[: shape.numel()].view(shape)
        next_values = torch.cat([values[1:], found[shape.numel() : shape.numel() + shape[1]].unsqueeze(0)])
        offset = shape.numel() + shape[1]
        for step, ids, _ in rollout.finals:
            next_values[step, ids.to(found.device)] = found[offset : offset + len(ids)]
            offset += len(ids)
        return values, next_values

    def _merge(self, moments: Moments) -> Moments:
        started = time.perf_counter()
        merged = all_merge(moments, self.communicator)
        self.sync_s += time.perf_counter() - started
        return merged

    def shared_state(self) -> StateDict:
        """Learner, observation statistics, return statistics."""
        state: StateDict = {"learner": self.learner.state_dict(), "env_steps": self.env_steps}
        if self.policy.normaliser is not None:
            state["obs_normaliser"] = self.policy.normaliser.state_dict()
        if self.reward_scaler is not None:
            state["reward_moments"] = moments_state(self.reward_scaler.moments)
        return state

    def local_state(self) -> StateDict:
        """Discounted returns of the running episodes."""
        return {} if self.reward_scaler is None else {"running_returns": self.reward_scaler.running.clone()}

    def load_state(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Go on from a saved state."""
        self.learner.load_state_dict(shared["learner"])
        self.env_steps = int(shared["env_steps"])
        if self.policy.normaliser is not None:
            self.policy.normaliser.load_state_dict(shared["obs_normaliser"])
        if self.reward_scaler is not None:
            self.reward_scaler.moments = moments_from_state(shared["reward_moments"])
            fresh = torch.zeros(self.num_envs)
            self.reward_scaler.running = fresh if local is None else local["running_returns"].clone()
