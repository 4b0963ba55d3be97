"""Compilation and loading of a traced task; ctypes structs that point the program at the worlds' tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from collectives.kernels import Kernel
from rayagi.envs.tasks.compiled.source import rows_of, source
from rayagi.envs.tasks.compiled.trace import TracedTask, trace_task
from rayagi.envs.tasks.task import TaskFunctions

RULES = Kernel(
    name="tasks' rules",
    module=__name__,
    reference="rayagi.envs.tasks.vec_env:TaskVecEnv",
    without="{}: on mujoco_cpu its rules run on torch, and steps are slower",
    flags=("-ffp-contract=off",),  # no fused multiply-add: products are rounded before additions, as in torch
)


class _Rows(ctypes.Structure):
    """Mirror of worlds.h's Rows."""

    _fields_ = (("at", ctypes.c_void_p), ("stride", ctypes.c_int64))


@dataclass(frozen=True, slots=True)
class CompiledTask:
    """A compiled task.

    Attributes:
        traced: the traced functions
        library: the loaded shared library; steps.h documents its functions
        structure: ctypes type of ``TaskWorlds``
    """

    traced: TracedTask
    library: Any
    structure: Any

    def worlds(
        self, seed: int, limit: int, counters: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> Any:
        """A ``TaskWorlds`` struct with pointers into these tensors, which the caller keeps alive.

        Args:
            seed: of the random numbers
            limit: maximum steps of an episode
            counters: indices, elapsed and episode, (N,) int64
            rows: tensors by the names of ``rows_of``, (N, ...) float64, each world's values contiguous
        """
        named = {name: _Rows(rows[name].data_ptr(), rows[name].stride(0)) for name in rows_of(self.traced)}
        numbers = {"n": len(counters["indices"]), "seed": seed % 2**64, "limit": limit}
        pointers = {name: tensor.data_ptr() for name, tensor in counters.items()}
        return ctypes.pointer(self.structure(**numbers, **pointers, **named))


def compile_task(rules: TaskFunctions[Any], fields: Mapping[str, Tensor]) -> CompiledTask:
    """Trace and compile a task's functions for worlds with these fields; the compiled library is cached on disk.

    Raises:
        UntraceableError: a function uses something that cannot be compiled.
        CompilerError: no C compiler is found, or compilation fails.
    """
    task = rules.task
    traced = trace_task(rules, fields)
    sizes = {"ACTIONS": task.action_dim, "OBS": task.obs_dim, "TERMS": len(task.reward_terms)}
    structure = _structure(traced)
    library = RULES.load(source(traced, sizes), mirrors={"Rows": _Rows, "TaskWorlds": structure})
    count, address = ctypes.c_int64, ctypes.c_void_p
    library.rayagi_control.argtypes = (address,)
    library.rayagi_after_physics.argtypes = (address,) * 10
    library.rayagi_start.argtypes = (address, address, count, address, address)
    library.rayagi_observe.argtypes = (address, address, count, address)
    library.rayagi_control.restype = library.rayagi_after_physics.restype = count
    library.rayagi_start.restype = library.rayagi_observe.restype = None
    return CompiledTask(traced, library, structure)


def _structure(traced: TracedTask) -> Any:
    """Mirror of worlds.h's ``TaskWorlds`` for this task."""
    fields = [
        ("n", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("limit", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("indices", "elapsed", "episode")),
        *((name, _Rows) for name in rows_of(traced)),
    ]
    return type("TaskWorlds", (ctypes.Structure,), {"_fields_": fields})
