"""Printing in C, compilation and loading of a traced task; ctypes structs that point the program at the worlds' tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from torch import Tensor

from collectives.kernels import Kernel
from rayagi.envs.fused.printing import INFIX, Language, print_function
from rayagi.envs.tasks.compiled.expressions import C_FUNCTIONS
from rayagi.envs.tasks.compiled.trace import Assignments, TracedTask, memory_name, trace_task
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


C = Language(
    name="C",
    operations={
        **INFIX,
        **{name: f"{name}({{0}})" for name in ("sqrt", "floor", "exp", "log", "sin", "cos", "tan", "tanh")},
        **{name: text for name, (text, _) in C_FUNCTIONS.items()},
        "abs": "fabs({0})", "minimum": "least({0}, {1})", "maximum": "most({0}, {1})",
        "and": "{0} & {1}", "or": "{0} | {1}", "not": "!{0}", "where": "{0} ? {1} : {2}",
    },
    declare={"real": "const double {name} = {value};", "truth": "const int {name} = {value};"},
    infinity="INFINITY",
    not_a_number="NAN",
    truths=("0", "1"),
)  # fmt: skip


def rows_of(traced: TracedTask) -> tuple[str, ...]:
    """Names of the ``Rows`` members of ``TaskWorlds``, (N, size) each, in the struct's order."""
    return (*traced.fields, *map(memory_name, traced.memory), "actions", "controls")


def source(traced: TracedTask, sizes: dict[str, int]) -> str:
    """The complete C program. ``sizes``: values of the macros ACTIONS, OBS and TERMS."""
    draws = {"START_DRAWS": traced.num_start_draws, "STEP_DRAWS": traced.num_step_draws}
    rows = rows_of(traced)
    functions = (
        ("control", traced.control, ""),
        (
            "after_physics",
            traced.after_physics,
            ", float *obs, float *reward, uint8_t *terminated, float *terms",
        ),
        ("observe", traced.observe, ", float *obs"),
        ("start", traced.start, ""),
    )
    return "\n".join(
        [
            *(f"#define {name} {size}" for name, size in (sizes | draws).items()),
            f"#define ROWS Rows {', '.join(rows)};",
            files(__package__).joinpath("worlds.h").read_text(encoding="utf-8"),
            *(_function(name, rule, rows, results) for name, rule, results in functions),
            files(__package__).joinpath("steps.h").read_text(encoding="utf-8"),
        ]
    )


def _function(name: str, rule: Assignments, rows: tuple[str, ...], results: str) -> str:
    """A task function of world ``i``. All values are computed before any is stored, since targets may also be inputs."""
    body = print_function(rule.function, C, {text: text for text in rule.function.inputs})
    stores = [f"{target} = {value};" for target, value in zip(rule.targets, body.outputs, strict=True)]
    return "\n".join(
        [
            f"static void {name}(const TaskWorlds *w, int64_t i, const double *draws{results}) {{",
            *(f"    double *{row} = w->{row}.at + i * w->{row}.stride;" for row in rows),
            *(f"    {line}" for line in (*body.lines, *stores)),
            "}",
        ]
    )
