"""DQN: its model, and its update, one step on the temporal difference error (Mnih et al. 2015; Hessel et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import huber_loss

from actors.protocols import EnvInfo, StateDict
from actors.replay import Prioritized, Selection, StepPriorities, select
from actors.replay.selection import Selector
from actors.rollout import Rollout
from rayagi.algorithms.categorical import Support, cross_entropy, divergence
from rayagi.algorithms.dqn import DQNSpec
from rayagi.algorithms.gradient_updater import timed_collective
from rayagi.algorithms.off_policy import OffPolicyLearner, OffPolicyUpdater
from rayagi.algorithms.transitions import Transitions
from rayagi.config.spec import NetworkSpec
from rayagi.models.heads import EpsilonGreedyHead
from rayagi.models.networks import Model
from rayagi.models.q_network import QNetwork
from rayagi.models.recurrent import Sequences

LEAST_PRIORITY = 1e-6
"""Added to errors, so that no transition is lost to selection (Schaul et al. 2016, §3.3)."""
FIRST_PRIORITY = 1.0
"""Of new transitions, until one has a larger one."""


class QModel(Model):
    """Outputs are Q(s, .), the greedy action is the policy. Initial weights depend on ``seed`` alone."""

    head: EpsilonGreedyHead

    def __init__(self, info: EnvInfo, network: NetworkSpec, spec: DQNSpec, seed: int) -> None:
        super().__init__()
        self.network = QNetwork(
            info,
            network,
            torch.Generator().manual_seed(seed),
            num_atoms=spec.num_atoms,
            dueling=spec.dueling,
            noisy_sigma=spec.sigma0 if spec.noisy else None,
        )
        self.support = Support(spec.v_min, spec.v_max, spec.num_atoms) if spec.num_atoms > 1 else None
        self.head = EpsilonGreedyHead(info.action.num_choices)

    @property
    def layer_noise_dim(self) -> int:
        """Numbers of noise that the layers take for one sample of their weights; 0: not noisy."""
        return sum(self.network.noise_dims)

    def action_values(self, observed: Tensor, noise: Tensor | None = None) -> Tensor:
        """Q(s, .): (B, obs_dim) -> (B, num_actions). ``noise`` as of QNetwork."""
        return self.means(self.network(observed, noise))

    def means(self, found: Tensor) -> Tensor:
        """Q(s, .) of the network's outputs: (B, num_actions, num_atoms) -> (B, num_actions)."""
        return found.squeeze(-1) if self.support is None else self.support.expectation(found.softmax(-1))

    def noisy_outputs(self, observed: Tensor, noise: Tensor) -> Tensor:
        """Q(s, .) of a sample of the weights for each row."""
        return self.action_values(observed, noise)

    def outputs(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """Q(s, .) of the mean weights."""
        return self.action_values(observed.reshape(-1, observed.shape[-1])).view(*observed.shape[:-1], -1)

    def values(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """max_a Q(s, a)."""
        return self.outputs(observed).amax(-1)


class DQNUpdater(OffPolicyUpdater[DQNSpec]):
    """Steps the network, and copies it to the target network every ``target_interval`` steps."""

    measured = ("value_loss", "grad_norm", "q_mean")
    model: QModel

    def __init__(self, model: QModel, *given: Any, **weight: Any) -> None:
        super().__init__(model, *given, **weight)
        self.online = self._group("network", model.network, self.spec.learning_rate)
        self.target = self._target("network", model.network, self.online)
        self.priorities = torch.empty(0)
        """Of the transitions of the last step: absolute errors, or divergences of distributions, (B,)."""

    def step(self, batch: Transitions) -> Tensor:
        """One gradient step on the mean error, weighted by importance."""
        found = self.model.network(batch.obs, self._layer_noise())
        rows = torch.arange(len(found), device=self.device)
        # Q(s, a), or the logits of Z(s, a), of the actions that were taken.
        taken = found[rows, batch.actions]
        errors, self.priorities = self._errors(batch, taken, rows)
        loss = (errors if batch.weights is None else batch.weights * errors).mean()
        self.online.flat.gradients.zero_()
        (self.weight * loss).backward()
        norm = self.online.step()
        if (self.steps + 1) % self.spec.target_interval == 0:
            self.follow(self.spec.tau)
        q_mean = self.model.means(found.detach())[rows, batch.actions].mean()
        return torch.stack((loss.detach(), norm, q_mean))

    def _errors(self, batch: Transitions, taken: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of each transition, and its priority, (B,) each; ``taken``: outputs of the actions, (B, num_atoms)."""
        with torch.no_grad():
            following = self.target.module(batch.next_obs, self._layer_noise())
            # a* = argmax_a Q_target(s', a); double: argmax_a Q(s', a) (van Hasselt et al. 2016, eq. 4).
            chooser = (
                self.model.network(batch.next_obs, self._layer_noise()) if self.spec.double else following
            )
            best = following[rows, self.model.means(chooser).argmax(1)]
        support = self.model.support
        if support is None:
            # y = r + discount Q_target(s', a*); the error is clipped to [-1, 1] in the gradient: Huber's loss.
            y = torch.addcmul(batch.rewards, batch.discounts, best.squeeze(1))
            q = taken.squeeze(1)
            return huber_loss(q, y, reduction="none"), (q.detach() - y).abs()
        # m = Phi(r + discount Z_target(s', a*)); the loss is the cross entropy -sum_i m_i log p_i(s, a).
        m = support.project(best.softmax(-1), batch.rewards, batch.discounts)
        log_p = taken.log_softmax(-1)
        return cross_entropy(m, log_p), divergence(m, log_p.detach()).clamp(min=0.0)

    def _layer_noise(self) -> Tensor | None:
        """One sample of noisy layers' weights for a batch; each forward pass of a step has its own."""
        dim = self.model.layer_noise_dim
        return torch.randn((1, dim), generator=self.generator, device=self.device) if dim else None


class DQNLearner(OffPolicyLearner[DQNSpec]):
    """The learner of DQN."""

    updater_class = DQNUpdater
    updater: DQNUpdater

    def __init__(self, **whose: Any) -> None:
        """As of OffPolicyLearner."""
        super().__init__(**whose)
        self.new_priority = FIRST_PRIORITY
        """Of transitions that are inserted: the largest so far."""
        self._priorities = (
            StepPriorities(self.replay, self.spec.priority_exponent) if self.spec.prioritized else None
        )

    def _selectors(self) -> tuple[Selector, ...]:
        return (*super()._selectors(), *([Prioritized()] if self.spec.prioritized else []))

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """As of OffPolicyLearner."""
        if self._priorities is not None:
            self.selector = self._priorities.selector(self._importance())
        metrics = super().learn(rollout)
        return {**metrics, "epsilon": float(self.updater.model.head.epsilon)}

    def _put(self, columns: Mapping[str, NDArray[Any]], lengths: NDArray[np.int64]) -> None:
        if self._priorities is None:
            super()._put(columns, lengths)
        else:
            self._priorities.insert(columns, lengths, self.new_priority)

    def local_state(self) -> StateDict:
        """As of OffPolicyLearner, with the priorities of its transitions and of new ones, which go with its replay."""
        own: StateDict = {"new_priority": self.new_priority}
        if self._priorities is not None:
            own["step_weights"] = torch.from_numpy(self._priorities.weights.copy())
        return {**super().local_state(), **own}

    def load_state(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """As of OffPolicyLearner."""
        super().load_state(shared, local)
        self.new_priority = FIRST_PRIORITY
        if (
            local is None or not self.filled
        ):  # the replay was not restored: what it holds keeps its priorities
            return
        self.new_priority = float(local["new_priority"])
        if self._priorities is not None:
            weights = local.get("step_weights")  # none in states of earlier versions
            self._priorities.load(None if weights is None else weights.numpy())

    def _importance(self) -> float:
        """beta, from importance_exponent to 1 at total_env_steps (Schaul et al. 2016, §3.4)."""
        first = self.spec.importance_exponent
        if not self.total_env_steps:
            return first
        return first + (1.0 - first) * min(1.0, self.env_steps / self.total_env_steps)

    def _set_warm_up(self) -> None:
        """Epsilon: 1 while nothing has been learned, then by the schedule. Noisy layers explore without."""
        head, spec = self.updater.model.head, self.spec
        done = min(1.0, self.env_steps / spec.epsilon_steps)
        epsilon = spec.epsilon_start + done * (spec.epsilon_end - spec.epsilon_start)
        if self.warms_up and self.updater.steps == 0:
            epsilon = 1.0
        head.epsilon.fill_(0.0 if spec.noisy else epsilon)

    def _step(self, seed: int, draw: int) -> Tensor:
        if self._priorities is None:
            return super()._step(seed, draw)
        selection = select(self.replay, self.selector, self._share, seed=seed, draw=draw)
        weights = self._weights(selection).to(self.policy.device)
        measured = self.updater.step(self.batch(selection)._replace(weights=weights))
        self.updater.steps += 1
        priorities = self.updater.priorities.double().cpu().numpy() + LEAST_PRIORITY
        if np.isfinite(priorities).all():  # else the metrics end the run
            # New transitions get the largest priority so far, so that each is likely to be seen once.
            self.new_priority = max(self.new_priority, float(priorities.max()))
            self._priorities.update(selection, priorities)
        return measured

    def _weights(self, selection: Selection) -> Tensor:
        """(N P(i))^-beta for the N transitions of this replay, divided by the largest of the batch of all trainers, (B,)."""
        weights = torch.from_numpy(selection.weights)
        if self.communicator.world_size > 1:
            # The selection's are divided by the largest of its own transitions; trainers' largest differ.
            largest = (self._held() * selection.probabilities.min()) ** -self._importance()
            with timed_collective(self, "all_gather"):
                of_all = self.communicator.all_gather(torch.tensor([largest]))
            weights = weights * float(largest / of_all.max())
        return weights
