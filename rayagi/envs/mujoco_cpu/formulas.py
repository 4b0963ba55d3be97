"""Compiles a task's formulas to C. Each method is traced: called once with expressions instead of numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.kernels import Kernel
from rayagi.envs.fused.expressions import Graph
from rayagi.envs.fused.printing import Body, print_function
from rayagi.envs.fused.trace import Function, needed
from rayagi.envs.mujoco_cpu.physics import Fields
from rayagi.envs.mujoco_cpu.tasks import CompiledModel, GymnasiumTask
from rayagi.envs.mujoco_cpu.traced_arrays import TracedArray
from rayagi.envs.tasks.compiled.program import C

FORMULAS = Kernel(
    name="tasks' formulas",
    module=__name__,
    reference="rayagi.envs.mujoco_cpu.vec_env:MujocoVecEnv",
    without="{} is stepped from Python",
    flags=("-ffp-contract=off",),  # no fused multiply-add: products are rounded as in numpy
)
_BEGIN = """#include <math.h>
static inline double least(double a, double b) { return a < b || a != a ? a : b; }
static inline double most(double a, double b) { return a > b || a != a ? a : b; }
"""


@dataclass(frozen=True, slots=True)
class Formulas:
    """Addresses of a task's compiled functions, in the signatures of world_rollout.h.

    Attributes:
        library: contains the functions; it must stay loaded
        fields: names of the fields in the functions' first argument, in order
        forward_position, compute_reward_done, observe: of Task's ``forward_position``, ``reward_and_done`` and ``observe``
    """

    library: ctypes.CDLL
    fields: tuple[str, ...]
    forward_position: int
    compute_reward_done: int
    observe: int


def compile_formulas(task: GymnasiumTask, compiled: CompiledModel, fields: Fields) -> Formulas:
    """Compile a task's formulas for worlds with these fields, (N, ...) each. Compiled programs are cached.

    Raises:
        SimulatorError: a method uses an operation that cannot be traced.
        CompilerError: no compiler was found, or it rejects the program.
    """
    library = FORMULAS.load(source(task, compiled, {name: array.shape[1:] for name, array in fields.items()}))
    addresses = (
        _address(library, name)
        for name in ("rayagi_forward_position", "rayagi_compute_reward_done", "rayagi_observe")
    )
    return Formulas(library, tuple(fields), *addresses)


def source(task: GymnasiumTask, compiled: CompiledModel, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The C program. ``shapes``: shape of each field of one world."""
    trace = _Tracing(task, shapes)
    forward_position = trace.function(task.forward_position(compiled, trace.fields))
    trace = _Tracing(task, shapes)
    controls = TracedArray.inputs(trace.graph, "controls", (compiled.model.nu,))
    speed = TracedArray(trace.graph, [trace.graph.input("speed")])
    rewards, ended = task.reward_and_done(compiled, trace.fields, controls, speed)  # type: ignore[arg-type]
    compute_reward_done = trace.function(rewards, ended)
    trace = _Tracing(task, shapes)
    observe = trace.function(task.observe(compiled, trace.fields))
    rows = [f"    const double *{name} = fields[{k}];" for k, name in enumerate(shapes)]
    head = "(const double *const *fields"
    return "\n".join(
        [
            _BEGIN,
            *(
                f"double rayagi_forward_position{head}) {{",
                *rows,
                *_body(forward_position, ["return {};"]),
                "}",
            ),
            f"int rayagi_compute_reward_done{head}, const double *controls, double speed, float *reward) {{",
            *(*rows, *_body(compute_reward_done, ["*reward = (float)({});", "return {};"]), "}"),
            f"void rayagi_observe{head}, float *obs) {{",
            *(
                *rows,
                *_body(observe, [f"obs[{k}] = (float)({{}});" for k in range(len(observe.outputs))]),
                "}",
            ),
        ]
    )


class _Tracing:
    """An expression graph, and one world's fields as its inputs."""

    def __init__(self, task: GymnasiumTask, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.graph = Graph(type(task).__name__)
        self.fields: Any = {
            name: TracedArray.inputs(self.graph, name, shape) for name, shape in shapes.items()
        }

    def function(self, *results: Any) -> Function:
        """The function with a method's results as outputs: traced arrays, or constants."""
        outputs = [
            expression.index
            for result in results
            for expression in (
                result if isinstance(result, TracedArray) else TracedArray(self.graph, np.asarray(result))
            ).outputs()
        ]
        inputs = tuple(str(node.value) for node in self.graph.nodes if node.op == "input")
        return needed(self.graph, inputs, outputs)


def _body(function: Function, stores: list[str]) -> list[str]:
    """The C statements of a function. ``stores``: templates, one per output."""
    body: Body = print_function(function, C, {name: name for name in function.inputs})
    ends = [store.format(output) for store, output in zip(stores, body.outputs, strict=True)]
    return [f"    {line}" for line in (*body.lines, *ends)]


def _address(library: ctypes.CDLL, name: str) -> int:
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found is not None
    return found
