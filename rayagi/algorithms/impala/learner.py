"""IMPALA's update: one step on V-trace's actor-critic loss (Espeholt et al. 2018, §4.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from actors.rollout import Rollout
from rayagi.algorithms.impala import ImpalaSpec
from rayagi.algorithms.one_pass import OnePassUpdater
from rayagi.algorithms.returns import explained_variance, importance_metrics, vtrace
from rayagi.algorithms.rollout_learner import OnPolicyBatch, OnPolicyLearner


class ImpalaLearner(OnPolicyLearner[ImpalaSpec]):
    """The learner of IMPALA."""

    updater_class = OnePassUpdater

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> tuple[OnPolicyBatch, Tensor]:
        """The batch of a rollout, its advantages times rho_t, and the explained variance of its value estimates, ()."""
        spec = self.spec
        obs, everything = self._observed(rollout)
        actions, memory = rollout.actions.flatten(0, 1).to(obs.device), self._memory(rollout)
        values, next_values = self._values(rollout, everything)
        # log (pi / mu): the learner's policy over the one that acted.
        log_ratios = self._log_probs(obs, actions, memory) - self._behaviour(rollout)
        advantages, targets = vtrace(
            log_ratios=log_ratios.view(values.shape),
            values=values,
            next_values=next_values,
            **self._outcomes(rollout),
            gamma=spec.gamma,
            trace_lambda=spec.gae_lambda,
            rho_bar=spec.rho_bar,
            c_bar=spec.c_bar,
        )
        self._importance = importance_metrics(log_ratios, spec.rho_bar)
        # The policy gradient is rho_t (r_t + gamma v_{t+1} - V(s_t)) grad log pi, with rho_t = min(rho_bar, pi / mu).
        weights = log_ratios.exp().clamp(max=spec.rho_bar)
        batch = OnPolicyBatch(
            obs=obs,
            actions=actions,
            log_probs=self._behaviour(rollout),
            values=values.reshape(-1),
            advantages=self._normalised(advantages).reshape(-1) * weights,
            targets=targets.reshape(-1),
            memory=memory,
        )
        return batch, explained_variance(values, targets)

    def _update(self, rollout: Rollout, orders: Tensor) -> dict[str, float]:
        return {**super()._update(rollout, orders), **self._importance}
