"""Symbolic torch tensors: arrays of scalar expressions that record a task function's operations into a graph.

torch does the tracing. Its dispatcher calls ``Tracing`` with every operation, after it has resolved overloads, methods,
operators and composite functions. An operation that is not in the table ``OPERATIONS`` is decomposed by torch into others.
A tensor is a numpy array of expressions, so that views share memory as a tensor's do.

Why not make_fx or torch.export: they record the same operations into a graph, which would need the same table. They would
save some 60 lines, but every GMI traces at startup. ShadowHand's four functions are traced here in 0.2-0.5 s. For
reward_and_done and observe alone make_fx took 1.1-4.4 s in a fresh process and 0.1-0.5 s again; export 4.3-4.6 s and
0.5-1.6 s (torch 2.13, two busy cores of an AMD EPYC, November 2026). torch.fx.symbolic_trace records names of methods only.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, reduce
from itertools import accumulate
from pathlib import Path
from traceback import extract_tb
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rayagi.envs.errors import SimulatorError
from rayagi.envs.fused.expressions import Expr
from rayagi.envs.tasks.compiled import expressions
from rayagi.envs.tasks.compiled.expressions import TaskGraph, power

Values = NDArray[Any]

_FLOATS = (torch.float64, torch.float32)
_DTYPES = (*_FLOATS, torch.int64, torch.int32, torch.bool)
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(Path(np.__file__).parent))


class UntraceableError(SimulatorError):
    """A task function uses an operation that cannot be compiled. ``place``: file and line; ``reason``: the operation."""


def untraceable(reason: str) -> UntraceableError:
    """An UntraceableError at the user's line: the innermost frame outside torch and this package."""
    frame: Any = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return UntraceableError(f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "its rules", reason)


