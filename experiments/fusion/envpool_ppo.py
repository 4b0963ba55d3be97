"""A loop in the manner of CleanRL on EnvPool: C++ environments on a pool of threads, inference and PPO's update in torch."""

from __future__ import annotations

from typing import Any

import envpool
import torch
from torch import Tensor

from actors.protocols import ActionSpec, EnvInfo
from experiments.fusion.collectors import CHOICES, OBS_DIM, sampled
from experiments.fusion.settings import Settings
from rayagi.algorithms import losses
from rayagi.algorithms.returns import gae
from rayagi.config.spec import NetworkSpec
from rayagi.models.networks import ActorCritic


class EnvPoolTraining:
    """As CleanRL's loop has it, a time limit counts as an end, and minibatches are drawn anew every epoch."""

    def __init__(self, settings: Settings, threads: int) -> None:
        torch.set_num_threads(threads)
        torch.manual_seed(settings.seed)
        self.settings = settings
        self._pool: Any = envpool.make(
            "CartPole-v1",
            env_type="gymnasium",
            num_envs=settings.num_envs,
            num_threads=threads,
            seed=settings.seed,
        )
        action = ActionSpec(kind="discrete", dim=1, num_choices=CHOICES)
        info = EnvInfo(
            env_id="CartPole-v1", engine="envpool", obs_dim=OBS_DIM, action=action, max_episode_steps=500
        )
        self._model = ActorCritic(info, NetworkSpec(hidden=settings.hidden, activation="tanh"), settings.seed)
        self._optimiser = torch.optim.Adam(
            self._model.parameters(), lr=settings.learning_rate, eps=settings.adam_eps, fused=True
        )
        self._obs = torch.from_numpy(self._pool.reset()[0])

    def iterate(self) -> float:
        """One rollout and its update. Returns the mean length of an episode, by the share of steps that ended one."""
        obs, actions, log_probs, values, rewards, done = self._collect()
        with torch.no_grad():
            last = self._model.values(self._obs)
        advantages, targets = gae(
            rewards=rewards,
            values=values,
            next_values=torch.cat([values[1:], last.unsqueeze(0)]),
            terminated=done,
            done=done,
            gamma=self.settings.gamma,
            gae_lambda=self.settings.gae_lambda,
        )
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        self._update([one.flatten(0, 1) for one in (obs, actions, log_probs, advantages, targets)])
        return float(done.numel() / done.sum().clamp(min=1))

    @torch.no_grad()
    def _collect(self) -> list[Tensor]:
        rows = []
        for _ in range(self.settings.rollout_length):
            obs, logits = self._obs, self._model.policy(self._obs)
            actions = sampled(logits)
            seen, rewards, terminated, truncated, _ = self._pool.step(actions.numpy())
            self._obs = torch.from_numpy(seen)
            ended = torch.from_numpy(terminated | truncated)
            log_probs, values = self._model.head.log_prob(logits, actions), self._model.values(obs)
            rows.append((obs, actions, log_probs, values, torch.from_numpy(rewards), ended))
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    def _update(self, batch: list[Tensor]) -> None:
        settings, size = self.settings, len(batch[0])
        for _ in range(settings.num_epochs):
            for order in torch.randperm(size).chunk(settings.num_minibatches):
                self._step(*(one[order] for one in batch))

    def _step(
        self, obs: Tensor, actions: Tensor, log_probs: Tensor, advantages: Tensor, targets: Tensor
    ) -> None:
        settings, model = self.settings, self._model
        logits = model.policy(obs)
        log_ratio = model.head.log_prob(logits, actions) - log_probs
        loss = losses.clipped_policy_loss(log_ratio, advantages, settings.clip_ratio)
        loss = loss + settings.value_coef * (model.values(obs) - targets).square().mean()
        loss = loss - settings.entropy_coef * model.head.entropy(logits)
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        self._optimiser.step()
