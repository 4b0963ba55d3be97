"""Tensors of one world's values as expressions: given to a task's rules in place of tensors, they become a graph.

The world is a batch of one. What rules do to tensors is done to arrays of expressions: shapes and indices are numpy's, and
every operation of reals becomes a node for each value. The operations are those that rules use; others raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rayagi.envs.fused.errors import SimulatorError
from rayagi.envs.fused.expressions import Expr, Graph, Node

Values = NDArray[np.object_]


class RulesGraph(Graph):
    """The dialect's graph and what rules need beside it."""

    def atan2(self, y: Expr, x: Expr) -> Expr:
        """The angle of (x, y), rad."""
        given = (y.node, x.node)
        if all(node.op == "constant" for node in given):
            return self.constant(math.atan2(*(float(node.value) for node in given)))
        return self._add(Node("atan2", (y.index, x.index)))

    def tensor(self, values: Any) -> TracedTensor:
        """Numbers or expressions of any shape."""
        return TracedTensor(self, _each(self.value, np.asarray(values, dtype=object)))

    def inputs(self, name: str, size: int) -> TracedTensor:
        """A row of inputs ``name[0]``, ..., (1, size)."""
        return self.tensor([[self.input(f"{name}[{k}]") for k in range(size)]])


class TracedTensor:
    """What a rule sees. ``values``: an array of expressions, whose views share memory as a tensor's do."""

    def __init__(self, graph: RulesGraph, values: Values) -> None:
        self.graph, self.values = graph, values

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function not in _FUNCTIONS:
            raise SimulatorError("a task's rules", f"torch's {function.__name__} cannot be compiled yet")
        return _FUNCTIONS[function](*args, **(kwargs or {}))

    def _new(self, values: Any) -> TracedTensor:
        return TracedTensor(self.graph, np.asarray(values, dtype=object))

    def _apply(self, op: str, *others: Any) -> TracedTensor:
        """An operation of the graph on every value; truth values count as 0 and 1 where it takes reals."""
        given = [_values(other) for other in (self, *others)]
        if op not in ("and", "or", "not", "where"):
            given = [_each(_real, values) for values in given]
        return self._new(_each(lambda *args: self.graph.apply(op, *args), *given))

    def __add__(self, other: Any) -> TracedTensor:
        return self._apply("add", other)

    def __radd__(self, other: Any) -> TracedTensor:
        return self._new(other)._apply("add", self)

    def __sub__(self, other: Any) -> TracedTensor:
        return self._apply("sub", other)

    def __rsub__(self, other: Any) -> TracedTensor:
        return self._new(other)._apply("sub", self)

    def __mul__(self, other: Any) -> TracedTensor:
        return self._apply("mul", other)

    def __rmul__(self, other: Any) -> TracedTensor:
        return self._new(other)._apply("mul", self)

    def __truediv__(self, other: Any) -> TracedTensor:
        return self._apply("div", other)

    def __rtruediv__(self, other: Any) -> TracedTensor:
        return self._new(other)._apply("div", self)

    def __neg__(self) -> TracedTensor:
        return self._apply("neg")

    def __lt__(self, other: Any) -> TracedTensor:
        return self._apply("lt", other)

    def __le__(self, other: Any) -> TracedTensor:
        return self._apply("le", other)

    def __gt__(self, other: Any) -> TracedTensor:
        return self._apply("gt", other)

    def __ge__(self, other: Any) -> TracedTensor:
        return self._apply("ge", other)

    def __and__(self, other: Any) -> TracedTensor:
        return self._apply("and", other)

    def __or__(self, other: Any) -> TracedTensor:
        return self._apply("or", other)

    def abs(self) -> TracedTensor:
        """As torch's, like all that follow."""
        return self._apply("abs")

    def square(self) -> TracedTensor:
        """x x."""
        return self * self

    def clamp(self, min: float | None = None, max: float | None = None) -> TracedTensor:  # noqa: A002
        """Between numbers."""
        low = self if min is None else self._apply("maximum", min)
        return low if max is None else low._apply("minimum", max)

    clamp_min = clamp

    def masked_fill(self, mask: TracedTensor, value: float) -> TracedTensor:
        """``value`` where the mask is set."""
        return mask._apply("where", value, self)

    def sum(self, dim: int, dtype: torch.dtype | None = None) -> TracedTensor:
        """From the first to the last."""
        return self._folded("add", dim)

    def amin(self, dim: int) -> TracedTensor:
        """The least."""
        return self._folded("minimum", dim)

    def any(self, dim: int) -> TracedTensor:
        """Of truth values."""
        return self._folded("or", dim)

    def _folded(self, op: str, dim: int) -> TracedTensor:
        return reduce(lambda one, other: one._apply(op, other), self.unbind(dim))

    def to(self, dtype: torch.dtype) -> TracedTensor:
        """All reals are of one type here; truth values become 0 and 1."""
        return self._new(_each(_real, self.values)) if dtype.is_floating_point else self

    @property
    def dtype(self) -> torch.dtype:
        """Of all reals."""
        return torch.float64

    @property
    def shape(self) -> tuple[int, ...]:
        """With the batch of one."""
        return self.values.shape

    @property
    def T(self) -> TracedTensor:  # noqa: N802 - torch's name
        """Transposed."""
        return self._new(self.values.T)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[TracedTensor]:
        return iter(self.unbind(0))

    def __getitem__(self, index: Any) -> TracedTensor:
        return self._new(self.values[_index(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[_index(index)] = _each(self.graph.value, _values(value))

    def new_zeros(self, shape: tuple[int, ...]) -> TracedTensor:
        """Zeros."""
        return self.graph.tensor(np.zeros(shape))

    def unbind(self, dim: int = 0) -> tuple[TracedTensor, ...]:
        """Its parts along a dimension."""
        return tuple(self._new(part) for part in np.moveaxis(self.values, dim, 0))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[TracedTensor, ...]:
        """Parts of one size."""
        return tuple(self._new(part) for part in np.split(self.values, chunks, dim))

    def unsqueeze(self, dim: int) -> TracedTensor:
        """A dimension of one more."""
        return self._new(np.expand_dims(self.values, dim))

    def squeeze(self, dim: int) -> TracedTensor:
        """A dimension of one less."""
        return self._new(np.squeeze(self.values, dim))

    def movedim(self, source: int, destination: int) -> TracedTensor:
        """A dimension elsewhere."""
        return self._new(np.moveaxis(self.values, source, destination))

    def flatten(self, start: int, end: int) -> TracedTensor:
        """Dimensions as one."""
        shape = self.shape
        return self._new(self.values.reshape(*shape[:start], -1, *shape[end + 1 :]))

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> TracedTensor:
        """A dimension as several."""
        shape, dim = self.shape, dim % self.values.ndim
        return self._new(self.values.reshape(*shape[:dim], *sizes, *shape[dim + 1 :]))

    def reshape(self, *sizes: int) -> TracedTensor:
        """The same values in another shape."""
        return self._new(self.values.reshape(sizes))

    def expand(self, *sizes: int) -> TracedTensor:
        """Repeated, not to be written."""
        return self._new(np.broadcast_to(self.values, sizes))

    def repeat(self, *times: int) -> TracedTensor:
        """Repeated, in memory of its own."""
        return self._new(np.tile(self.values, times))

    def clone(self) -> TracedTensor:
        """In memory of its own."""
        return self._new(self.values.copy())

    def contiguous(self) -> TracedTensor:
        """Order in memory means nothing here."""
        return self


def _each(function: Callable[..., Any], *arrays: Values) -> Values:
    return np.asarray(np.frompyfunc(function, len(arrays), 1)(*arrays), dtype=object)


def _values(given: Any) -> Values:
    if isinstance(given, TracedTensor):
        return given.values
    return np.asarray(given.tolist() if isinstance(given, Tensor) else given, dtype=object)


def _real(value: Any) -> Any:
    if isinstance(value, Expr) and value.node.kind == "truth":
        return value.graph.apply("where", value, 1.0, 0.0)
    return value


def _index(index: Any) -> Any:
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(part.numpy() if isinstance(part, Tensor) else part for part in parts)


def _unary(op: str) -> Callable[[TracedTensor], TracedTensor]:
    return lambda x: x._apply(op)


def _binary(op: str) -> Callable[[TracedTensor, Any], TracedTensor]:
    return lambda x, y: x._apply(op, y)


def _atan2(y: TracedTensor, x: TracedTensor) -> TracedTensor:
    return y._new(_each(y.graph.atan2, y.values, x.values))


def _vector_norm(x: TracedTensor, *, dim: int) -> TracedTensor:
    return x.square().sum(dim)._apply("sqrt")


def _cross(a: TracedTensor, b: TracedTensor, *, dim: int) -> TracedTensor:
    (ax, ay, az), (bx, by, bz) = a.unbind(dim), b.unbind(dim)
    return _stack((ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx), dim)


def _stack(parts: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    return parts[0]._new(np.stack([part.values for part in parts], dim))


def _cat(parts: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
    return parts[0]._new(np.concatenate([part.values for part in parts], dim))


_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    torch.exp: _unary("exp"),
    torch.sin: _unary("sin"),
    torch.cos: _unary("cos"),
    torch.minimum: _binary("minimum"),
    torch.maximum: _binary("maximum"),
    torch.atan2: _atan2,
    torch.clamp: lambda x, low, high: x._apply("maximum", low)._apply("minimum", high),
    torch.where: lambda condition, x, y: condition._apply("where", x, y),
    torch.stack: _stack,
    torch.cat: _cat,
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.cross: _cross,
}
