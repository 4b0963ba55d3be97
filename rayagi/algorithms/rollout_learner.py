"""Base classes of the learners: reward scaling, value estimates, advantage normalisation, minibatches, checkpoint state.

One update, in order (``learn``):

1. Draw the minibatch orders of all epochs.
2. Normalise observations; scale rewards with return statistics merged over all trainers.
3. Evaluate V(s_t) and V(s'_t); compute advantages and targets (GAE or V-trace, in the subclass).
4. Normalise advantages over all trainers; step on every minibatch.
5. Merge the observation statistics of this rollout, for the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from actors.protocols import StateDict
from actors.rollout import Rollout, minibatch_orders
from collectives.communicator import Communicator
from rayagi.algorithms.gradient_updater import GradientUpdater, SpecT, timed_collective
from rayagi.algorithms.normalisers import (
    Moments,
    ObservationNormaliser,
    RewardScaler,
    all_merge,
    moments_from_state,
    moments_state,
)
from rayagi.algorithms.returns import explained_variance, gae
from rayagi.config.errors import ConfigError
from rayagi.config.learning import LearningSpec
from rayagi.models.policy import NetworkPolicy
from rayagi.models.recurrent import RolloutMemory, Sequences
from rayagi.native.denormals import flushed_denormals

_IMAGES = 256
"""Observations with images that a network without gradients gets at a time."""
OF_RUNNING_EPISODES = ("running_returns", "waiting")
"""Parts of a learner's local state that mean nothing once the environments have started new episodes."""


