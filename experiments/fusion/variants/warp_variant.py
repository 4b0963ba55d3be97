"""Variants warp and warp-gpu: the printed Warp kernel, on one CPU core or on a GPU."""

from __future__ import annotations

import hashlib
import linecache
from typing import Any

import torch
import warp as wp
from torch import Tensor

from experiments.fusion.variants.variant import BenchmarkConfig, BenchmarkState, Counts
from experiments.fusion.variants.warp_source import warp_source
from rayagi.envs.errors import KernelError
from rayagi.envs.fused.draws import seed_word


class WarpStepper:
    """Implements Stepper: one launch for K steps."""

    def __init__(self, work: BenchmarkConfig, device: str = "cpu") -> None:
        """Raises KernelError if Warp cannot compile the kernel."""
        self.work, self._device = work, torch.device(device)
        self._word = wp.uint32(seed_word(work.seed))
        try:
            self._kernel = _kernel(warp_source(work))
            wp.load_module(self._kernel.module, device=device)
        except Exception as error:  # Warp has no exception type of its own for this
            raise KernelError(f"{work.simulator.name} in Warp", str(error)) from error
        self._now = BenchmarkState.first(work, self._device)
        self._arrays = self._views()

    def _views(self) -> list[Any]:
        now, env_state = self._now, self._now.env_state
        tensors = (
            env_state.state,
            env_state.elapsed,
            env_state.episode,
            now.copies,
            now.totals.rewards,
            now.totals.ended,
        )
        return [wp.from_torch(one) for one in tensors]

    def put(self, bench_state: BenchmarkState) -> None:
        """Set the environments' state."""
        self._now.copy_(bench_state)

    def prepare(self, actions: Tensor) -> Any:
        """Actions as a Warp array on the device."""
        return wp.from_torch(actions.to(self._device).contiguous())

    def step(self, prepared: Any) -> None:
        """K steps in one launch."""
        work = self.work
        sizes = [work.steps_per_call, work.copies - 1, work.compute, self._word]
        wp.launch(
            self._kernel, work.num_envs, inputs=[*sizes, prepared, *self._arrays], device=str(self._device)
        )

    def wait(self) -> None:
        """Synchronise with the device."""
        wp.synchronize_device(str(self._device))

    def get(self) -> BenchmarkState:
        """State of the environments."""
        self.wait()
        return self._now.on_host(self.work)

    def counts(self) -> Counts:
        """One launch."""
        return Counts(1, 1)


class WarpVariant:
    """Implements Variant."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.name = "warp" if device == "cpu" else "warp-gpu"

    def missing(self, work: BenchmarkConfig) -> str | None:
        """A reason if there is no CUDA device; Warp itself is installed if this module was imported."""
        return None if wp.is_cuda_available() or self.device == "cpu" else "Warp sees no CUDA device"

    def make(self, work: BenchmarkConfig) -> WarpStepper:
        """Construct the environments. Raises KernelError."""
        reason = self.missing(work)
        if reason:
            raise KernelError(f"{work.simulator.name} in Warp", reason)
        return WarpStepper(work, self.device)


def _kernel(source: str) -> Any:
    """The kernel of a printed module. Warp reads the source through ``linecache``, so there is no file."""
    name = f"rayagi_fused_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"__name__": name}
    exec(compile(source, name, "exec"), scope)
    return scope["simulate"]
