"""Traced numpy arrays: a task's methods called with them build an expression graph of one world.

The world is a batch of one. Shapes and indices are numpy's own, on object arrays of expressions. Each elementwise
operation becomes a node. Only the operations that tasks use are supported; others raise SimulatorError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

from rayagi.envs.errors import SimulatorError
from rayagi.envs.fused.expressions import Expr, Graph

Values = NDArray[np.object_]

_OPERATIONS: Mapping[Any, str] = {
    np.add: "add", np.subtract: "sub", np.multiply: "mul", np.divide: "div", np.negative: "neg",
    np.minimum: "minimum", np.maximum: "maximum", np.less: "lt", np.less_equal: "le", np.greater: "gt",
    np.greater_equal: "ge", np.bitwise_and: "and", np.bitwise_or: "or", np.invert: "not",
}  # fmt: skip
_OF_TRUTHS = ("and", "or", "not")


class TracedArray(NDArrayOperatorsMixin):
    """A numpy-like array whose ``values`` are expressions and constants."""

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
