"""Expression graph of traced functions: static single assignment with common subexpressions shared."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from rayagi.envs.errors import SimulatorError

Kind = Literal["real", "truth"]

REAL_OPS: dict[str, int] = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "neg": 1, "abs": 1, "sqrt": 1, "exp": 1, "log": 1, "sin": 1, "cos": 1, "tan": 1,
    "tanh": 1, "floor": 1, "minimum": 2, "maximum": 2,
}  # fmt: skip
"""Operations from reals to a real, and their numbers of arguments."""
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
"""Operations from two reals to a truth value."""
LOGIC: dict[str, int] = {"and": 2, "or": 2, "not": 1}
"""Operations from truth values to a truth value, and their numbers of arguments."""
# Further operations: ``where`` (a truth value, then two arguments of one kind), ``input`` and ``constant``.


@dataclass(frozen=True, slots=True)
class ExprNode:
    """One value. ``args``: indices of earlier nodes; ``value``: a constant's value, or an input's name."""

    op: str
    args: tuple[int, ...] = ()
    value: float | bool | str = 0.0
    kind: Kind = "real"


class Graph:
    """Nodes in order of creation, which is a topological order."""

    def __init__(self, place: str) -> None:
        """``place``: name of the traced function, for error messages."""
        self.place = place
        self.nodes: list[ExprNode] = []
        self._index: dict[tuple[object, ...], int] = {}

    def input(self, name: str) -> Expr:
        """A named input."""
        return self._add(ExprNode("input", (), name))

    def constant(self, value: float) -> Expr:
        """A number or a truth value that is known at trace time."""
        if isinstance(value, bool):
            return self._add(ExprNode("constant", (), value, "truth"))
        return self._add(ExprNode("constant", (), float(value)))

    def value(self, given: Any) -> Expr:
        """A number or expression as an expression of this graph. Raises SimulatorError for anything else."""
        if isinstance(given, Expr):
            if given.graph is not self:
                raise self.error("it uses a value of another function's tracing; keep none in attributes")
            return given
        if isinstance(given, (bool, int, float)):
            return self.constant(given)
        item = getattr(given, "item", None)  # numpy's scalars, and tensors of one element
        if item is not None and getattr(given, "ndim", None) == 0:
            return self.constant(item())
        raise self.error(
            f"a {type(given).__name__} is not a real; use numbers and what the function is given"
        )

    def apply(self, op: str, *given: Any) -> Expr:
        """The value of an operation. Constants are folded. Raises SimulatorError for an argument of the wrong kind."""
        args = [self.value(one) for one in given]
        kind = self._checked_kind(op, args)
        nodes = [arg.node for arg in args]
        if all(node.op == "constant" for node in nodes):
            return self.constant(_folded(op, [node.value for node in nodes]))
        if op == "where" and nodes[0].op == "constant":
            return args[1] if nodes[0].value else args[2]
        return self._add(ExprNode(op, tuple(arg.index for arg in args), kind=kind))

    def error(self, reason: str) -> SimulatorError:
        """A SimulatorError that names the user's line."""
        return SimulatorError(f"{self.place}{_users_line()}", reason)

    def _checked_kind(self, op: str, args: list[Expr]) -> Kind:
        kinds = [arg.node.kind for arg in args]
        if op == "where":
            if kinds[0] != "truth":
                raise self.error("the first argument of where is a real; compare it with something")
            if kinds[1] != kinds[2]:
                raise self.error("where chooses between a real and a truth value; make both of a kind")
            return kinds[1]
        if op in LOGIC and "real" in kinds:
            raise self.error(
                "&, | and ~ take truth values, and one of these is a real; compare it with something"
            )
        if op not in LOGIC and "truth" in kinds:
            raise self.error(
                f"{op} takes reals, and one of these is a truth value; write where(condition, 1.0, 0.0)"
            )
        return "real" if op in REAL_OPS else "truth"

    def _add(self, node: ExprNode) -> Expr:
        """Hash-consing: an equal node is reused (common subexpression elimination)."""
        # repr, since in Python 1.0 == True and 0.0 == -0.0.
        value = repr(node.value)
        key = (node.op, node.args, value)
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.nodes)
            self.nodes.append(node)
        return Expr(self, index)


