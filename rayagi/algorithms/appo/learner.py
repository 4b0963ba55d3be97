"""APPO: epochs of minibatches on PPO's clipped loss, over rollouts of an older policy.

V-trace (Espeholt et al. 2018) corrects for the policy that acted; without it the samples count as on-policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actors.rollout import Rollout
from rayagi.algorithms import losses
from rayagi.algorithms.appo import AppoSpec
from rayagi.algorithms.gradient_updater import GradientUpdater
from rayagi.algorithms.returns import explained_variance, gae
from rayagi.algorithms.rollout_learner import RolloutLearner
from rayagi.algorithms.vtrace import importance_metrics, vtrace
from rayagi.models.recurrent import RolloutMemory, Sequences


@dataclass(slots=True)
class Samples:
    """Samples of one rollout; constant throughout an update. B = T * N.

    Attributes:
        obs: observations, normalised with this trainer's statistics (B, obs_dim)
        actions: actions taken                                       (B, dim) or (B,)
        behaviour: log mu(a|s), under the behaviour policy           (B,)
        start: log probability under the policy before this update   (B,)
        everything: obs, last states and final states, for V         (B + N + K, obs_dim)
        rewards: scaled if ``normalize_rewards``                     (T, N)
        terminated: the task ended                                   (T, N) bool
        done: terminated or truncated                                (T, N) bool
        memory: states of a recurrent policy; None: samples are independent
    """

    obs: Tensor
    actions: Tensor
    behaviour: Tensor
    start: Tensor
    everything: Tensor
    rewards: Tensor
    terminated: Tensor
    done: Tensor
    memory: RolloutMemory | None = None

    def sequences(self, order: Tensor) -> Sequences | None:
        """How the samples in ``order`` form sequences; None if they are independent."""
        return None if self.memory is None else self.memory.of(order)


@dataclass(slots=True)
class Estimates:
    """Estimates at the current parameters, recomputed in every epoch.

    Attributes:
        advantages: normalised if ``normalize_advantages``, times V-trace's truncated importance ratio   (B,)
        targets: value targets                                                                          (B,)
    """

    advantages: Tensor
    targets: Tensor


MEASURED = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
"""Metrics of one minibatch step, in the order of its row."""


class AppoUpdater(GradientUpdater[AppoSpec]):
    """Steps on the clipped surrogate and the value loss."""

    def loss(self, samples: Samples, estimates: Estimates, order: Tensor) -> tuple[Tensor, Tensor]:
        """Total loss of the samples in ``order``, and its metrics (all of ``MEASURED`` but the gradient norm)."""
        spec, model = self.spec, self.model
        advantages = estimates.advantages[order]
        outputs, values = model(samples.obs[order], samples.sequences(order))
        log_probs = model.head.log_prob(outputs, samples.actions[order])
        # The ratio of clipping and KL is relative to the policy before this update, not to the behaviour policy.
        log_ratio = log_probs - samples.start[order]
        policy_loss = losses.clipped_policy_loss(log_ratio, advantages, spec.clip_ratio)
        value_loss = (values - estimates.targets[order]).square().mean()  # (v_t - V(s_t))^2
        entropy = model.head.entropy(outputs)
        total = policy_loss + spec.value_coef * value_loss - spec.entropy_coef * entropy
        with torch.no_grad():
            kl, clipped = losses.approx_kl(log_ratio), losses.clip_fraction(log_ratio, spec.clip_ratio)
        return total, torch.stack([policy_loss, value_loss, entropy, kl, clipped]).detach()

    def step_on(self, samples: Samples, estimates: Estimates, order: Tensor) -> Tensor:
        """One step on the samples in ``order``. Returns the metrics of ``MEASURED``, (6,)."""
        total, parts = self.loss(samples, estimates, order)
        return torch.cat((parts, self.step(total).reshape(1)))


class AppoLearner(RolloutLearner[AppoSpec]):
    """Implements actors.roles.Learner for APPO."""

    updater: AppoUpdater

    def _make_updater(self, total_env_steps: int | None, weight: float) -> AppoUpdater:
        return AppoUpdater(self.policy.model, self.spec, self.communicator, total_env_steps, weight=weight)

    def _update(self, rollout: Rollout, orders: Tensor, number: int) -> dict[str, float]:
        updater, samples = self.updater, self.prepare(rollout)
        updater.begin_update(self.env_steps)
        rows: list[Tensor] = []
        fits: list[float] = []
        for minibatches in orders:  # one epoch each: the targets follow the parameters
            estimates, fit = self.estimate(rollout, samples, first=not fits)
            fits.append(fit)
            rows += [updater.step_on(samples, estimates, order) for order in minibatches]
        metrics = updater.end_update(
            MEASURED, rows, last_epoch=orders.shape[1], iteration=number, what="APPO update"
        )
        bound = self.spec.rho_bar if self.spec.vtrace else None
        importance = importance_metrics(samples.start - samples.behaviour, bound)
        return {**metrics, "explained_variance": fits[0], **importance}

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> Samples:
        """The samples of a rollout, with log probabilities under behaviour policy and current policy."""
        obs, everything = self._observed(rollout)
        actions, memory = rollout.actions.flatten(0, 1).to(obs.device), self._memory(rollout)
        return Samples(
            obs=obs,
            actions=actions,
            behaviour=self._behaviour(rollout),
            start=self._log_probs(obs, actions, memory),
            everything=everything,
            rewards=self._scaled_rewards(rollout),
            terminated=rollout.terminated.to(obs.device),
            done=(rollout.terminated | rollout.truncated).to(obs.device),
            memory=memory,
        )

    @torch.no_grad()
    def estimate(self, rollout: Rollout, samples: Samples, *, first: bool) -> tuple[Estimates, float]:
        """Advantages and targets at the current parameters, and the explained variance of the value estimates.

        ``first``: the parameters are still those before the update.
        """
        values, next_values = self._values(rollout, samples.everything)
        trajectory: dict[str, Any] = {
            "rewards": samples.rewards,
            "values": values,
            "next_values": next_values,
            "terminated": samples.terminated,
            "done": samples.done,
            "gamma": self.spec.gamma,
        }
        if self.spec.vtrace:
            # log (pi / mu) at the current parameters; in the first epoch pi is the policy before the update.
            now = samples.start if first else self._log_probs(samples.obs, samples.actions, samples.memory)
            advantages, targets = vtrace(
                log_ratios=(now - samples.behaviour).view(values.shape),
                **trajectory,
                trace_lambda=self.spec.gae_lambda,
                rho_bar=self.spec.rho_bar,
                c_bar=self.spec.c_bar,
            )
            # rho = min(rho_bar, pi / mu). The clipped loss has its own ratio pi / pi_start; the remaining one is
            # pi_start / mu.
            weights = (samples.start - samples.behaviour).exp().clamp(max=self.spec.rho_bar)
        else:
            advantages, targets = gae(**trajectory, gae_lambda=self.spec.gae_lambda)
            weights = torch.ones_like(samples.start)
        weighted = self._normalised(advantages).reshape(-1) * weights
        return Estimates(weighted, targets.reshape(-1)), float(explained_variance(values, targets))
