"""Variant envpool: EnvPool's C++ environments on a thread pool."""

from __future__ import annotations

from typing import Any

import envpool
import numpy as np
from torch import Tensor

from experiments.fusion.variants.gymnasium_variants import GYMNASIUM_IDS
from experiments.fusion.variants.variant import BenchmarkConfig, BenchmarkState, Counts, knobs_unknown
from rayagi.envs.errors import KernelError
from rayagi.envs.fused.simulator import Discrete


class EnvPoolStepper:
    """Implements Stepper except ``put``, since EnvPool's state cannot be set. Like Gymnasium's vector environment it resets
    an ended environment in the next step.
    """

    def __init__(self, work: BenchmarkConfig) -> None:
        self.work = work
        self._pool: Any = envpool.make(
            GYMNASIUM_IDS[work.simulator.name],
            env_type="gymnasium",
            num_envs=work.num_envs,
            num_threads=work.num_threads,
            seed=work.seed,
        )
        self.obs, _ = self._pool.reset()
        self._last = BenchmarkState.allocate(work)
        self._last.env_state.episode.zero_()

    def put(self, bench_state: BenchmarkState) -> None:
        """Raises KernelError."""
        raise KernelError("EnvPool", "the state of its environments cannot be set")

    def prepare(self, actions: Tensor) -> list[Any]:
        """One array per step."""
        if isinstance(self.work.simulator.actions, Discrete):
            return list(actions.numpy().astype(np.int64))
        return list(np.ascontiguousarray(actions.movedim(1, -1).numpy()))

    def step(self, prepared: list[Any]) -> None:
        """K steps."""
        totals = self._last.totals
        rewards, ended = totals.rewards.zero_().numpy(), totals.ended.zero_().numpy()
        for actions in prepared:
            self.obs, reward, terminated, truncated, _ = self._pool.step(actions)
            rewards += reward
            ended += terminated | truncated

    def wait(self) -> None:
        """``step`` is synchronous."""

    def get(self) -> BenchmarkState:
        """Rewards and ended episodes only; EnvPool does not expose states."""
        return self._last.on_host(self.work)

    def counts(self) -> Counts:
        """One call per step."""
        return Counts(self.work.steps_per_call, 0)


class EnvPoolVariant:
    """Implements Variant."""

    name = "envpool"

    def missing(self, work: BenchmarkConfig) -> str | None:
        """A reason if EnvPool lacks the simulator; it has those of Gymnasium."""
        if work.simulator.name not in GYMNASIUM_IDS:
            return f"EnvPool has no {work.simulator.name}"
        return knobs_unknown(work)

    def make(self, work: BenchmarkConfig) -> EnvPoolStepper:
        """Construct the environments. Raises KernelError."""
        reason = self.missing(work)
        if reason:
            raise KernelError(f"{work.simulator.name} in EnvPool", reason)
        return EnvPoolStepper(work)
