"""A3C's update: a step on parameters that all GMIs share, from gradients of a copy (Mnih et al. 2016, algorithm S3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actors.protocols import StateDict
from actors.rollout import Rollout
from collectives.shared_tensors import SharedTensors
from rayagi.algorithms.a3c import A3CSpec
from rayagi.algorithms.normalisers import Moments, ObservationNormaliser, RewardScaler
from rayagi.algorithms.one_pass import OnePassUpdater, RMSProp
from rayagi.algorithms.rollout_learner import OnPolicyLearner
from rayagi.native.learning import ThreadPool


class A3CUpdater(OnePassUpdater[A3CSpec]):
    """Steps the shared parameters; the model is this GMI's copy of them.

    Steps of several GMIs may interleave, as in the paper (Hogwild): no lock, and an element's step may be lost. On a GPU
    slice the copy is on the GPU, and the shared parameters stay in host memory.
    """

    shared: SharedTensors

    def _make_optimiser(self) -> RMSProp:
        count = len(self.flat.gradients)
        floats = (count, torch.float32)
        self.shared = SharedTensors(self.communicator, {"parameters": floats, "square_avg": floats})
        return RMSProp(
            self.shared["parameters"],
            self.flat.gradients,
            self.shared["square_avg"],
            decay=self.spec.rms_decay,
            eps=self.spec.rms_eps,
        )

    def apply_gradients(self, pool: ThreadPool | None = None) -> Tensor:
        """One step on the shared parameters. Returns this GMI's gradient norm before clipping, ()."""
        norm = self.flat.norm()
        if norm.isfinite():  # else ``end_update`` raises: the others' parameters must not be spoiled
            self.flat.clip(norm, self.spec.max_grad_norm)
            self.optimiser.step()
        return norm

    def publish(self) -> None:
        """Overwrite the shared parameters with the model's. Every GMI does it, with the same ones."""
        self.shared["parameters"].copy_(self.flat.parameters.detach())

    def copy_shared(self) -> None:
        """Overwrite the model's parameters with the shared ones."""
        self.flat.parameters.data.copy_(self.shared["parameters"])


class A3CLearner(OnPolicyLearner[A3CSpec]):
    """The learner of A3C. Its GMIs share parameters, RMSProp's state and statistics; none waits."""

    updater_class = A3CUpdater
    updater: A3CUpdater

    def __init__(self, **whose: Any) -> None:
        """Collective; arguments as for RolloutLearner.

        Raises:
            ChannelError: the GMIs are on several hosts, or there is not enough memory.
        """
        super().__init__(**whose)
        kept = {"observations": self.policy.normaliser, "returns": self.reward_scaler}
        self._statistics = {name: each for name, each in kept.items() if each is not None}
        self.updater.publish()
        sizes = {name: (len(each.moments.packed()), torch.float64) for name, each in self._statistics.items()}
        self._shared = SharedTensors(self.communicator, {**sizes, "updates": (1, torch.int64)})
        self._copied_at = 0
        """Number of updates, of all GMIs, when this one copied the parameters."""

    def _weight_of(self, num_envs: int) -> float:
        return 1.0  # no mean over trainers: each steps on its own samples

    def refresh(self) -> None:
        """Copy the shared parameters and statistics."""
        self.updater.copy_shared()
        with self._shared.lock():
            self._copied_at = int(self._shared["updates"])
            for name, statistics in self._statistics.items():
                statistics.set_moments(
                    Moments.unpacked(self._shared[name].clone(), statistics.moments.mean.shape)
                )

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Step the shared parameters on this GMI's rollout. ``policy_lag_*``: updates since the parameters were copied."""
        metrics = super().learn(rollout)
        with self._shared.lock():
            lag = float(self._shared["updates"] - self._copied_at)
            self._shared["updates"].add_(1)
        return {**metrics, "policy_lag_mean": lag, "policy_lag_max": lag}

    def _merge(
        self, moments: Moments, statistics: ObservationNormaliser | RewardScaler | None = None
    ) -> Moments:
        """Its own samples', added to the shared statistics: no GMI waits for another."""
        if statistics is not None:
            name = "observations" if statistics is self.policy.normaliser else "returns"
            with self._shared.lock():
                statistics.set_moments(
                    Moments.unpacked(self._shared[name].clone(), statistics.moments.mean.shape)
                )
                statistics.update(moments)
                self._shared[name].copy_(statistics.moments.packed())
        return moments

    def shared_state(self) -> StateDict:
        """The shared parameters, RMSProp's state and statistics, and this GMI's count of environment steps."""
        self.refresh()
        return super().shared_state()

    def load_state(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Restore a saved state: every GMI writes the same shared part."""
        super().load_state(shared, local)
        self.updater.publish()
        with self._shared.lock():
            for name, statistics in self._statistics.items():
                self._shared[name].copy_(statistics.moments.packed())
