"""FusedRollout: T steps of N environments, including policy inference, in one call of a compiled kernel.

The MLBench'22 paper leaves this to future work (§7): simulation, inference, sampling, reset and storage are fused. A tile of
environments runs all T steps while its state, its activations and the weights are in the cache.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from actors.policy_tensors import PolicyTensors
from actors.rollout import Episodes, Rollout
from rayagi.envs.fused.c.backend import CBackend, RolloutPointers, TimingStruct
from rayagi.envs.fused.simulator import Discrete
from rayagi.native.acting import PackedPolicy
from rayagi.native.binding import pointer
from rayagi.profiler import Category, activity


class FusedRollout:
    """Fills rollouts from the environments of a C backend."""

    def __init__(self, backend: CBackend) -> None:
        self.backend = backend
        self._rows = int(backend.library.rayagi_rows())
        self._finals: tuple[Tensor, Tensor, Tensor] | None = None

    def collect_rollout(
        self, rollout: Rollout, policy: PolicyTensors, iteration: int, running: Tensor
    ) -> Episodes:
        """T steps of every environment. Actions are sampled with noise of ``iteration`` (rollout.h).

        Args:
            rollout: every field except ``log_probs`` and ``running_returns`` is filled; on the host
            policy: on the host
            iteration: counter of the exploration noise
            running: return of each running episode, updated in place and carried to the next rollout   (N,) float64

        Returns:
            the episodes that ended, ordered by step, then by environment.

        Raises:
            ValueError: rollout or policy do not match these environments.
            MemoryError: the activations cannot be allocated.
        """
        backend = self.backend
        num_steps = rollout.num_steps
        final_obs, final_returns, final_lengths = self._final_storage(rollout)
        self._check(rollout, policy)
        packed = PackedPolicy(policy, self._rows, backend.env_config.real)
        discrete = isinstance(backend.env_config.simulator.actions, Discrete)
        out = RolloutPointers(
            *(pointer(getattr(rollout, name)) for name in ("raw_obs", "obs", "outputs")),
            pointer(rollout.actions) if discrete else None,
            None if discrete else pointer(rollout.actions),
            *(pointer(getattr(rollout, name)) for name in ("rewards", "terminated", "truncated", "last_obs")),
            *(pointer(one) for one in (final_obs, running, final_returns, final_lengths)),
        )
        env_state, call = backend.env_state_pointers(), backend.library.rayagi_rollout

        def run(begin: int, end: int) -> int:
            arguments = env_state, begin, end, num_steps, iteration, packed.address, ctypes.byref(out)
            with activity(Category.SIMULATOR, "whole rollout") as whole:
                timing = TimingStruct() if whole.is_recorded else None
                failed: int = call(*arguments, None if timing is None else ctypes.byref(timing))
            if timing is not None:
                # One block at the end in place of thousands: the sums are right, the order within the rollout is not told.
                started = timing.ended_ns - timing.acted_ns
                whole.record_part(started, timing.ended_ns, Category.KERNEL_ACT, "act, all steps")
            return failed

        if any(backend.on_threads(num_steps, run)):
            raise MemoryError(
                f"no memory for the activations of layers {[len(bias) for bias in policy.biases]}"
            )
        steps, ids = rollout.gather_finals(final_obs)
        return Episodes(final_returns[steps, ids].tolist(), final_lengths[steps, ids].tolist())

    def _final_storage(self, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
        """Buffers of final observations, returns and lengths. Uninitialised: pages are written only where episodes end."""
        shape = rollout.rewards.shape
        if self._finals is None or self._finals[1].shape != shape:
            self._finals = (
                torch.empty((*shape, rollout.raw_obs.shape[-1]), dtype=rollout.raw_obs.dtype),
                torch.empty(shape, dtype=torch.float64),
                torch.empty(shape, dtype=torch.int32),
            )
        return self._finals

    def _check(self, rollout: Rollout, policy: PolicyTensors) -> None:
        sizes = [policy.weights[0].shape[1], *(len(bias) for bias in policy.biases)]
        n, d, real = (
            self.backend.env_config.num_envs,
            self.backend.traced.obs_dim,
            self.backend.env_config.real,
        )
        wanted = (rollout.num_envs, rollout.raw_obs.shape[-1], rollout.outputs.shape[-1])
        if (n, d) != wanted[:2] or (sizes[0], sizes[-1]) != wanted[1:]:
            raise ValueError(
                f"the environments are {n} with observations of {d}, the policy maps {sizes[0]} to {sizes[-1]}, and the "
                f"rollout has room for {wanted[0]} with {wanted[1]} and {wanted[2]}"
            )
        types = {rollout.raw_obs.dtype, policy.weights[0].dtype}
        if types != {real}:
            raise ValueError(f"the kernel's reals are {real}, those of rollout and policy {types}")
