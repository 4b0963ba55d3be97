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
from rayagi.envs.fused.c.source import LANES, source
from rayagi.envs.fused.draws import seed_word
from rayagi.envs.fused.errors import KernelError
from rayagi.envs.fused.forms import Fleet, Setting, Steps, Totals, check_actions
from rayagi.envs.fused.simulator import Choices, Simulator
from rayagi.envs.fused.trace import Traced, trace
from rayagi.native import packed_policy
from rayagi.native.pointers import pointer

FUSED = Kernel(
    name="fused simulators",
    module=__name__,
    reference="rayagi.envs.fused.reference:TorchForm",
    without="engine fused_torch needs no compiler",
)
_STEPS_PER_THREAD = 1 << 14
"""Environment steps that are worth waking a thread for."""


class FleetPointers(ctypes.Structure):
    """Fleet of worlds.h."""

    _fields_ = (
        ("n", ctypes.c_int64),
        ("first", ctypes.c_uint32),
        ("word", ctypes.c_uint32),
        ("limit", ctypes.c_int32),
        ("state", ctypes.c_void_p),
        ("elapsed", ctypes.c_void_p),
        ("episode", ctypes.c_void_p),
    )


class StepsPointers(ctypes.Structure):
    """Steps of worlds.h."""

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
    "Fleet": FleetPointers,
    "Steps": StepsPointers,
    "Rollout": RolloutPointers,
    **packed_policy.MIRRORS,
}


class CForm:
    """Implements Form. Numbers depend on neither the number of threads nor where an environment stands."""

    def __init__(self, setting: Setting, num_threads: int = 1) -> None:
        """Compile and load, unless this was done before.

        Raises:
            SimulatorError: the simulator cannot be traced.
            KernelError: it cannot be compiled here.
        """
        self.setting = setting
        self.traced, self.library = compiled(setting.simulator, setting.real)
        self.fleet = Fleet.allocate(setting.simulator, setting.num_envs, real=setting.real)
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads - 1) if num_threads > 1 else None

    def start(self) -> None:
        """A new episode everywhere."""
        fleet = self.fleet_pointers()
        self.on_threads(1, lambda begin, end: self.library.rayagi_start(fleet, begin, end))

    def observe(self) -> Tensor:
        """(D, N)."""
        obs = torch.empty((self.traced.obs_dim, self.setting.num_envs), dtype=self.setting.real)
        fleet = self.fleet_pointers()
        self.on_threads(1, lambda begin, end: self.library.rayagi_observe(fleet, begin, end, pointer(obs)))
        return obs

    def run(self, actions: Tensor, out: Steps) -> None:
        """K steps in one call of each thread."""
        num_steps = len(out.rewards)
        check_actions(self.setting, actions, num_steps)
        given = actions.contiguous()
        discrete = isinstance(self.setting.simulator.actions, Choices)
        choices, reals = (pointer(given), None) if discrete else (None, pointer(given))
        fleet, steps = self.fleet_pointers(), pointers(StepsPointers, out)
        self.on_threads(
            num_steps,
            lambda begin, end: self.library.rayagi_run(fleet, begin, end, num_steps, choices, reals, steps),
        )

    def wander(self, iteration: int, num_steps: int, out: Totals) -> None:
        """K steps in one call of each thread."""
        fleet, rewards, ended = self.fleet_pointers(), pointer(out.rewards), pointer(out.ended)
        self.on_threads(
            num_steps,
            lambda begin, end: self.library.rayagi_wander(
                fleet, begin, end, num_steps, iteration, rewards, ended
            ),
        )

    def fleet_pointers(self) -> Any:
        """Where the environments are, for a call."""
        setting, fleet = self.setting, self.fleet
        return ctypes.byref(
            FleetPointers(
                setting.num_envs,
                setting.first_env_index & 0xFFFFFFFF,
                seed_word(setting.seed),
                setting.limit,
                *(pointer(part) for part in (fleet.state, fleet.elapsed, fleet.episode)),
            )
        )

    def on_threads(self, num_steps: int, call: Callable[[int, int], Any]) -> list[Any]:
        """Call with (begin, end) of environments, each part on a thread of its own. Returns what the calls returned."""
        n = self.setting.num_envs
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
    library.rayagi_wander.argtypes = (address, i64, i64, i64, u32, address, address)
    library.rayagi_rollout.argtypes = (address, i64, i64, i64, u32, address, address)
    library.rayagi_rollout.restype = library.rayagi_rows.restype = i64
    for name in ("start", "observe", "run", "wander"):
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