class MergedLearner(ABC, Generic[SpecT]):
    """Base of all learners from rollouts: what is merged over trainers, so that all have the same parameters and statistics.

    A trainer is a learner and its communicator. Subclasses add the update (``learn``) and its state.
    """

    def __init__(
        self,
        *,
        policy: NetworkPolicy,
        spec: SpecT,
        communicator: Communicator,
        num_envs: int,
        first_env_index: int,
        total_envs: int,
        seed: int,
        total_env_steps: int | None,
    ) -> None:
        """``num_envs``: environments whose samples this trainer gets; ``total_envs``: those of all trainers together."""
        self.policy, self.spec, self.communicator = policy, spec, communicator
        self.num_envs, self.first_env_index, self.seed = num_envs, first_env_index, seed
        self.total_envs, self.total_env_steps = total_envs, total_env_steps
        self.sync_s = 0.0
        """Seconds in collectives during the last update, including waiting."""
        self.histograms: Mapping[str, Sequence[int]] = {}
        """Of the last update: as of ``IterationResult``."""
        self.notes: tuple[str, ...] = ()
        """The same."""
        self.iteration = 0
        """Number of updates so far."""
        self.env_steps = 0
        """Environment steps of all GMIs so far, for schedules. Counted: a resumed run may have another number of
        environments, and free-running learners drop some (rayagi.algorithms.learning)."""

    def set_envs_of_update(self, num_envs: int, total_envs: int) -> None:
        """Set whose samples the next update gets, of this trainer and of all: a round lacks those of lost collectors."""
        self.total_envs = total_envs

    @abstractmethod
    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Update on the next rollout, and count it. Returns metrics named in the catalogue, ``sync_s`` among them."""

    def _merge(
        self, moments: Moments, statistics: ObservationNormaliser | RewardScaler | None = None
    ) -> Moments:
        """Merge moments over all trainers, and add them to running statistics: all get the same result."""
        if self.communicator.world_size > 1:
            with timed_collective(self, "all_merge"):
                moments = all_merge(moments, self.communicator)
        if statistics is not None:
            statistics.update(moments)
        return moments

    def _merge_observed(self, rollout: Rollout) -> None:
        """Add a rollout's observations to the running statistics, if they are normalised."""
        if self.policy.normaliser is not None:
            batch = self.policy.normaliser.moments_of(rollout.raw_obs).to("cpu")
            self._merge(batch, self.policy.normaliser)

    def _learning_rate_factor(self) -> float:
        """Linear schedule: lr = lr_0 max(0, 1 - steps / total_steps), of the steps before this update."""
        if self.spec.lr_schedule != "linear" or not self.total_env_steps:
            return 1.0
        return max(0.0, 1.0 - self.env_steps / self.total_env_steps)

    def refresh(self) -> None:
        """Take over what other trainers changed since the last update: nothing, where all step alike."""

    def shared_state(self) -> StateDict:
        """State that is equal on all replicas: iteration, environment steps, and observation statistics."""
        state: StateDict = {"iteration": self.iteration, "env_steps": self.env_steps}
        if self.policy.normaliser is not None:
            state["obs_normaliser"] = self.policy.normaliser.state_dict()
        return state

    def local_state(self) -> StateDict:
        """State of this GMI's environments."""
        return {}

    def save_replay(self, folder: Path) -> bool:
        """Write this GMI's replay into a new folder. Returns False where there is none."""
        return False

    def load_state(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Restore a saved state; without ``local``, this GMI's own state is reset."""
        self.iteration, self.env_steps = int(shared["iteration"]), int(shared["env_steps"])
        if self.policy.normaliser is not None:
            self.policy.normaliser.load_state_dict(shared["obs_normaliser"])


class RolloutLearner(MergedLearner[SpecT]):
    """Learns from rollouts; subclasses add the update itself (``_update``). It trains the policy's own model.

    On a GPU slice the networks are on the GPU; rollouts of other GMIs arrive in host memory.
    """

    updater_class: ClassVar[type[GradientUpdater[Any]]]
    """What steps on the losses."""
    updater: GradientUpdater[SpecT]

    def __init__(self, **whose: Any) -> None:
        """Arguments as for MergedLearner.

        Raises:
            ConfigError: a recurrent policy whose sequences the minibatches cannot share equally.
        """
        super().__init__(**whose)
        _refuse_unequal_sequences(self.spec, self.policy, self.num_envs, self.first_env_index)
        self.updater = self._make_updater()
        self.reward_scaler = self._make_scaler() if self.spec.normalize_rewards else None

    def _make_scaler(self, device: torch.device | str = "cpu") -> RewardScaler:
        return RewardScaler(self.num_envs, self.spec.gamma, device=device)

    def _weight_of(self, num_envs: int) -> float:
        # N_i / mean(N): the mean over trainers of weighted losses is the mean over all samples.
        return num_envs * self.communicator.world_size / self.total_envs

    def set_envs_of_update(self, num_envs: int, total_envs: int) -> None:
        """As in the base class; also weights this trainer's samples by their number."""
        super().set_envs_of_update(num_envs, total_envs)
        self.updater.weight = self._weight_of(num_envs)

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Update on the next rollout, then merge its observation statistics. Denormals are flushed to zero meanwhile."""
        self.sync_s = 0.0
        self.updater.begin_update(self._learning_rate_factor())
        with flushed_denormals():
            metrics = self._update(rollout, self._orders(rollout, self.iteration))
            self.env_steps += rollout.num_steps * self.total_envs
            self.sync_s += self.updater.sync_s
            # After the update: every minibatch must see the observations as the acting policy normalised them.
            self._merge_observed(rollout)
        self.iteration += 1
        return {"sync_s": self.sync_s, **metrics}

    def _orders(self, rollout: Rollout, iteration: int) -> Tensor:
        """Flat sample indices of each minibatch, (num_epochs, num_minibatches, minibatch)."""
        return minibatch_orders(
            seed=self.seed,
            first_env_index=self.first_env_index,
            num_envs=rollout.num_envs,
            iteration=iteration,
            num_steps=rollout.num_steps,
            num_epochs=self.spec.num_epochs,
            num_minibatches=self.spec.num_minibatches,
            sequence_length=rollout.sequence_length,
        ).to(self.policy.device)

    def _make_updater(self) -> GradientUpdater[SpecT]:
        """Make what steps on the losses. Collective."""
        model, weight = self.policy.model, self._weight_of(self.num_envs)
        return self.updater_class(model, self.spec, self.communicator, weight=weight)

    @abstractmethod
    def _update(self, rollout: Rollout, orders: Tensor) -> dict[str, float]:
        """Learn from this trainer's samples, of which ``orders`` are the minibatches', as of ``_orders``."""

    def _observed(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Normalised observations of s_t (T * N, obs_dim), and of all states of the rollout.

        All states are s_t, then the last states (N), then the final states: of ended episodes, or of every step if the
        rollout has ``final_obs``. Rollouts of collectors are normalised with this trainer's statistics, which may be newer.
        """
        is_local = rollout.log_probs is None
        obs = rollout.obs if is_local else self.policy.observe(rollout.raw_obs)
        last = self.policy.observe(rollout.last_obs)
        finals = [self.policy.observe(obs) for _, _, obs in rollout.finals]
        if rollout.final_obs is not None:
            finals = [self.policy.observe(rollout.final_obs).flatten(0, 1)]
        everything = torch.cat([obs.flatten(0, 1), last, *finals])
        return everything[: rollout.num_steps * rollout.num_envs], everything

    def _behaviour(self, rollout: Rollout) -> Tensor:
        """Log probability of each action under the behaviour policy, (T * N,)."""
        if rollout.log_probs is not None:
            return rollout.log_probs.flatten().to(self.policy.device)
        return self.policy.model.head.log_prob(rollout.outputs.flatten(0, 1), rollout.actions.flatten(0, 1))

    def _values(self, rollout: Rollout, everything: Tensor) -> tuple[Tensor, Tensor]:
        """V(s_t) and V(s'_t), (T, N) each.

        Where an episode ended, s'_t is its final observation before the reset, so that a truncated episode bootstraps.
        """
        shape = rollout.rewards.shape
        # All states in the order of ``_observed``.
        memory = self._memory(rollout)
        if memory is None:
            found = self._by_parts(self.updater.values, everything)
        else:
            found = self._recurrent_values(rollout, everything, memory.whole())
        values = found[: shape.numel()].view(shape)
        # Within an episode V(s'_t) = V(s_{t+1}); the last row is V of the last states.
        next_values = torch.cat([values[1:], found[shape.numel() : shape.numel() + shape[1]].unsqueeze(0)])
        # Where an episode ended, replace V of the reset state by V of the final state.
        offset = shape.numel() + shape[1]
        if rollout.final_obs is not None:
            done = rollout.terminated | rollout.truncated
            return values, torch.where(done, found[offset:].view(shape), next_values)
        for step, ids, _ in rollout.finals:
            next_values[step, ids.to(found.device)] = found[offset : offset + len(ids)]
            offset += len(ids)
        return values, next_values

    def _by_parts(self, network: Callable[[Tensor], Tensor], observed: Tensor) -> Tensor:
        """A network's results without gradients, (B, ...). Of images some at a time: what is between layers takes memory."""
        if not self.policy.info.obs_parts:
            return network(observed)
        return torch.cat([network(some) for some in observed.split(_IMAGES)])

    def _recurrent_values(self, rollout: Rollout, everything: Tensor, sequences: Sequences) -> Tensor:
        """V of all states of ``_observed`` under a recurrent model, in the same order."""
        model, (steps, count) = self.policy.model, rollout.rewards.shape
        obs, last, *finals = everything.split(
            [steps * count, count, *(len(ids) for _, ids, _ in rollout.finals)]
        )
        unrolled = model.unroll_values(obs.view(steps, count, -1), sequences)
        found = [unrolled.outputs.flatten(), model.step_values(last, unrolled.last)]
        # A final observation continues the episode that ended: its state is the one before the reset.
        for (step, ids, _), final in zip(rollout.finals, finals, strict=True):
            found.append(model.step_values(final, unrolled.ends[step][ids.to(final.device)]))
        return torch.cat(found)

    def _log_probs(self, obs: Tensor, actions: Tensor, memory: RolloutMemory | None) -> Tensor:
        """log pi(a|s) of the current policy, (T * N,).

        From the states that acting left before each sequence, as in the minibatches: their first ratios are one.
        """
        model = self.policy.model
        if memory is None:
            return model.head.log_prob(self._by_parts(model.outputs, obs), actions)
        order = memory.order()
        ordered = model.head.log_prob(model.outputs(obs[order], memory.of(order)), actions[order])
        return torch.empty_like(ordered).index_copy(0, order, ordered)

    def _memory(self, rollout: Rollout) -> RolloutMemory | None:
        """The states that a recurrent policy had in this rollout."""
        if rollout.states is None:
            return None
        device = self.policy.device
        done = (rollout.terminated | rollout.truncated).to(device)
        return RolloutMemory(rollout.states.to(device), done)

    def _outcomes(self, rollout: Rollout) -> dict[str, Tensor]:
        """On the policy's device, (T, N) each: ``rewards`` (scaled if ``normalize_rewards``), ``terminated``, and ``done``,
        which is terminated or truncated."""
        device = self.policy.device
        return {
            "rewards": self._scaled_rewards(rollout),
            "terminated": rollout.terminated.to(device),
            "done": (rollout.terminated | rollout.truncated).to(device),
        }

    def _scaled_rewards(self, rollout: Rollout) -> Tensor:
        """Rewards (T, N) on the policy's device, scaled if ``normalize_rewards``."""
        rewards = rollout.rewards
        if self.reward_scaler is not None:
            # Moments of the running discounted returns: computed here, or from the returns that the collector sent.
            if rollout.running_returns is None:
                batch = self.reward_scaler.observe(rewards, rollout.terminated | rollout.truncated)
            else:
                batch = Moments.from_batch(rollout.running_returns.reshape(-1))
            self._merge(batch, self.reward_scaler)
            rewards = self.reward_scaler(rewards)
        return rewards.to(self.policy.device)

    def _normalised(self, advantages: Tensor) -> Tensor:
        """Advantages with mean 0 and standard deviation 1 over all trainers, if ``normalize_advantages``."""
        if not self.spec.normalize_advantages:
            return advantages
        own = Moments.from_batch(advantages.reshape(-1))
        alone = (
            self.communicator.world_size == 1
        )  # then the moments stay on the device, without synchronization
        moments = self._merge(own if alone else own.to("cpu"))
        # (A - mean(A)) / (std(A) + eps).
        return (advantages - moments.mean) / (moments.variance().sqrt() + 1e-8)

    def shared_state(self) -> StateDict:
        """Updater state, iteration, environment steps, observation and return statistics."""
        state: StateDict = {"learner": self.updater.state_dict(), **super().shared_state()}
        if self.reward_scaler is not None:
            state["reward_moments"] = moments_state(self.reward_scaler.moments.to("cpu").clone())
        return state

    def local_state(self) -> StateDict:
        """Discounted returns of the running episodes."""
        return (
            {}
            if self.reward_scaler is None
            else {"running_returns": self.reward_scaler.running.cpu().clone()}
        )

    def load_state(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Restore a saved state."""
        super().load_state(shared, local)
        self.updater.load_state_dict(shared["learner"])
        if self.reward_scaler is not None:
            moments = moments_from_state(shared["reward_moments"])
            self.reward_scaler.load(moments, None if local is None else local.get("running_returns"))


def _refuse_unequal_sequences(
    spec: LearningSpec, policy: NetworkPolicy, num_envs: int, first_env_index: int
) -> None:
    if not policy.state_dim:
        return
    group = spec.envs_per_shuffle
    if num_envs % group or first_env_index % group:
        raise ConfigError(
            "num_minibatches",
            spec.num_minibatches,
            f"cannot share the sequences of a GMI's {num_envs} environments, from number {first_env_index}, equally",
            f"give every GMI a multiple of {group} environments, or use a shorter sequence_length",
        )


@dataclass(slots=True)
class OnPolicyBatch:
    """Training samples of one rollout, flattened over time and environments: B = T * N.

    Attributes:
        obs: normalised observations                        (B, obs_dim)
        actions: actions taken                              (B, dim) or (B,)
        log_probs: log pi_old(a|s)                          (B,)
        values: V_old(s)                                    (B,)
        advantages: normalised if ``normalize_advantages``  (B,)
        targets: value targets                              (B,)
        memory: states of a recurrent policy; None: samples are independent
    """

    obs: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    targets: Tensor
    memory: RolloutMemory | None = None

    def sequences(self, order: Tensor) -> Sequences | None:
        """How the samples in ``order`` form sequences; None if they are independent."""
        return None if self.memory is None else self.memory.of(order)

    def fields(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of declaration."""
        return self.obs, self.actions, self.log_probs, self.values, self.advantages, self.targets


class OnPolicyUpdater(GradientUpdater[SpecT]):
    """Steps the networks on a batch."""

    @abstractmethod
    def update(self, batch: OnPolicyBatch, orders: Tensor, iteration: int) -> dict[str, float]:
        """Run all epochs over one rollout.

        Args:
            batch: this GMI's samples
            orders: flat sample indices of each minibatch, (num_epochs, num_minibatches, minibatch)
            iteration: number of this iteration, from 1; for error messages

        Returns:
            Metrics named in rayagi.monitoring.catalogue, averaged over minibatches.

        Raises:
            NonFiniteError: a loss or gradient became NaN or infinite; the parameters must not be saved.
        """


class OnPolicyLearner(RolloutLearner[SpecT]):
    """Base of algorithms that learn from rollouts of the current policy."""

    updater: OnPolicyUpdater[SpecT]

    def _update(self, rollout: Rollout, orders: Tensor) -> dict[str, float]:
        batch, fit = self.prepare(rollout)
        metrics = self.updater.update(batch, orders, self.iteration + 1)
        return {**metrics, "explained_variance": float(fit)}

    @torch.no_grad()
    def prepare(self, rollout: Rollout) -> tuple[OnPolicyBatch, Tensor]:
        """The batch of a rollout, and the explained variance of its value estimates, ()."""
        # Steps 2 and 3 of the module: normalised observations of all states, V of all of them, GAE.
        obs, everything = self._observed(rollout)
        values, next_values = self._values(rollout, everything)
        advantages, targets = gae(
            values=values,
            next_values=next_values,
            **self._outcomes(rollout),
            gamma=self.spec.gamma,
            gae_lambda=self.spec.gae_lambda,
        )
        return (
            OnPolicyBatch(
                obs=obs,
                actions=rollout.actions.flatten(0, 1).to(obs.device),
                log_probs=self._behaviour(rollout),
                values=values.reshape(-1),
                advantages=self._normalised(advantages).reshape(-1),
                targets=targets.reshape(-1),
                memory=self._memory(rollout),
            ),
            explained_variance(values, targets),
        )
