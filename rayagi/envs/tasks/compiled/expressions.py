"""Expression graph of task functions: the fused simulators' graph with more functions of C's math.h.

Operations on constants are folded with numpy, with IEEE 754 results for infinities and NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rayagi.envs.fused.expressions import COMPARISONS, LOGIC, REAL_OPS, Expr, ExprNode, Graph

C_FUNCTIONS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "acos": ("acos({0})", np.arccos), "acosh": ("acosh({0})", np.arccosh), "asin": ("asin({0})", np.arcsin),
    "asinh": ("asinh({0})", np.arcsinh), "atan": ("atan({0})", np.arctan), "atan2": ("atan2({0}, {1})", np.arctan2),
    "atanh": ("atanh({0})", np.arctanh), "ceil": ("ceil({0})", np.ceil), "copysign": ("copysign({0}, {1})", np.copysign),
    "cosh": ("cosh({0})", np.cosh), "erf": ("erf({0})", np.vectorize(math.erf)), "exp2": ("exp2({0})", np.exp2),
    "expm1": ("expm1({0})", np.expm1), "fmax": ("fmax({0}, {1})", np.fmax), "fmin": ("fmin({0}, {1})", np.fmin),
    "fmod": ("fmod({0}, {1})", np.fmod), "hypot": ("hypot({0}, {1})", np.hypot), "log10": ("log10({0})", np.log10),
    "log1p": ("log1p({0})", np.log1p), "log2": ("log2({0})", np.log2), "pow": ("pow({0}, {1})", np.power),
    "round": ("rint({0})", np.rint), "sinh": ("sinh({0})", np.sinh), "trunc": ("trunc({0})", np.trunc),
    "single": ("single({0})", np.float32), "whole": ("(double)(int64_t){0}", np.trunc),
}  # fmt: skip
"""Further functions of reals: C format and numpy function. ``single`` rounds to float32, ``whole`` towards zero."""
_NUMPY: Mapping[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "neg": np.negative, "abs": np.abs,
    "sqrt": np.sqrt, "exp": np.exp, "log": np.log, "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh,
    "floor": np.floor, "minimum": np.minimum, "maximum": np.maximum, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "and": np.logical_and,
    "or": np.logical_or, "not": np.logical_not, "where": lambda c, a, b: a if c else b,
    **{name: function for name, (_, function) in C_FUNCTIONS.items()},
}  # fmt: skip
assert {*REAL_OPS, *COMPARISONS, *LOGIC, "where"} <= {*_NUMPY}


class TaskGraph(Graph):
    """The fused simulators' graph, extended by ``C_FUNCTIONS`` and conversions between reals and truth values."""

    def apply(self, op: str, *given: Any) -> Expr:
        """The value of an operation of the base graph or of ``C_FUNCTIONS``."""
        args = [self.value(one) for one in given]
        nodes = [arg.node for arg in args]
        if all(node.op == "constant" for node in nodes):
            with np.errstate(all="ignore"):
                # Python's own floats raise where IEEE has infinity or NaN.
                result = _NUMPY[op](*(_number(node.value) for node in nodes))
            is_truth = isinstance(result, bool | np.bool_)
            return self.constant(bool(result) if is_truth else float(result))
        if op in C_FUNCTIONS:
            return self._add(ExprNode(op, tuple(arg.index for arg in args)))
        return super().apply(op, *args)

    def add(self, node: ExprNode) -> int:
        """Index of a node; equal nodes are shared."""
        return self._add(node).index

    def real(self, value: Any) -> Expr:
        """A truth value as 0 or 1; a real unchanged."""
        value = self.value(value)
        return self.apply("where", value, 1.0, 0.0) if value.node.kind == "truth" else value

    def truth(self, value: Any) -> Expr:
        """Whether a real is not 0; a truth value unchanged."""
        value = self.value(value)
        return value if value.node.kind == "truth" else self.apply("ne", value, 0.0)


def _number(value: Any) -> Any:
    return value if isinstance(value, bool) else np.float64(value)


def exclusive_or(x: Expr, y: Expr) -> Expr:
    """Exclusive or of truth values."""
    return (x & ~y) | (~x & y)


def power(x: Expr, exponent: Any) -> Expr:
    """x ** exponent. Small integer exponents and roots are products and square roots, as in torch."""
    apply = x.graph.apply
    if not isinstance(exponent, Expr):
        by_number: Mapping[float, Callable[[], Expr]] = {
            0.5: lambda: apply("sqrt", x),
            -0.5: lambda: 1.0 / apply("sqrt", x),
            1.0: lambda: x,
            2.0: lambda: x * x,
            3.0: lambda: x * x * x,
            -1.0: lambda: 1.0 / x,
            -2.0: lambda: 1.0 / (x * x),
        }
        if float(exponent) in by_number:
            return by_number[float(exponent)]()
    return apply("pow", x, exponent)


def sign(x: Expr) -> Expr:
    """-1, 0 or 1; 0 for NaN, as in torch."""
    apply = x.graph.apply
    return apply("where", x > 0.0, 1.0, apply("where", x < 0.0, -1.0, 0.0))


def _wraps(a: Expr, b: Any) -> tuple[Expr, Expr]:
    """fmod(a, b), and whether it is nonzero with the sign opposite to b's."""
    apply = a.graph.apply
    rest = apply("fmod", a, b)
    negative, other = apply("lt", b, 0.0), rest < 0.0
    return rest, (rest != 0.0) & exclusive_or(negative, other)


def remainder(a: Expr, b: Any) -> Expr:
    """a modulo b, with b's sign: fmod(a, b), plus b if the signs differ."""
    rest, wraps = _wraps(a, b)
    return a.graph.apply("where", wraps, rest + b, rest)


def floor_divide(a: Expr, b: Any) -> Expr:
    """floor(a / b), computed from the exact remainder as in torch: (a - fmod(a, b)) / b, minus 1 if the signs differ."""
    apply = a.graph.apply
    rest, wraps = _wraps(a, b)
    quotient = (a - rest) / b
    quotient = apply("where", wraps, quotient - 1.0, quotient)
    floor = apply("floor", quotient)
    floor = apply("where", quotient - floor > 0.5, floor + 1.0, floor)
    rounded = apply("where", quotient != 0.0, floor, apply("copysign", 0.0, a / b))
    return apply("where", apply("eq", b, 0.0), a / b, rounded)
