"""Variant cuda: the printed CUDA kernel on a GPU, compiled at run time."""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.fusion.variants.cuda_source import cuda_source
from experiments.fusion.variants.variant import BenchmarkConfig, BenchmarkState, Counts
from rayagi.envs.errors import KernelError
from rayagi.envs.fused.draws import seed_word

THREADS = 128
"""Threads per block."""


class CudaStepper:
    """Implements Stepper: one launch for K steps."""

    def __init__(self, work: BenchmarkConfig) -> None:
        self.work, self._device = work, torch.device("cuda")
        self._word = seed_word(work.seed)
        try:
            # NVRTC, which torch brings along; torch marks it as internal.
            self._kernel = torch.cuda._compile_kernel(cuda_source(work), "simulate")
        except RuntimeError as error:
            raise KernelError(f"{work.simulator.name} in CUDA", str(error)) from error
        self._now = BenchmarkState.first(work, self._device)

    def put(self, bench_state: BenchmarkState) -> None:
        """Set the environments' state."""
        self._now.copy_(bench_state)

    def prepare(self, actions: Tensor) -> Tensor:
        """Actions on the device."""
        return actions.to(self._device).contiguous()

    def step(self, prepared: Tensor) -> None:
        """K steps in one launch."""
        work, now, env_state = self.work, self._now, self._now.env_state
        blocks = -(-work.num_envs // THREADS)
        sizes = [work.num_envs, work.steps_per_call, work.copies - 1, work.compute, self._word]
        tensors = [prepared, env_state.state, env_state.elapsed, env_state.episode, now.copies]
        totals = [now.totals.rewards, now.totals.ended]
        self._kernel(grid=(blocks, 1, 1), block=(THREADS, 1, 1), args=[*sizes, *tensors, *totals])

    def wait(self) -> None:
        """Synchronise with the device."""
        torch.cuda.synchronize(self._device)

    def get(self) -> BenchmarkState:
        """State of the environments."""
        return self._now.on_host(self.work)

    def counts(self) -> Counts:
        """One launch."""
        return Counts(1, 1)


class CudaVariant:
    """Implements Variant."""

    name = "cuda"

    def missing(self, work: BenchmarkConfig) -> str | None:
        """A reason if there is no GPU."""
        return None if torch.cuda.is_available() else "there is no CUDA device"

    def make(self, work: BenchmarkConfig) -> CudaStepper:
        """Construct the environments. Raises KernelError."""
        reason = self.missing(work)
        if reason:
            raise KernelError(f"{work.simulator.name} in CUDA", reason)
        return CudaStepper(work)
