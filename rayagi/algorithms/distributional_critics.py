"""Twin critics that are distributions of the return: the model, and the critics' gradient step (Seo et al. 2025)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, TypeVar

import torch
from torch import Tensor

from actors.protocols import EnvInfo
from rayagi.algorithms.categorical import Support, cross_entropy
from rayagi.algorithms.distributional import DistributionalSpec
from rayagi.algorithms.off_policy import OffPolicyLearner, OffPolicyUpdater
from rayagi.algorithms.parameter_group import ParameterGroup
from rayagi.algorithms.transitions import Transitions
from rayagi.config.spec import NetworkSpec
from rayagi.models.actor_q import ActorQ
from rayagi.models.exploring_heads import BoxHead
from rayagi.models.recurrent import Sequences

SpecT = TypeVar("SpecT", bound=DistributionalSpec)


class DistributionalActorQ(ActorQ):
    """Policy and twin critics, whose outputs are the logits of distributions of the return."""

    def __init__(
        self,
        info: EnvInfo,
        network: NetworkSpec,
        head: BoxHead,
        spec: DistributionalSpec,
        *,
        seed: int,
        critic_width: float,
    ) -> None:
        """``critic_width``: units of a critic's layer for each of the policy's."""
        super().__init__(
            info,
            network,
            head,
            seed=seed,
            critic_hidden=tuple(int(critic_width * size) for size in network.hidden),
            critic_outputs=spec.num_atoms,
            layer_norm=spec.layer_norm,
        )
        self.support = Support(spec.v_min, spec.v_max, spec.num_atoms)

    def values(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """min_i E[Z_i(s, a)] of the policy's mode a."""
        flat = observed.reshape(-1, observed.shape[-1])
        logits = self.critics(flat, self.head.normalised(self.head.mode(self.outputs(flat))))
        return self.support.expectation(logits.softmax(-1)).amin(0).view(observed.shape[:-1])


class DistributionalUpdater(OffPolicyUpdater[SpecT]):
    """Steps twin critics on the cross entropy to projected target distributions, and networks by AdamW."""

    model: DistributionalActorQ

    def __init__(self, model: DistributionalActorQ, *given: Any, **weight: Any) -> None:
        super().__init__(model, *given, **weight)
        spec = self.spec
        self.critics = self._group("critics", model.critics, spec.critic_learning_rate or spec.learning_rate)
        self.policy = self._group("policy", model.policy, spec.learning_rate)
        self.target = self._target("critics", model.critics, self.critics)

    @abstractmethod
    def _next_actions(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """Actions a' in [-1, 1] for the next observations, (B, dim), and r of the targets r + discount Z', (B,)."""

    def _step_critics(self, batch: Transitions) -> tuple[Tensor, Tensor, Tensor]:
        """Sum of both critics' cross entropies. Returns it, the gradient norm and the mean of E[Z]."""
        m = self._targets(batch)
        trace = self.model.critics.traced(batch.obs, self.model.head.normalised(batch.actions))
        log_p = trace[-1].log_softmax(-1)  # (2, B, num_atoms)
        p = log_p.exp()
        # L = -sum over critics k of E[sum_i m_ki log p_ki(s, a)]; dL/dlogits_k = (p_k - m_k) / B.
        self.model.critics.backward(trace, self.weight / len(batch.obs) * (p - m))
        norm = self._step_decayed(self.critics)
        return cross_entropy(m, log_p).mean(1).sum(), norm, self.model.support.expectation(p).mean()

    @torch.no_grad()
    def _targets(self, batch: Transitions) -> Tensor:
        """Projected distributions of r + discount Z'(s', a') for each critic, (2 or 1, B, num_atoms)."""
        support = self.model.support
        actions, rewards = self._next_actions(batch)
        p = self.target.module(batch.next_obs, actions).softmax(-1)
        m = torch.stack([support.project(each, rewards, batch.discounts) for each in p])
        if not self.spec.clipped_double:
            return m
        # Clipped double Q: both learn from the distribution of the lower mean.
        first, second = support.expectation(m)
        return torch.where((first < second).unsqueeze(-1), m[0], m[1]).unsqueeze(0)

    def _q_and_action_gradients(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Q = min_i E[Z_i(s, a)], (B,), without the clip the mean over i; and the gradients of -E[Q] by a, (B, dim)."""
        critics, support = self.model.critics, self.model.support
        trace = critics.traced(obs, actions.detach())
        p = trace[-1].softmax(-1)
        q = support.expectation(p)  # (2, B)
        if self.spec.clipped_double:
            least, chosen = q.min(0, keepdim=True)
            share = torch.zeros_like(q).scatter_(0, chosen, 1.0)
        else:
            least, share = q.mean(0, keepdim=True), torch.full_like(q, 1 / len(q))
        # dE[Z]/dlogits_j = p_j (z_j - E[Z]).
        slopes = p * (support.atoms(p.device) - q.unsqueeze(-1))
        of_logits = -self.weight / len(obs) * share.unsqueeze(-1) * slopes
        return least.squeeze(0), critics.action_gradients(trace, of_logits, actions.shape[-1])

    def _step_decayed(self, group: ParameterGroup) -> Tensor:
        """One step of AdamW: parameters shrink by learning rate times decay, then Adam's step. Returns the gradient norm."""
        with torch.no_grad():
            group.flat.parameters.mul_(1.0 - float(group.adam.learning_rate) * self.spec.weight_decay)
        return group.step()


class DistributionalLearner(OffPolicyLearner[SpecT]):
    """Acts with its policy from the first step."""

    def _set_warm_up(self) -> None:
        """No uniform actions: learning starts after a few steps of each environment."""
