"""PPO's update as one CUDA graph: its minibatch steps, or all of it where rollouts are made on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from actors.rollout import Rollout
from rayagi.algorithms.device_rollouts import minibatch_orders
from rayagi.algorithms.gradient_updater import FlatAdam, GradientUpdater
from rayagi.algorithms.graphs import Replay
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.ppo.learner import PPOLearner
from rayagi.algorithms.rollout_learner import OnPolicyBatch


class CapturedStepsPPOLearner(PPOLearner):
    """PPOLearner for a single trainer, whose minibatch steps of all epochs are one graph.

    Values and advantages are computed before it: how many episodes ended on the host differs between rollouts. On a CPU the
    same steps run eagerly, for tests.
    """

    def __init__(self, **whose: Any) -> None:
        super().__init__(**whose)
        assert self.communicator.world_size == 1
        device = self.policy.device
        steps = self.spec.num_epochs * self.spec.num_minibatches
        self._measured = torch.zeros((steps, len(self.updater.measured)), device=device)
        self._order = torch.zeros(0, dtype=torch.int64, device=device)
        self._batch: OnPolicyBatch | None = None
        self._replay = Replay(self.run, device, save=self._copy, undo=self._put_back)

    def _make_updater(self) -> GradientUpdater[PPOSpec]:
        updater = super()._make_updater()
        if self.policy.device.type == "cuda":
            _adam_of(updater).make_capturable()
        return updater

    def _update(self, rollout: Rollout, orders: Tensor) -> dict[str, float]:
        batch, fit = self.prepare(rollout)
        if self._batch is None:
            self._batch = deepcopy(batch)
        for kept, field in zip(self._batch.fields(), batch.fields(), strict=True):
            kept.copy_(field)
        return self._replayed(orders, fit)

    def _replayed(self, orders: Tensor, fit: Tensor) -> dict[str, float]:
        """Replay the graph with these orders; its metrics, and ``fit``, the explained variance, which it may write."""
        if not len(self._order):
            self._order = orders.clone()
        self._order.copy_(orders)
        self._replay()
        metrics = self.updater.end_update(
            self._measured.unbind(0),
            last_epoch=orders.shape[1],
            iteration=self.iteration + 1,
            what="PPO update",
        )
        return {**metrics, "explained_variance": float(fit)}

    def run(self) -> None:
        """The captured body: every minibatch step of all epochs."""
        assert self._batch is not None
        self._steps(self._batch)

    def _steps(self, batch: OnPolicyBatch) -> None:
        for row, order in zip(self._measured, self._order.flatten(0, 1), strict=True):
            row.copy_(self.updater.minibatch_step(batch, order))

    def _held(self) -> list[Tensor]:
        """Tensors that ``run`` reads and changes: parameters and Adam's moments."""
        return [self.updater.flat.parameters, *_adam_of(self.updater).tensors().values()]

    def _copy(self) -> list[Tensor]:
        return [held.detach().clone() for held in self._held()]

    @torch.no_grad()
    def _put_back(self, saved: Sequence[Tensor]) -> None:
        for held, value in zip(self._held(), saved, strict=True):
            held.copy_(value)


class CapturedPPOLearner(CapturedStepsPPOLearner):
    """The whole update as one graph, on the rollout buffer of ``DeviceRollouts``, which is the same in every iteration.

    Minibatch orders are drawn on the device; reward and advantage statistics stay there. Observation statistics change
    between rollouts, as in PPOLearner.
    """

    def __init__(self, **whose: Any) -> None:
        super().__init__(**whose)
        device = self.policy.device
        if self.reward_scaler is not None:
            self.reward_scaler = self._make_scaler(device)
        self._envs = torch.arange(self.first_env_index, self.first_env_index + self.num_envs, device=device)
        self._fit = torch.zeros((), device=device)
        self._rollout: Rollout | None = None

    def _orders(self, rollout: Rollout, iteration: int) -> Tensor:
        at = torch.full((), iteration, dtype=torch.int64, device=self.policy.device)
        spec = self.spec
        return minibatch_orders(
            self.seed, self._envs, at, rollout.num_steps, spec.num_epochs, spec.num_minibatches
        )

    def _update(self, rollout: Rollout, orders: Tensor) -> dict[str, float]:
        if self._rollout is None:
            self._rollout = rollout
        assert rollout is self._rollout
        return self._replayed(orders, self._fit)

    def run(self) -> None:
        """The captured body: values, advantages, then every minibatch step of all epochs."""
        assert self._rollout is not None
        batch, fit = self.prepare(self._rollout)
        self._fit.copy_(fit)
        self._steps(batch)

    def _held(self) -> list[Tensor]:
        """Parameters, Adam's moments, and return statistics."""
        held = super()._held()
        if self.reward_scaler is not None:
            moments = self.reward_scaler.moments
            held += [self.reward_scaler.running, moments.count, moments.mean, moments.m2]
        return held


def _adam_of(updater: GradientUpdater[PPOSpec]) -> FlatAdam:
    """The optimiser of PPO."""
    assert isinstance(updater.optimiser, FlatAdam)
    return updater.optimiser
