"""VecEnv and RolloutEnv of fused simulators: one step at a time, or whole rollouts in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actors.policy_tensors import PolicyTensors
from actors.protocols import EnvInfo, StateDict, StepResult
from actors.rollout import Episodes, Rollout
from rayagi.envs.fused.backends import BatchedEnvState, EnvConfig, FusedBackend, StepBatch
from rayagi.envs.fused.c.backend import CBackend, RolloutPointers, TimingStruct
from rayagi.envs.fused.simulator import Discrete
from rayagi.envs.lifetime import ClosableEnv, while_open
from rayagi.envs.providers import check_num_envs, refuse_nonfinite
from rayagi.native.acting import PackedPolicy
from rayagi.native.binding import pointer
from rayagi.profiler import Category, activity


class BackendVecEnv(ClosableEnv):
    """Implements VecEnv for any backend on the host. Actions are clipped to the box."""

    resumes_episodes = True

    def __init__(self, info: EnvInfo, env_config: EnvConfig, backend: FusedBackend) -> None:
        super().__init__()
        self.info, self.num_envs = info, env_config.num_envs
        self._env_config, self._backend = env_config, backend
        self._out = StepBatch.allocate(1, env_config.num_envs, info.obs_dim)

    @while_open
    def reset(self) -> Tensor:
        """Start a new episode everywhere. Returns (N, obs_dim) float32."""
        self._backend.start()
        return self._rows(self._backend.observe())

    @while_open
    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment.

        Raises:
            SimulationError: an action is not finite, or what the simulator makes of it.
        """
        first, steps = self._env_config.first_env_index, self._backend.env_state.elapsed + 1
        continuous = self.info.action.kind == "continuous"
        given = actions.detach().to("cpu", torch.float32 if continuous else torch.int64)
        if continuous:
            refuse_nonfinite(given, "the action", first, steps)
        out = self._out
        self._backend.run(given.unsqueeze(0), out)
        ids = (out.terminated[0] | out.truncated[0]).nonzero().flatten()
        obs = self._rows(out.obs[0])
        refuse_nonfinite(obs, "an observation", first, steps)
        refuse_nonfinite(out.rewards[0], "the reward", first, steps)
        return StepResult(
            obs=obs,
            rewards=out.rewards[0].clone(),
            terminated=out.terminated[0].clone(),
            truncated=out.truncated[0].clone(),
            final_ids=ids,
            final_obs=self._rows(out.final_obs[0][:, ids]),
        )

    @while_open
    def state_dict(self) -> StateDict:
        """State, elapsed steps and number of every running episode."""
        env_state = self._backend.env_state
        return {
            "state": env_state.state.clone(),
            "elapsed": env_state.elapsed.clone(),
            "episode": env_state.episode.clone(),
        }

    @while_open
    def load_state_dict(self, state: Mapping[str, Any]) -> Tensor:
        """Continue the saved episodes of as many environments."""
        check_num_envs(self.info.env_id, len(state["elapsed"]), self.num_envs)
        self._backend.env_state.copy_(BatchedEnvState(state["state"], state["elapsed"], state["episode"]))
        return self._rows(self._backend.observe())

    def _release(self) -> None:
        """Nothing: the backend's memory ends with this object."""

    @staticmethod
    def _rows(columns: Tensor) -> Tensor:
        """(N, D) of (D, N), in memory of its own: the transpose of a single environment would be a view."""
        return columns.t().clone(memory_format=torch.contiguous_format)


class FusedRollout:
    """Fills rollouts from the environments of a C backend, policy inference included, in one call of a compiled kernel.

    The MLBench'22 paper leaves this to future work (§7): simulation, inference, sampling, reset and storage are fused. A
    tile of environments runs all T steps while its state, its activations and the weights are in the cache.
    """

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
                # One block at the end in place of thousands: the sums are right, not the order within the rollout.
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


class FusedVecEnv(BackendVecEnv):
    """Implements RolloutEnv: the C backend, whose kernel also runs the policy."""

    _backend: CBackend

    def __init__(self, info: EnvInfo, env_config: EnvConfig, num_threads: int) -> None:
        super().__init__(info, env_config, CBackend(env_config, num_threads))
        self._rollout = FusedRollout(self._backend)

    @while_open
    def collect_rollout(
        self, rollout: Rollout, policy: PolicyTensors, iteration: int, running: Tensor
    ) -> Episodes:
        """T steps in one call: see RolloutEnv."""
        return self._rollout.collect_rollout(rollout, policy, iteration, running)

    def _release(self) -> None:
        self._backend.close()
