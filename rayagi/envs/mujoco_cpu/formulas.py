"""Compiles a task's formulas to C. Each method is traced: called once with expressions instead of numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from collectives.kernels import Kernel
from rayagi.envs.errors import SimulatorError
from rayagi.envs.fused.expressions import Expr, Graph
from rayagi.envs.fused.printing import Body, print_function
from rayagi.envs.fused.trace import Function, needed
from rayagi.envs.mujoco_cpu.physics import Fields
from rayagi.envs.mujoco_cpu.tasks import CompiledModel, GymnasiumTask
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


Values = NDArray[np.object_]

_OPERATIONS: Mapping[Any, str] = {
    np.add: "add", np.subtract: "sub", np.multiply: "mul", np.divide: "div", np.negative: "neg",
    np.minimum: "minimum", np.maximum: "maximum", np.less: "lt", np.less_equal: "le", np.greater: "gt",
    np.greater_equal: "ge", np.bitwise_and: "and", np.bitwise_or: "or", np.invert: "not",
}  # fmt: skip
_OF_TRUTHS = ("and", "or", "not")


class TracedArray(NDArrayOperatorsMixin):
    """A numpy-like array whose ``values`` are expressions and constants. Methods of a task called with it build a graph.

    The world is a batch of one. Shapes and indices are numpy's own, on object arrays of expressions. Each elementwise
    operation becomes a node. Only the operations that tasks use are supported; others raise SimulatorError.
    """

    def __init__(self, graph: Graph, values: Any) -> None:
        self.graph, self.values = graph, np.asarray(values, dtype=object)

    @classmethod
    def inputs(cls, graph: Graph, name: str, shape: Sequence[int]) -> TracedArray:
        """Inputs ``name[0]``, ... of one world, (1, *shape)."""
        size = int(np.prod(shape))
        rows = np.array([graph.input(f"{name}[{k}]") for k in range(size)], dtype=object)
        return cls(graph, rows.reshape(1, *shape))

    def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **options: Any) -> TracedArray:
        out = options.pop("out", None)
        if method != "__call__" or options:
            raise _unknown(f"{ufunc.__name__}.{method}")
        found = self._matmul(*given) if ufunc is np.matmul else self._apply(ufunc, given)
        if out is not None:
            out[0].values[...] = found.values
        return found

    def __array_function__(
        self, function: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> TracedArray:
        if function not in _FUNCTIONS:
            raise _unknown(function.__name__)
        return TracedArray(self.graph, _FUNCTIONS[function](*args, **kwargs))

    def _apply(self, ufunc: Any, given: Sequence[Any]) -> TracedArray:
        """Apply a ufunc elementwise. In arithmetic, truth values count as 0 and 1."""
        if ufunc not in _OPERATIONS:
            raise _unknown(ufunc.__name__)
        op = _OPERATIONS[ufunc]
        arrays = [_values(one) for one in given]
        if op not in _OF_TRUTHS:
            arrays = [_each(_real, array) for array in arrays]
        return TracedArray(self.graph, _each(lambda *args: self.graph.apply(op, *args), *arrays))

    def _matmul(self, rows: Any, column: Any) -> TracedArray:
        products = (rows * column).values
        return TracedArray(self.graph, _sums(products))

    def __getitem__(self, index: Any) -> TracedArray:
        return TracedArray(self.graph, self.values[index])

    def __len__(self) -> int:
        return len(self.values)

    def reshape(self, *shape: int) -> TracedArray:
        """The same values in another shape."""
        return TracedArray(self.graph, self.values.reshape(*shape))

    def outputs(self) -> list[Expr]:
        """All values, in order."""
        return [self.graph.value(value) for value in self.values.reshape(-1)]


def _unknown(name: str) -> SimulatorError:
    return SimulatorError("a task's formulas", f"numpy's {name} cannot be compiled yet")


def _each(function: Callable[..., Any], *arrays: Values) -> Values:
    return np.asarray(np.frompyfunc(function, len(arrays), 1)(*arrays), dtype=object)


def _values(given: Any) -> Values:
    return given.values if isinstance(given, TracedArray) else np.asarray(given, dtype=object)


def _real(value: Any) -> Any:
    if isinstance(value, Expr) and value.node.kind == "truth":
        return value.graph.apply("where", value, 1.0, 0.0)
    return value


def _sums(rows: Values) -> list[Any]:
    """The sum of each row, from the first element to the last."""
    return [reduce(lambda one, other: one + other, row) for row in rows]


def _concatenate(parts: Sequence[Any], axis: int = 0) -> Values:
    return np.concatenate([_values(part) for part in parts], axis)


def _einsum(subscripts: str, one: TracedArray, other: TracedArray) -> list[Any]:
    if subscripts != "ij,ij->i":
        raise _unknown(f"einsum of {subscripts}")
    return _sums((one * other).values)


def _clip(values: TracedArray, low: float, high: float) -> Values:
    bounded: TracedArray = np.minimum(np.maximum(values, low), high)  # type: ignore[call-overload]
    return bounded.values


_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    np.concatenate: _concatenate,
    np.einsum: _einsum,
    np.clip: _clip,
}