def users_line(error: BaseException) -> str:
    """File and line of an error: the innermost frame outside torch and this package."""
    frames = [frame for frame in extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "its rules"


def _is_library(path: str) -> bool:
    return path.startswith((*_LIBRARIES, "<"))


class TracedTensor(Tensor):
    """Symbolic argument of a task function.

    Attributes:
        exprs: one expression per value; read-only for inputs and the task's own tensors
        twin: an ordinary tensor that went through the same operations, starting from zeros and constants. torch infers
            shapes and dtypes from it and reports errors. Its values are meaningful only if all ``exprs`` are constants.
    """

    exprs: Values
    twin: Tensor

    @staticmethod
    def __new__(cls: type[TracedTensor], exprs: Values, twin: Tensor) -> TracedTensor:
        """``exprs`` must have the shape of ``twin``."""
        made: Any = Tensor._make_wrapper_subclass(
            cls, twin.shape, strides=twin.stride(), dtype=twin.dtype, device=twin.device
        )
        made.exprs, made.twin = exprs, twin
        return cast("TracedTensor", made)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """For error messages, and for task functions that print."""
        return f"traced tensor of shape {tuple(self.shape)}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Called only outside ``Tracing``, where a traced tensor has no meaning."""
        raise untraceable("a tensor is used after its function has returned; keep none in attributes")


class Tracing(TorchDispatchMode):
    """Context in which torch operations are recorded as expressions of ``graph``.

    Raises:
        UntraceableError: an unsupported operation, or one whose result Python needs at trace time.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler, which takes 2 s, only to disable it here

    def __init__(self, graph: TaskGraph) -> None:
        super().__init__()
        self.graph = graph
        self._lifted: dict[int, tuple[Tensor, TracedTensor]] = {}

    def inputs(self, names: Sequence[str], shape: tuple[int, ...]) -> TracedTensor:
        """A read-only float64 tensor of named inputs, in row-major order."""
        values = np.empty(len(names), dtype=object)
        values[:] = [self.graph.input(name) for name in names]
        values.flags.writeable = False
        return TracedTensor(values.reshape(shape), torch.zeros(shape, dtype=torch.float64))

    def lifted(self, given: Any) -> Any:
        """A tensor of the task's own as a read-only tensor of constants; a non-tensor unchanged."""
        if not isinstance(given, Tensor) or isinstance(given, TracedTensor):
            return given
        if id(given) not in self._lifted:
            made = self.constant(given)
            made.exprs.flags.writeable = False
            self._lifted[id(given)] = given, made  # kept alive, so that its id stays unique
        return self._lifted[id(given)][1]

    def constant(self, tensor: Tensor) -> TracedTensor:
        """An ordinary tensor as constants."""
        values = np.empty(tensor.numel(), dtype=object)
        values[:] = [self.graph.constant(number) for number in tensor.flatten().tolist()]
        return _made(values.reshape(tensor.shape), tensor.detach())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record one torch operation."""
        name = func._schema.name.rpartition("::")[2]
        # 1. Random numbers would differ from the draws.
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise untraceable(f"torch's {name} (random numbers are the function's draws)")
        given = _mapped(self.lifted, args)
        named = {key: self.lifted(value) for key, value in (kwargs or {}).items()}
        constant = all(map(_is_constant, _tensors((*given, *named.values()))))
        # 2. A value that Python needs now is known only if it is constant.
        if name in ("_local_scalar_dense", "is_nonzero", "item"):
            if not constant:
                raise untraceable("a value that Python asks for (if, and, or, not, float(), item())")
            return func(_known(given[0]))
        # 3. In-place operations.
        if func._schema.is_mutable:
            return self._write(func, name, given, named)
        # 4. Constant folding by torch itself. Views are recorded, since they share memory with their base.
        if constant and not func.is_view:
            result = func(*_mapped(_known, given), **{key: _known(value) for key, value in named.items()})
            return self.constant(result) if isinstance(result, Tensor) else _mapped(self.constant, result)
        # 5. The table.
        if name in OPERATIONS:
            return self._apply(func, name, given, named)
        # 6. Decomposition into other operations, each of which is dispatched here.
        decomposition = _decompositions().get(func, func.decompose)
        with self:
            result = decomposition(*given, **named)
        if result is NotImplemented:
            raise untraceable(f"torch's {name}")
        return result

    def _apply(self, func: Any, name: str, given: Any, named: Any) -> Any:
        """torch computes the result's shape and dtype on the twins, and checks the arguments; the table makes the values."""
        out = func(*_mapped(_twin, given), **{key: _twin(value) for key, value in named.items()})
        values = OPERATIONS[name](self.graph, out, *given, **named)
        return _made(values, out) if isinstance(out, Tensor) else list(map(_made, values, out))

    def _write(self, func: Any, name: str, given: Any, named: Any) -> Any:
        """An in-place operation: x.add_(y) as x[...] = x.add(y)."""
        packet = getattr(torch.ops.aten, name[:-1], None)
        if not name.endswith("_") or packet is None:
            raise untraceable(f"torch's {name}")
        target = given[0]
        with self:
            result = packet(*given, **named)
        if not target.exprs.flags.writeable:
            raise untraceable(f"torch's {name} (into a tensor that is not the function's own)")
        target.exprs[...] = _cast(result, target.dtype)
        return target


@cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    # Imported here: it loads torch's compiler, which takes 2 s, and few rules need it.
    from torch._decomp import decomposition_table

    return decomposition_table


def _mapped(function: Callable[[Any], Any], given: Sequence[Any]) -> list[Any]:
    """Apply ``function`` to each argument, and to each element of lists and tuples."""
    return [_mapped(function, one) if isinstance(one, list | tuple) else function(one) for one in given]


def _tensors(given: Sequence[Any]) -> list[TracedTensor]:
    parts = (part for one in given for part in (one if isinstance(one, list | tuple) else (one,)))
    return [part for part in parts if isinstance(part, TracedTensor)]


def _twin(given: Any) -> Any:
    return given.twin if isinstance(given, TracedTensor) else given


def _made(values: Any, twin: Tensor) -> TracedTensor:
    if twin.dtype not in _DTYPES:
        raise untraceable(f"a tensor of {twin.dtype}")
    values = np.asarray(values, dtype=object)
    assert values.shape == tuple(twin.shape), (values.shape, twin.shape)
    return TracedTensor(values, twin)


def _is_constant(tensor: TracedTensor) -> bool:
    return all(value.node.op == "constant" for value in tensor.exprs.flat)


def _known(given: Any) -> Any:
    """A traced tensor of constants as an ordinary tensor; a non-tensor unchanged."""
    if not isinstance(given, TracedTensor):
        return given
    numbers = [value.node.value for value in given.exprs.flat]
    return torch.tensor(numbers, dtype=given.dtype).reshape(given.shape)


def _each(function: Callable[..., Any], *arrays: Any) -> Values:
    """``function`` of each value, with broadcasting. The result is an array even for a single value."""
    with np.errstate(all="ignore"):  # folding constants may set the processor's floating-point flags
        return np.asarray(np.frompyfunc(function, len(arrays), 1)(*arrays), dtype=object)


def _cast(given: Any, dtype: torch.dtype) -> Any:
    """Values of a tensor, or a number, converted to ``dtype`` as torch does."""
    if not isinstance(given, TracedTensor):
        if dtype == torch.bool:
            return bool(given)
        return float(np.float32(given)) if dtype == torch.float32 else float(given)
    source, values = given.dtype, given.exprs
    if dtype == torch.bool:
        return _each(lambda value: value.graph.truth(value), values)
    if source == torch.bool:
        return _each(lambda value: value.graph.real(value), values)
    if source in _FLOATS and dtype not in _FLOATS:
        return _each(lambda value: value.graph.apply("whole", value), values)
    return values if source == dtype else _rounded(values, dtype)


def _rounded(values: Values, dtype: torch.dtype) -> Values:
    """Round to float32 if that is the dtype; the graph itself is float64."""
    if dtype != torch.float32:
        return values
    return _each(lambda value: value.graph.apply("single", value), values)


# The operations: each function takes the graph, the twin of its result and torch's arguments, and returns the values.

Operation = Callable[..., Any]


def _elementwise(name: str, function: Callable[..., Expr], *, integers: bool = False) -> Operation:
    """An elementwise operation; arguments are first converted to the result's dtype.

    ``integers``: also supported for integers, since results of integers below 2^53 stay exact in float64.
    """

    def operation(graph: TaskGraph, out: Tensor, *given: Any, **options: Any) -> Values:
        if out.dtype not in _FLOATS and not (integers and out.dtype != torch.bool):
            raise untraceable(f"torch's {name} of {out.dtype}")
        args = [_each(graph.value, _cast(one, out.dtype)) for one in given]
        return _rounded(_each(lambda *values: function(*values, **options), *args), out.dtype)

    return operation


def _compared(op: str) -> Operation:
    def operation(graph: TaskGraph, out: Tensor, x: Any, y: Any) -> Values:
        dtype = torch.result_type(*(_twin(one) for one in (x, y)))
        pair = (_cast(one, dtype) for one in (x, y))
        return _each(lambda a, b: graph.apply(op, graph.real(a), graph.real(b)), *pair)

    return operation


def _logical(name: str, function: Callable[..., Any]) -> Operation:
    def operation(graph: TaskGraph, out: Tensor, *given: Any) -> Values:
        if out.dtype != torch.bool:
            raise untraceable(f"torch's {name} of {out.dtype}")
        return _each(function, *(_each(graph.value, _cast(one, torch.bool)) for one in given))

    return operation


def _tested(function: Callable[[Expr], Expr]) -> Operation:
    """A predicate of reals."""
    return lambda graph, out, x: _each(lambda value: function(graph.real(value)), x.exprs)


def _where(graph: TaskGraph, out: Tensor, condition: TracedTensor, x: Any, y: Any) -> Values:
    chosen = (_cast(one, out.dtype) for one in (x, y))
    return _each(lambda *values: graph.apply("where", *values), _cast(condition, torch.bool), *chosen)


def _clamp(graph: TaskGraph, out: Tensor, x: TracedTensor, min: Any = None, max: Any = None) -> Values:  # noqa: A002
    values = _cast(x, out.dtype)
    for op, bound in (("maximum", min), ("minimum", max)):
        if bound is not None:
            values = _each(partial(graph.apply, op), values, _cast(bound, out.dtype))
    return values


def _divide(graph: TaskGraph, out: Tensor, x: Any, y: Any, rounding_mode: str | None = None) -> Values:
    if out.dtype not in _FLOATS:
        raise untraceable(f"torch's div of {out.dtype}")
    functions: Mapping[str | None, Callable[[Expr, Expr], Expr]] = {
        None: lambda a, b: a / b,
        "trunc": lambda a, b: graph.apply("trunc", a / b),
        "floor": expressions.floor_divide,
    }
    return _elementwise("div", functions[rounding_mode])(graph, out, x, y)


def _multiply(graph: TaskGraph, out: Tensor, x: Any, y: Any) -> Values:
    if out.dtype == torch.bool:
        return _logical("mul", operator.and_)(graph, out, x, y)
    return _elementwise("mul", operator.mul)(graph, out, x, y)


def _power(graph: TaskGraph, out: Tensor, x: Any, exponent: Any) -> Values:
    if isinstance(exponent, TracedTensor) or out.dtype not in _FLOATS:
        return _elementwise("pow", partial(graph.apply, "pow"))(graph, out, x, exponent)
    return _elementwise("pow", partial(power, exponent=exponent))(graph, out, x)


def _folded(values: Values, dims: Any, keepdim: bool, fold: Callable[[Any, Any], Any], empty: Any) -> Values:
    """Reduce dimensions (None: all) by ``fold``, from the first value to the last; ``empty`` if there are no values."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        dims = range(values.ndim)
    axes = [dim % values.ndim for dim in ([dims] if isinstance(dims, int) else dims)] if values.ndim else []
    rest = [size for axis, size in enumerate(values.shape) if axis not in axes]
    parts = list(np.moveaxis(values, axes, range(len(axes))).reshape(-1, *rest)) if values.size else []
    arrays = [np.asarray(part, dtype=object) for part in parts]
    whole = reduce(partial(_each, fold), arrays) if arrays else np.full(rest, empty, dtype=object)
    return np.expand_dims(whole, sorted(axes)) if keepdim else whole


def _reduced(fold: Callable[[Any, Any], Any], empty: float | None) -> Operation:
    """A reduction to reals: sum, product, minimum, maximum."""

    def operation(
        graph: TaskGraph, out: Tensor, x: TracedTensor, dim: Any = None, keepdim: bool = False, **_: Any
    ) -> Values:
        start = None if empty is None else graph.constant(empty)
        return _rounded(_folded(_cast(x, out.dtype), dim, keepdim, fold, start), out.dtype)

    return operation


def _quantified(fold: Callable[[Any, Any], Any], empty: bool) -> Operation:
    """A reduction to truth values: any and all."""

    def operation(
        graph: TaskGraph, out: Tensor, x: TracedTensor, dim: Any = None, keepdim: bool = False
    ) -> Values:
        return _folded(_cast(x, torch.bool), dim, keepdim, fold, graph.constant(empty))

    return operation


def _mean(
    graph: TaskGraph, out: Tensor, x: TracedTensor, dim: Any = None, keepdim: bool = False, **_: Any
) -> Values:
    total = _folded(_cast(x, out.dtype), dim, keepdim, operator.add, graph.constant(0.0))
    count = x.numel() // max(out.numel(), 1)
    return _rounded(_each(lambda value: value / float(count), total), out.dtype)


def _variance(
    graph: TaskGraph,
    out: Tensor,
    x: TracedTensor,
    dim: Any = None,
    correction: float = 1,
    keepdim: bool = False,
) -> Values:
    count = x.numel() // max(out.numel(), 1)
    total = _folded(x.exprs, dim, True, operator.add, graph.constant(0.0))
    squares = _each(lambda value, whole: power(value - whole / float(count), 2), x.exprs, total)
    squared = _folded(squares, dim, keepdim, operator.add, graph.constant(0.0))
    return _rounded(_each(lambda value: value / max(float(count - correction), 0.0), squared), out.dtype)


def _norm(
    graph: TaskGraph,
    out: Tensor,
    x: TracedTensor,
    ord: Any = 2,  # noqa: A002
    dim: Any = None,
    keepdim: bool = False,
    **_: Any,
) -> Values:
    if ord not in (1, 2, float("inf")):
        raise untraceable(f"torch's vector_norm of order {ord}")
    part = _each(lambda value: value * value if ord == 2 else abs(value), _cast(x, out.dtype))
    fold = operator.add if ord != float("inf") else partial(graph.apply, "maximum")
    total = _folded(part, dim, keepdim, fold, graph.constant(0.0))
    return _rounded(_each(partial(graph.apply, "sqrt"), total) if ord == 2 else total, out.dtype)


def _extreme(
    graph: TaskGraph, op: str, values: Values, dim: int | None, keepdim: bool
) -> tuple[Values, Values]:
    """Maximum or minimum along a dimension, and the first index of it; NaN wins over any number."""
    if dim is None:
        found = _extreme(graph, op, values.reshape(-1), 0, False)
        return found if not keepdim else tuple(one.reshape((1,) * values.ndim) for one in found)  # type: ignore[return-value]

    def beats(other: Expr, best: Expr) -> Expr:
        return graph.apply(op, other, best) | ((other != other) & (best == best))

    parts = [_at(values, dim, place) for place in range(values.shape[dim])] if values.ndim else [values]
    choose = partial(graph.apply, "where")
    best, at = parts[0], _each(lambda _: graph.constant(0.0), parts[0])
    for place, part in enumerate(parts[1:], 1):
        better = _each(beats, part, best)
        best, at = _each(choose, better, part, best), _each(choose, better, float(place), at)
    return (np.expand_dims(best, dim), np.expand_dims(at, dim)) if keepdim and values.ndim else (best, at)


def _most(op: str, fold: Callable[[Any, Any], Any]) -> Operation:
    """max and min: of all values, or along a dimension with the index."""

    def operation(
        graph: TaskGraph, out: Any, x: TracedTensor, dim: int | None = None, keepdim: bool = False
    ) -> Any:
        if isinstance(out, Tensor):
            return _folded(_cast(x, out.dtype), None, False, fold, None)
        return _extreme(graph, op, _cast(x, out[0].dtype), dim, keepdim)

    return operation


def _place_of_extreme(op: str) -> Operation:
    def operation(
        graph: TaskGraph, out: Tensor, x: TracedTensor, dim: int | None = None, keepdim: bool = False
    ) -> Values:
        return _extreme(graph, op, _each(graph.real, x.exprs), dim, keepdim)[1]

    return operation


def _running_sum(graph: TaskGraph, out: Tensor, x: TracedTensor, dim: int, **_: Any) -> Values:
    parts = np.moveaxis(_cast(x, out.dtype), dim, 0)
    sums = list(accumulate((np.asarray(part, dtype=object) for part in parts), partial(_each, operator.add)))
    return _rounded(np.moveaxis(np.stack(sums), 0, dim), out.dtype) if sums else parts


def _product(graph: TaskGraph, out: Tensor, *given: TracedTensor) -> Values:
    """Matrix and vector products."""
    if out.dtype not in _FLOATS:
        raise untraceable(f"a matrix product of {out.dtype}")
    return _rounded(np.asarray(np.matmul(*(_cast(one, out.dtype) for one in given)), dtype=object), out.dtype)


def _cross(graph: TaskGraph, out: Tensor, x: TracedTensor, y: TracedTensor, *, dim: int = -1) -> Values:
    a, b = (np.moveaxis(np.broadcast_to(_cast(one, out.dtype), out.shape), dim, 0) for one in (x, y))
    parts = [a[(k + 1) % 3] * b[(k + 2) % 3] - a[(k + 2) % 3] * b[(k + 1) % 3] for k in range(3)]
    return _rounded(np.stack([np.asarray(part, dtype=object) for part in parts], dim), out.dtype)


def _reshaped(graph: TaskGraph, out: Tensor, x: TracedTensor, *_: Any, **__: Any) -> Values:
    values = x.exprs.reshape(tuple(out.shape))
    if not np.shares_memory(values, x.exprs):
        values.flags.writeable = False  # torch would return a view: a write would have to reach the base
    return values


def _sliced(
    graph: TaskGraph,
    out: Tensor,
    x: TracedTensor,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Values:
    return x.exprs[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _at(values: Values, dim: int, place: int) -> Values:
    """One index along a dimension; a view, even of a single value."""
    return np.moveaxis(values, dim, 0)[place, ...]


def _split(graph: TaskGraph, out: Any, x: TracedTensor, sizes: Any, dim: int = 0) -> list[Values]:
    ends = np.cumsum([part.shape[dim] for part in out])[:-1]
    return np.split(x.exprs, ends, dim)


def _places(indices: Sequence[TracedTensor | None]) -> tuple[Any, ...]:
    """torch's indices as numpy's; they must be constants."""
    for index in indices:
        if index is not None and not _is_constant(index):
            raise untraceable("an index that depends on values (a mask or a traced integer); use torch.where")
    return tuple(slice(None) if index is None else _known(index).numpy() for index in indices)


def _index_put(
    graph: TaskGraph,
    out: Tensor,
    x: TracedTensor,
    indices: Any,
    values: TracedTensor,
    accumulate: bool = False,
) -> Values:
    if accumulate:
        raise untraceable("torch's index_put with accumulate")
    changed = x.exprs.copy()
    changed[_places(indices)] = _cast(values, x.dtype)
    return changed


def _filled(number: float | None) -> Operation:
    """A tensor filled with ``number``, or with the last argument if None."""

    def operation(graph: TaskGraph, out: Tensor, *given: Any, **_: Any) -> Values:
        value = given[-1] if number is None else number
        return _each(
            graph.value, np.broadcast_to(np.asarray(_cast(value, out.dtype), dtype=object), out.shape)
        )

    return operation


def _copied(graph: TaskGraph, out: Tensor, x: TracedTensor, source: Any, *_: Any, **__: Any) -> Values:
    return _each(graph.value, np.broadcast_to(np.asarray(_cast(source, out.dtype), dtype=object), out.shape))


def _moved(function: Callable[..., Any]) -> Operation:
    """A numpy function of the values with torch's further arguments."""
    return lambda graph, out, x, *rest, **named: function(x.exprs, *rest, **named)


def _joined(function: Callable[..., Values]) -> Operation:
    """Concatenation; like torch, it skips empty one-dimensional tensors."""
    return lambda graph, out, parts, dim=0: function(
        [_cast(part, out.dtype) for part in parts if part.shape != (0,) or out.shape == (0,)], dim
    )


_UNARY = (
    *(
        "exp",
        "log",
        "sin",
        "cos",
        "tan",
        "tanh",
        "sqrt",
        "floor",
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atanh",
    ),
    *("ceil", "cosh", "erf", "exp2", "expm1", "log10", "log1p", "log2", "round", "sinh", "trunc"),
)


def _op(name: str) -> Callable[..., Expr]:
    return lambda x, *others: x.graph.apply(name, x, *others)


_LOGIC: Mapping[str, Callable[..., Any]] = {
    "and": operator.and_, "or": operator.or_, "not": operator.invert, "xor": expressions.exclusive_or,
}  # fmt: skip
OPERATIONS: Mapping[str, Operation] = {
    **{name: _elementwise(name, _op(name)) for name in _UNARY},
    **{name: _elementwise(name, _op(name)) for name in ("atan2", "fmax", "fmin", "fmod", "hypot", "copysign")},
    **{name: _elementwise(name, _op(name), integers=True) for name in ("neg", "abs", "minimum", "maximum")},
    "add": _elementwise("add", lambda x, y, alpha=1: x + (y if alpha == 1 else y * alpha), integers=True),
    "sub": _elementwise("sub", lambda x, y, alpha=1: x - (y if alpha == 1 else y * alpha), integers=True),
    "rsub": _elementwise("rsub", lambda x, y, alpha=1: y - (x if alpha == 1 else x * alpha), integers=True),
    "mul": _multiply,
    "div": _divide,
    "floor_divide": _elementwise("floor_divide", expressions.floor_divide),
    "remainder": _elementwise("remainder", expressions.remainder),
    "reciprocal": _elementwise("reciprocal", lambda x: 1.0 / x),
    "rsqrt": _elementwise("rsqrt", lambda x: 1.0 / x.graph.apply("sqrt", x)),
    "pow": _power,
    "sigmoid": _elementwise("sigmoid", lambda x: 1.0 / (1.0 + x.graph.apply("exp", -x))),
    "relu": _elementwise("relu", lambda x: x.graph.apply("maximum", x, 0.0), integers=True),
    "sign": _elementwise("sign", expressions.sign, integers=True),
    **{name: _compared(name) for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{f"{kind}_{name}": _logical(f"{kind}_{name}", function)
       for kind in ("logical", "bitwise") for name, function in _LOGIC.items()},
    "isnan": _tested(lambda x: x != x),
    "isinf": _tested(lambda x: abs(x) == float("inf")),
    "where": _where,
    "clamp": _clamp,
    "clamp_min": lambda graph, out, x, bound: _clamp(graph, out, x, min=bound),
    "clamp_max": lambda graph, out, x, bound: _clamp(graph, out, x, max=bound),
    "masked_fill": lambda graph, out, x, mask, value: _where(graph, out, mask, value, x),
    "sum": _reduced(operator.add, 0.0),
    "prod": _reduced(operator.mul, 1.0),
    "amax": _reduced(_op("maximum"), None),
    "amin": _reduced(_op("minimum"), None),
    "mean": _mean,
    "var": _variance,
    "std": lambda graph, out, *given, **named: _each(_op("sqrt"), _variance(graph, out, *given, **named)),
    "any": _quantified(operator.or_, False),
    "all": _quantified(operator.and_, True),
    "linalg_vector_norm": _norm,
    "linalg_cross": _cross,
    "argmax": _place_of_extreme("gt"),
    "argmin": _place_of_extreme("lt"),
    "max": _most("gt", _op("maximum")),
    "min": _most("lt", _op("minimum")),
    "cumsum": _running_sum,
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), _product),
    "_to_copy": lambda graph, out, x, **_: np.array(_cast(x, out.dtype)),
    **dict.fromkeys(("clone", "lift_fresh", "lift_fresh_copy"), _moved(lambda values, **_: values.copy())),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias"), _reshaped),
    **dict.fromkeys(("alias", "detach"), _moved(lambda values: values)),
    "expand": lambda graph, out, x, *_, **__: np.broadcast_to(x.exprs, tuple(out.shape)),
    "permute": _moved(np.transpose),
    "transpose": _moved(np.swapaxes),
    "t": _moved(np.transpose),
    "unsqueeze": _moved(np.expand_dims),
    "squeeze": _reshaped,
    "select": _moved(_at),
    "slice": _sliced,
    "unbind": _moved(lambda values, dim=0: [_at(values, dim, place) for place in range(values.shape[dim])]),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    "diagonal": _moved(lambda values, offset=0, dim1=0, dim2=1: values.diagonal(offset, dim1, dim2)),
    "flip": _moved(lambda values, dims: np.flip(values, tuple(dims))),
    "repeat": _moved(np.tile),
    "cat": _joined(np.concatenate),
    "stack": _joined(np.stack),
    "index": lambda graph, out, x, indices: x.exprs[_places(indices)],
    "index_select": lambda graph, out, x, dim, index: np.take(x.exprs, _places([index])[0], dim),
    "index_put": _index_put,
    "copy": _copied,
    "fill": _filled(None),
    **dict.fromkeys(("zeros_like", "new_zeros", "empty_like", "new_empty", "zero"), _filled(0.0)),
    **dict.fromkeys(("ones_like", "new_ones"), _filled(1.0)),
    **dict.fromkeys(("full_like", "new_full"), _filled(None)),
}  # fmt: skip
"""Operations by torch's name, for all of its overloads."""
