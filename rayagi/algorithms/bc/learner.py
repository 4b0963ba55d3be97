"""Behaviour cloning: maximum likelihood, or least squares, of the dataset's actions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actors.replay import Subscription
from rayagi.algorithms.bc import BCSpec
from rayagi.algorithms.offline_learner import Batch, OneLossLearner
from rayagi.config.errors import ConfigError


class BCLearner(OneLossLearner[BCSpec]):
    """Steps the policy alone: the value network keeps its initial weights."""

    measured = ("policy_loss", "entropy", "action_error")
    subscriptions = (Subscription(column="obs"), Subscription(column="action"))

    def __init__(self, **whose: Any) -> None:
        """Arguments as for OneLossLearner. Raises ConfigError: squared errors of choices, which have no gradient."""
        super().__init__(**whose)
        if self.spec.loss == "mse" and self.policy.action.is_discrete:
            raise ConfigError(
                "bc.loss", "mse", "is for a box of actions, and this task has choices", "use 'log_likelihood'"
            )

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of each timestep: the loss (n,), and the metrics of ``measured`` (n, 3)."""
        model, actions = self.policy.model, batch["action"]
        outputs = model.outputs(batch["obs"])
        mode = model.head.mode(outputs)
        if self.policy.action.is_discrete:
            error = (mode != actions).float().reshape(len(actions), -1).mean(-1)
        else:
            # |mode(pi(s)) - a|^2, in the environment's units.
            shown = model.head.environment_actions(mode)
            error = (shown - model.head.environment_actions(actions)).square().sum(-1)
        # L = -log pi(a|s), or |mode(pi(s)) - a|^2.
        loss = -model.head.log_prob(outputs, actions) if self.spec.loss == "log_likelihood" else error
        with torch.no_grad():
            entropy = model.head.entropy(outputs).expand(len(loss)) if len(loss) else loss
        return loss, torch.stack((loss, entropy, error), -1).detach()
