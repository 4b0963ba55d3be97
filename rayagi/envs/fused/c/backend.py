"""C backend: K steps of N environments per call of a compiled library, on threads of this process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from collectives.compiler import CompilerError
from collectives.kernels import Kernel
from collectives.mirrors import Mirrors
from rayagi.envs.errors import KernelError
from rayagi.envs.fused.backends import BatchedEnvState, EnvConfig, StepBatch, check_actions
from rayagi.envs.fused.c.source import LANES, source
from rayagi.envs.fused.draws import seed_word
from rayagi.envs.fused.simulator import Discrete, Simulator
from rayagi.envs.fused.trace import Traced, trace
from rayagi.envs.lifetime import ThreadOwner
from rayagi.native import acting
from rayagi.native.binding import pointer

FUSED = Kernel(
    name="fused simulators",
    module=__name__,
    reference="rayagi.envs.fused.reference:TorchBackend",
    without="engine fused_torch needs no compiler",
)
_STEPS_PER_THREAD = 1 << 14
"""Minimum environment steps per thread."""


class BatchedEnvStatePointers(ctypes.Structure):
    """Mirror of worlds.h's BatchedEnvState."""

    _fields_ = (
        ("n", ctypes.c_int64),
        ("first", ctypes.c_uint32),
        ("word", ctypes.c_uint32),
        ("limit", ctypes.c_int32),
        ("state", ctypes.c_void_p),
        ("elapsed", ctypes.c_void_p),
        ("episode", ctypes.c_void_p),
    )


class StepBatchPointers(ctypes.Structure):
    """Mirror of worlds.h's StepBatch."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("obs", "rewards", "terminated", "truncated", "final_obs")
    )


class RolloutPointers(ctypes.Structure):
    """Mirror of rollout.h's Rollout."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            "raw_obs", "obs", "outputs", "choices", "reals", "rewards", "terminated", "truncated", "last_obs",
            "final_obs", "running", "final_returns", "final_lengths",
        )
    )  # fmt: skip


class TimingStruct(ctypes.Structure):
    """Mirror of rollout.h's Timing."""

    _fields_ = (("acted_ns", ctypes.c_int64), ("ended_ns", ctypes.c_int64))


MIRRORS: Mirrors = {
    "Timing": TimingStruct,
    "BatchedEnvState": BatchedEnvStatePointers,
    "StepBatch": StepBatchPointers,
    "Rollout": RolloutPointers,
    **acting.POLICY_MIRRORS,
}


class CBackend:
    """Implements FusedBackend. Results do not depend on the number of threads or an environment's position."""

    def __init__(self, env_config: EnvConfig, num_threads: int = 1) -> None:
        """Compile and load the library (cached on disk) and allocate the environments.

        Raises:
            SimulatorError: the simulator cannot be traced.
            KernelError: it cannot be compiled on this machine.
        """
        self.env_config = env_config
        self.traced, self.library = compiled(env_config.simulator, env_config.real)
        self.env_state = BatchedEnvState.allocate(
            env_config.simulator, env_config.num_envs, real=env_config.real
        )
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads - 1) if num_threads > 1 else None
        self._owner = ThreadOwner(num_threads)

    def start(self) -> None:
        """Start a new episode in every environment."""
        env_state = self.env_state_pointers()
        self.on_threads(1, lambda begin, end: self.library.rayagi_start(env_state, begin, end))

    def observe(self) -> Tensor:
        """Observations (D, N)."""
        obs = torch.empty((self.traced.obs_dim, self.env_config.num_envs), dtype=self.env_config.real)
        env_state = self.env_state_pointers()
        self.on_threads(
            1, lambda begin, end: self.library.rayagi_observe(env_state, begin, end, pointer(obs))
        )
        return obs

    def run(self, actions: Tensor, out: StepBatch) -> None:
        """K steps in one library call per thread."""
        num_steps = len(out.rewards)
        check_actions(self.env_config, actions, num_steps)
        given = actions.contiguous()
        discrete = isinstance(self.env_config.simulator.actions, Discrete)
        choices, reals = (pointer(given), None) if discrete else (None, pointer(given))
        env_state, steps = self.env_state_pointers(), pointers(StepBatchPointers, out)
        self.on_threads(
            num_steps,
            lambda begin, end: self.library.rayagi_run(
                env_state, begin, end, num_steps, choices, reals, steps
            ),
        )

    def env_state_pointers(self) -> Any:
        """Pointer to a BatchedEnvState struct for a library call."""
        env_config, env_state = self.env_config, self.env_state
        return ctypes.byref(
            BatchedEnvStatePointers(
                env_config.num_envs,
                env_config.first_env_index & 0xFFFFFFFF,
                seed_word(env_config.seed),
                env_config.limit,
                *(pointer(part) for part in (env_state.state, env_state.elapsed, env_state.episode)),
            )
        )

    def on_threads(self, num_steps: int, call: Callable[[int, int], Any]) -> list[Any]:
        """Split the environments into ranges of whole tiles; ``call(begin, end)`` on a thread each. Returns the results."""
        self._owner.check()
        n = self.env_config.num_envs
        tiles = -(-n // LANES)
        parts = max(1, min(self.num_threads, tiles, n * num_steps // _STEPS_PER_THREAD))
        bounds = [min(n, tiles * part // parts * LANES) for part in range(parts + 1)]
        first, *others = pairwise(bounds)
        futures = list[Future[Any]]()
        try:
            if self._pool is not None:
                for span in others:
                    futures.append(self._pool.submit(call, *span))
            result = call(*first)
        finally:
            for future in futures:
                future.exception()  # also after Ctrl-C: the tensors must live until all threads have ended
        return [result, *(future.result() for future in futures)]

    def close(self) -> None:
        """Stop the threads. Safe to call twice."""
        if self._pool is not None:
            self._pool.shutdown()


def compiled(simulator: Simulator, real: torch.dtype) -> tuple[Traced, ctypes.CDLL]:
    """Trace a simulator, and compile and load its library."""
    traced = trace(simulator)
    library = load_kernel(FUSED, f"{simulator.name} in C", source(traced, real))
    i64, u32, address = ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p
    library.rayagi_start.argtypes = (address, i64, i64)
    library.rayagi_observe.argtypes = (address, i64, i64, address)
    library.rayagi_run.argtypes = (address, i64, i64, i64, address, address, address)
    library.rayagi_rollout.argtypes = (address, i64, i64, i64, u32, address, address, address)
    library.rayagi_rollout.restype = library.rayagi_rows.restype = i64
    for name in ("start", "observe", "run"):
        getattr(library, f"rayagi_{name}").restype = None
    return traced, library


def load_kernel(kernel: Kernel, what: str, program: str) -> ctypes.CDLL:
    """Compile and load a program that uses these structs; ``what`` names it in error messages.

    There is no automatic fallback: the reference is an engine of its own, fused_torch.

    Raises:
        KernelError: it cannot be compiled on this machine.
    """
    try:
        return kernel.load(program, mirrors=MIRRORS)
    except CompilerError as error:
        raise KernelError(what, f"{error}; {kernel.without}") from error


def pointers(structure: Any, holder: Any) -> Any:
    """A struct filled with the addresses of an object's tensors of the same names."""
    return ctypes.byref(structure(*(pointer(getattr(holder, name)) for name, _ in structure._fields_)))