def _infix(op: str) -> tuple[Callable[[Expr, Any], Expr], Callable[[Expr, Any], Expr]]:
    """Methods of an operator of two values: of its left one, and of its right one."""

    def of_left(self: Expr, other: Any) -> Expr:
        return self.graph.apply(op, self, other)

    def of_right(self: Expr, other: Any) -> Expr:
        return self.graph.apply(op, other, self)

    return of_left, of_right


class Expr:
    """A symbolic value: Python's operators on it add nodes to its graph."""

    __slots__ = ("graph", "index")
    __array_ufunc__ = None  # numpy's scalars defer their operators to this class

    def __init__(self, graph: Graph, index: int) -> None:
        self.graph, self.index = graph, index

    @property
    def node(self) -> ExprNode:
        """Its node."""
        return self.graph.nodes[self.index]

    __add__, __radd__ = _infix("add")
    __sub__, __rsub__ = _infix("sub")
    __mul__, __rmul__ = _infix("mul")
    __truediv__, __rtruediv__ = _infix("div")
    __and__, __rand__ = _infix("and")
    __or__, __ror__ = _infix("or")
    __lt__, __gt__ = _infix("lt")[0], _infix("gt")[0]
    __le__, __ge__ = _infix("le")[0], _infix("ge")[0]
    __eq__, __ne__ = _infix("eq")[0], _infix("ne")[0]  # type: ignore[assignment]

    def __mod__(self, other: Any) -> Expr:
        """a - floor(a / b) b: as in Python, the result has the divisor's sign."""
        quotient = self.graph.apply("floor", self / other)
        return self - quotient * other

    def __pow__(self, power: Any) -> Expr:
        if power == 0.5:
            return self.graph.apply("sqrt", self)
        if not isinstance(power, (int, float)) or power != int(power) or not 1 <= abs(power) <= 16:
            raise self.graph.error(
                f"** {power!r}: powers are whole numbers up to 16, or 0.5; else write exp(p * log(x))"
            )
        result = self  # binary exponentiation
        for bit in bin(abs(int(power)))[3:]:
            result = result * result
            result = result * self if bit == "1" else result
        return result if power > 0 else 1.0 / result

    def __neg__(self) -> Expr:
        return self.graph.apply("neg", self)

    def __pos__(self) -> Expr:
        return self

    def __abs__(self) -> Expr:
        return self.graph.apply("abs", self)

    def __invert__(self) -> Expr:
        return self.graph.apply("not", self)

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise self.graph.error(
            "the function branches on a value that is known only when the simulator runs; instead of if, and, or, not, "
            "min and max write where(condition, a, b), &, |, ~, minimum and maximum"
        )

    def __float__(self) -> float:
        raise self.graph.error(
            "a function of reals that is not of the dialect (math, numpy?); use those of rayagi.envs.fused.ops"
        )

    __int__ = __index__ = __round__ = __floor__ = __ceil__ = __float__

    def __iter__(self) -> NoReturn:
        raise self.graph.error("it unpacks one real; a single reward, truth value or choice is not a tuple")


def _folded(op: str, values: list[Any]) -> float | bool:
    result = FOLD[op](*values)
    return bool(result) if isinstance(result, bool) else float(result)


def _divided(a: float, b: float) -> float:
    if b == 0.0:
        return math.nan if a == 0.0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)
    return a / b


FOLD: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": _divided, "neg": operator.neg, "abs": abs,
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan, "exp": math.exp,
    "log": lambda x: math.log(x) if x > 0 else (-math.inf if x == 0 else math.nan),
    "sin": math.sin, "cos": math.cos, "tan": math.tan, "tanh": math.tanh, "floor": math.floor,
    "minimum": min, "maximum": max, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "eq": operator.eq, "ne": operator.ne, "and": lambda a, b: a and b, "or": lambda a, b: a or b,
    "not": operator.not_, "where": lambda c, a, b: a if c else b,
}  # fmt: skip
"""Each operation on Python's numbers, for constant folding."""

_OWN_FILES = {
    str(Path(__file__).with_name(name)) for name in ("expressions.py", "ops.py", "trace.py", "simulator.py")
}


def _users_line() -> str:
    """File and line of the user's code being traced: the innermost frame outside the dialect's own files."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename not in _OWN_FILES:
            return f", {frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
