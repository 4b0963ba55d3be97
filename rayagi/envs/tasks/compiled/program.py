"""A task's compiled rules, and where they find worlds."""

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
    flags=("-ffp-contract=off",),  # rounds as torch does: a product before it is added to
)


class _Rows(ctypes.Structure):
    """Rows of worlds.h."""

    _fields_ = (("at", ctypes.c_void_p), ("stride", ctypes.c_int64))


@dataclass(frozen=True, slots=True)
class Program:
    """Attributes: the rules' graphs, and the library's functions, which steps.h describes."""

    traced: TracedTask
    library: Any
    structure: Any

    def worlds(
        self, seed: int, limit: int, counters: Mapping[str, Tensor], rows: Mapping[str, Tensor]
    ) -> Any:
        """The structure that the functions take: pointers into these tensors, which must stay alive.

        Args:
            seed: of the random numbers
            limit: steps of an episode
            counters: indices, elapsed and episode, (N,) int64
            rows: of the names of ``rows_of``, (N, ...) float64, each world's values one after the other
        """
        named = {name: _Rows(rows[name].data_ptr(), rows[name].stride(0)) for name in rows_of(self.traced)}
        numbers = {"n": len(counters["indices"]), "seed": seed % 2**64, "limit": limit}
        pointers = {name: tensor.data_ptr() for name, tensor in counters.items()}
        return ctypes.pointer(self.structure(**numbers, **pointers, **named))


def compile_task(rules: TaskFunctions[Any], fields: Mapping[str, Tensor]) -> Program:
    """Trace and compile a task's rules for worlds with these fields, unless that was done before.

    Raises:
        UntraceableError: a rule does something that cannot be compiled.
        CompilerError: there is no compiler here, or it refuses the program.
    """
    task = rules.task
    traced = trace_task(rules, fields)
    sizes = {"ACTIONS": task.action_dim, "OBS": task.obs_dim, "TERMS": len(task.reward_terms)}
    structure = _structure(traced)
    library = RULES.load(source(traced, sizes), mirrors={"Rows": _Rows, "TaskWorlds": structure})
    count, address = ctypes.c_int64, ctypes.c_void_p
    library.rayagi_control.argtypes = (address,)
    library.rayagi_after_physics.argtypes = (address,) * 9
    library.rayagi_start.argtypes = (address, address, count, address, address)
    library.rayagi_observe.argtypes = (address, address, count, address)
    library.rayagi_control.restype = library.rayagi_after_physics.restype = count
    library.rayagi_start.restype = library.rayagi_observe.restype = None
    return Program(traced, library, structure)


def _structure(traced: TracedTask) -> Any:
    """``TaskWorlds`` of worlds.h for this task."""
    fields = [
        ("n", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("limit", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("indices", "elapsed", "episode")),
        *((name, _Rows) for name in rows_of(traced)),
    ]
    return type("TaskWorlds", (ctypes.Structure,), {"_fields_": fields})
