"""Functions of the dialect, for Python numbers, torch tensors and traced expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rayagi.envs.fused.expressions import FOLD, Expr

Function = Callable[[Any], Any]


def _unary(op: str, of_tensors: Function) -> Function:
    of_numbers = FOLD[op]

    def apply(x: Any) -> Any:
        if isinstance(x, Tensor):
            return of_tensors(x)
        return x.graph.apply(op, x) if isinstance(x, Expr) else of_numbers(x)

    apply.__name__ = apply.__qualname__ = op
    apply.__doc__ = f"{op} of a real."
    return apply


sin = _unary("sin", torch.sin)
cos = _unary("cos", torch.cos)
tan = _unary("tan", torch.tan)
tanh = _unary("tanh", torch.tanh)
exp = _unary("exp", torch.exp)
log = _unary("log", torch.log)
sqrt = _unary("sqrt", torch.sqrt)
floor = _unary("floor", torch.floor)


def minimum(a: Any, b: Any) -> Any:
    """The smaller of two reals."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.minimum(*_tensors(a, b))
    return _traced("minimum", a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger of two reals."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return torch.maximum(*_tensors(a, b))
    return _traced("maximum", a, b)


def clip(x: Any, low: Any, high: Any) -> Any:
    """x limited to [low, high]."""
    return minimum(maximum(x, low), high)


def where(condition: Any, a: Any, b: Any) -> Any:
    """``a`` if the condition holds, else ``b``. Both are computed."""
    if any(isinstance(one, Tensor) for one in (condition, a, b)):
        if not isinstance(condition, Tensor):
            return a if condition else b
        return torch.where(condition, a, b)
    return _traced("where", condition, a, b)


def _traced(op: str, *given: Any) -> Any:
    for one in given:
        if isinstance(one, Expr):
            return one.graph.apply(op, *given)
    return FOLD[op](*given)


def _tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    like = a if isinstance(a, Tensor) else b
    made = (one if isinstance(one, Tensor) else torch.full_like(like, one) for one in (a, b))
    first, second = made
    return first, second
