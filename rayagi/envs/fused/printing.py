"""Code printer: from a traced function to the statements of a language, by one table of operations per language.

body = print_function(traced.step, C, {"x": "x[j]", ..., "action0": "a[j]"})
body.lines      one declaration per operation, in order
body.outputs    an expression per output
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rayagi.envs.fused.expressions import COMPARISONS, LOGIC, REAL_OPS, ExprNode, Kind
from rayagi.envs.fused.trace import Function


@dataclass(frozen=True)
class Language:
    """Syntax of a target language.

    Attributes:
        name: for error messages
        operations: a format per operation of expressions.py and for ``where``; arguments are {0}, {1}, {2}
        declare: format of a declaration per kind, with {name} and {value}
        infinity, not_a_number: literals
        truths: literals of False and True
        number: format of a number's literal of the reals' type
    """

    name: str
    operations: Mapping[str, str]
    declare: Mapping[Kind, str]
    infinity: str
    not_a_number: str
    truths: tuple[str, str]
    number: str = "{}"

    def __post_init__(self) -> None:
        missing = {*REAL_OPS, *COMPARISONS, *LOGIC, "where"} - set(self.operations)
        if missing:
            raise ValueError(f"{self.name} has no {', '.join(sorted(missing))}")

    def literal(self, value: float | bool | str) -> str:
        """A constant."""
        if isinstance(value, bool):
            return self.truths[value]
        number = float(value)
        if number != number:
            return self.not_a_number
        if number in (float("inf"), float("-inf")):
            return self.infinity if number > 0 else f"(-{self.infinity})"
        text = self.number.format(repr(number))
        return f"({text})" if text.startswith("-") else text


INFIX: Mapping[str, str] = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "eq": "{0} == {1}", "ne": "{0} != {1}",
}  # fmt: skip
"""Operators that all target languages share."""


@dataclass(frozen=True, slots=True)
class Body:
    """Printed body of a function.

    Attributes:
        lines: declarations, in order
        outputs: one expression per output: a declared name, an input or a constant
    """

    lines: tuple[str, ...]
    outputs: tuple[str, ...]


def print_function(
    function: Function, language: Language, inputs: Mapping[str, str], prefix: str = "t"
) -> Body:
    """Print a traced function: one declaration per operation. Several functions with different prefixes share a scope."""
    texts: list[str] = []
    lines: list[str] = []
    for number, node in enumerate(function.nodes):
        texts.append(_text(node, number, language, inputs, prefix))
        if node.op not in ("input", "constant"):
            value = language.operations[node.op].format(*(texts[arg] for arg in node.args))
            lines.append(language.declare[node.kind].format(name=texts[number], value=value))
    return Body(tuple(lines), tuple(texts[index] for index in function.outputs))


def _text(node: ExprNode, number: int, language: Language, inputs: Mapping[str, str], prefix: str) -> str:
    if node.op == "input":
        return inputs[str(node.value)]
    if node.op == "constant":
        return language.literal(node.value)
    return f"{prefix}{number}"
