"""Environments in a compiled program: K steps of all of them in one call, on threads of this process."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from collectives.compiler import CompilerError
from collectives.kernels import Kernel
from collectives.mirrors import Mirrors
from rayagi.envs.fused.backends import BatchedEnvState, EnvConfig, StepBatch, Totals, check_actions
from rayagi.envs.fused.c.source import LANES, source
from rayagi.envs.fused.draws import seed_word
from rayagi.envs.fused.errors import KernelError
from rayagi.envs.fused.simulator import Discrete, Simulator
from rayagi.envs.fused.trace import Traced, trace
from rayagi.native import packed_policy
from rayagi.native.pointers import pointer

FUSED = Kernel(
    name="fused simulators",
    module=__name__,
    reference="rayagi.envs.fused.reference:TorchBackend",
    without="engine fused_torch needs no compiler",
)
_STEPS_PER_THREAD = 1 << 14
"""Environment steps that are worth waking a thread for."""


class BatchedEnvStatePointers(ctypes.Structure):
    """BatchedEnvState of worlds.h."""

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
    """StepBatch of worlds.h."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("obs", "rewards", "terminated", "truncated", "final_obs")
    )


class RolloutPointers(ctypes.Structure):
    """Rollout of rollout.h."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            "raw_obs", "obs", "outputs", "choices", "reals", "rewards", "terminated", "truncated", "last_obs",
            "final_obs", "running", "final_returns", "final_lengths",
        )
    )  # fmt: skip


MIRRORS: Mirrors = {
    "BatchedEnvState": BatchedEnvStatePointers,
    "StepBatch": StepBatchPointers,
    "Rollout": RolloutPointers,
    **packed_policy.MIRRORS,
}


class CBackend:
    """Implements Form. Numbers depend on neither the number of threads nor where an environment stands."""

    def __init__(self, env_config: EnvConfig, num_threads: int = 1) -> None:
        """Compile and load, unless this was done before.

        Raises:
            SimulatorError: the simulator cannot be traced.
            KernelError: it cannot be compiled here.
        """
        self.env_config = env_config
        self.traced, self.library = compiled(env_config.simulator, env_config.real)
        self.env_state = BatchedEnvState.allocate(
            env_config.simulator, env_config.num_envs, real=env_config.real
        )
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads - 1) if num_threads > 1 else None

    def start(self) -> None:
        """A new episode everywhere."""
        env_state = self.env_state_pointers()
        self.on_threads(1, lambda begin, end: self.library.rayagi_start(env_state, begin, end))

    def observe(self) -> Tensor:
        """(D, N)."""
        obs = torch.empty((self.traced.obs_dim, self.env_config.num_envs), dtype=self.env_config.real)
        env_state = self.env_state_pointers()
        self.on_threads(
            1, lambda begin, end: self.library.rayagi_observe(env_state, begin, end, pointer(obs))
        )
        return obs

    def run(self, actions: Tensor, out: StepBatch) -> None:
        """K steps in one call of each thread."""
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

    def run_random_actions(self, iteration: int, num_steps: int, out: Totals) -> None:
        """K steps in one call of each thread."""
        env_state, rewards, ended = self.env_state_pointers(), pointer(out.rewards), pointer(out.ended)
        self.on_threads(
            num_steps,
            lambda begin, end: self.library.rayagi_run_random_actions(
                env_state, begin, end, num_steps, iteration, rewards, ended
            ),
        )

    def env_state_pointers(self) -> Any:
        """Where the environments are, for a call."""
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
        """Call with (begin, end) of environments, each part on a thread of its own. Returns what the calls returned."""
        n = self.env_config.num_envs
        tiles = -(-n // LANES)
        parts = max(1, min(self.num_threads, tiles, n * num_steps // _STEPS_PER_THREAD))
        borders = [min(n, tiles * part // parts * LANES) for part in range(parts + 1)]
        first, *others = pairwise(borders)
        waiting = [self._pool.submit(call, *span) for span in others] if self._pool is not None else []
        return [call(*first), *(one.result() for one in waiting)]

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        if self._pool is not None:
            self._pool.shutdown()


def compiled(simulator: Simulator, real: torch.dtype) -> tuple[Traced, ctypes.CDLL]:
    """A simulator's trace and its program, loaded."""
    traced = trace(simulator)
    library = load_kernel(FUSED, f"{simulator.name} in C", source(traced, real))
    i64, u32, address = ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p
    library.rayagi_start.argtypes = (address, i64, i64)
    library.rayagi_observe.argtypes = (address, i64, i64, address)
    library.rayagi_run.argtypes = (address, i64, i64, i64, address, address, address)
    library.rayagi_run_random_actions.argtypes = (address, i64, i64, i64, u32, address, address)
    library.rayagi_rollout.argtypes = (address, i64, i64, i64, u32, address, address)
    library.rayagi_rollout.restype = library.rayagi_rows.restype = i64
    for name in ("start", "observe", "run", "run_random_actions"):
        getattr(library, f"rayagi_{name}").restype = None
    return traced, library


def load_kernel(kernel: Kernel, what: str, program: str) -> ctypes.CDLL:
    """A program of these structs, compiled and loaded; ``what`` says what it is.

    Its reference is an engine of its own, which users ask for by name: it is never used unasked.

    Raises:
        KernelError: it cannot be compiled here.
    """
    try:
        return kernel.load(program, mirrors=MIRRORS)
    except CompilerError as error:
        raise KernelError(what, f"{error}; {kernel.without}") from error


def pointers(structure: Any, holder: Any) -> Any:
    """A structure filled with the pointers of an object's tensors of the same names."""
    return ctypes.byref(structure(*(pointer(getattr(holder, name)) for name, _ in structure._fields_)))
