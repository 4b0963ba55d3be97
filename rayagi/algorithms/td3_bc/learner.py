"""TD3+BC's step: TD3's critics, and a policy that also clones the dataset's actions (Fujimoto and Gu 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from actors.protocols import EnvInfo
from collectives.communicator import Communicator
from rayagi.algorithms.gradient_updater import timed_collective
from rayagi.algorithms.offline_learner import TRANSITIONS, Batch, OfflineLearner
from rayagi.algorithms.parameter_group import ParameterGroups
from rayagi.algorithms.td3_bc import TD3BCSpec
from rayagi.config.spec import NetworkSpec
from rayagi.models.actor_q import ActorQ
from rayagi.models.exploring_heads import DeterministicHead

_EXPLORATION = 0.1
"""Standard deviation of the noise with which a saved policy is sampled: TD3's."""


def make_model(info: EnvInfo, network: NetworkSpec, spec: TD3BCSpec, seed: int) -> ActorQ:
    """A deterministic policy, and twin critics: TD3's."""
    head = DeterministicHead(info.action.low, info.action.high, _EXPLORATION)
    return ActorQ(info, network, head, seed=seed)


class TD3BCUpdater(ParameterGroups):
    """Critics and policy with an optimiser each, and their targets. ``steps`` are those of the critics."""

    model: ActorQ

    def __init__(self, model: ActorQ, spec: TD3BCSpec, communicator: Communicator) -> None:
        """Collective."""
        super().__init__(model, spec, communicator)
        self.critics = self._group("critics", model.critics, spec.learning_rate)
        self.policy = self._group("policy", model.policy, spec.learning_rate)
        self.target_critics = self._target("critics", model.critics, self.critics)
        self.target_policy = self._target("policy", model.policy, self.policy)


class TD3BCLearner(OfflineLearner[TD3BCSpec]):
    """Steps the critics, and with every ``policy_delay``-th step the policy and all targets."""

    updater: TD3BCUpdater
    measured = ("policy_loss", "value_loss", "cloning_loss", "q_of_policy")
    subscriptions = TRANSITIONS

    def _make_updater(self) -> TD3BCUpdater:
        model = self.policy.model
        assert isinstance(model, ActorQ)
        self._policy_part = torch.zeros(3, device=self.policy.device)
        """This GMI's part of the policy's loss, of cloning and of Q, at its last step."""
        return TD3BCUpdater(model, self.spec, self.communicator)

    def step(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One step of the critics, and perhaps of the policy. As of ``OfflineLearner.step``."""
        value_loss, norm = self._step_critics(batch)
        self.updater.steps += 1
        if self.updater.steps % self.spec.policy_delay == 0:
            self._policy_part = self._step_policy(batch)
            self.updater.follow(self.spec.tau)
        parts = torch.cat((self._policy_part[:1], value_loss.reshape(1), self._policy_part[1:]))
        return parts, norm

    def _step_critics(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """One step on E[sum_i (Q_i(s, a) - y)^2]. Returns this GMI's part of it, and the gradient's norm."""
        critics = self.updater.model.critics
        trace = critics.traced(batch["obs"], batch["action"])
        errors = trace[-1].squeeze(-1) - self._targets(batch)
        # The derivative by Q_i is 2 (Q_i - y); its mean over GMIs is to be the sum of all their parts.
        critics.backward(trace, (2 * self.communicator.world_size * self._share * errors).unsqueeze(-1))
        return self._share * errors.square().sum(), self.updater.critics.step()

    def _targets(self, batch: Batch) -> Tensor:
        """y of each timestep, (n,)."""
        spec, updater = self.spec, self.updater
        with torch.no_grad():
            # a' = clip(pi'(s') + clip(noise, -c, c), -1, 1); y = r + gamma (1 - d) min_i Q'_i(s', a').
            noise = (spec.target_noise * self._noise(batch)).clamp(
                -spec.target_noise_clip, spec.target_noise_clip
            )
            actions = (updater.target_policy.module(batch["next_obs"]).tanh() + noise).clamp(-1, 1)
            q = updater.target_critics.module(batch["next_obs"], actions).squeeze(-1).amin(0)
        return batch["reward"] + spec.gamma * (1.0 - batch["terminated"].to(q)) * q

    def _noise(self, batch: Batch) -> Tensor:
        """Standard normal noise of this GMI's timesteps, (n, dim): that of the whole batch does not depend on the GMIs."""
        generator = torch.Generator().manual_seed((self.seed << 32) + self.updater.steps)
        whole = torch.randn((self.spec.batch_size, batch["action"].shape[-1]), generator=generator)
        return whole[batch["position"].cpu()].to(batch["action"])

    def _step_policy(self, batch: Batch) -> Tensor:
        """One step on -lambda Q_1(s, pi(s)) + |pi(s) - a|^2 / dim (eq. 5). Returns this GMI's part of its means, (3,)."""
        model, group = self.updater.model, self.updater.policy
        actions = model.policy(batch["obs"]).tanh()
        trace = model.critics.traced(batch["obs"], actions.detach())
        q = trace[-1][0].squeeze(-1)
        # lambda = alpha / mean |Q_1(s, pi(s))| over the batch of all GMIs (eq. 6).
        size = (self._share * q.abs().sum()).reshape(1).cpu()
        if self.communicator.world_size > 1:
            with timed_collective(group, "all_reduce"):
                self.communicator.all_reduce(size, "sum")
        factor = (self.spec.alpha / size.clamp(min=1e-8).to(q))[0]
        cloning = (actions - batch["action"]).square().mean(-1)
        clone = self._share * cloning.sum()
        grads = torch.zeros_like(trace[-1])
        grads[0] = -self.communicator.world_size * self._share * factor
        of_actions = model.critics.action_gradients(trace, grads, actions.shape[-1])
        group.flat.gradients.zero_()
        torch.autograd.backward((actions, self.communicator.world_size * clone), (of_actions, None))
        group.step()
        clone, of_policy = clone.detach(), self._share * q.sum()
        return torch.stack((clone - factor * of_policy, clone, of_policy))
