"""A simulator as a C program: its functions, printed, between the parts that all simulators share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files

import torch

from rayagi.envs.fused.printing import INFIX, Language, print_function
from rayagi.envs.fused.simulator import Box, Discrete, action_dim
from rayagi.envs.fused.trace import Function, Traced
from rayagi.native.headers import numbers, shared

LANES = 64
"""Environments of a tile: enough vectors in flight, and a tile of a small policy still fits the first-level cache."""

C = Language(
    name="C",
    operations={
        **INFIX,
        **{
            name: f"real_{name}({{0}})"
            for name in ("abs", "sqrt", "floor", "exp", "log", "sin", "cos", "tan", "tanh")
        },
        "minimum": "real_min({0}, {1})", "maximum": "real_max({0}, {1})",
        "and": "{0} & {1}", "or": "{0} | {1}", "not": "!{0}", "where": "{0} ? {1} : {2}",
    },
    declare={"real": "real {name} = {value};", "truth": "int {name} = {value};"},
    infinity="INFINITY",
    not_a_number="NAN",
    truths=("0", "1"),
    number="{}f",
)  # fmt: skip
_LANGUAGES = {torch.float32: C, torch.float64: replace(C, name="C in float64", number="{}")}


def source(traced: Traced, real: torch.dtype = torch.float32) -> str:
    """The whole program, of reals in float32 or float64."""
    actions = traced.simulator.actions
    sizes: Mapping[str, int] = {
        "L": LANES,
        "S": len(traced.simulator.state),
        "A": action_dim(traced.simulator),
        "D": traced.obs_dim,
        "DRAWS": traced.simulator.num_draws,
        "CHOICES": actions.count if isinstance(actions, Discrete) else 0,
    }
    return "\n".join(
        [
            f"/* {traced.simulator.name}, written by rayagi. */",
            *(f"#define {name} {size}" for name, size in sizes.items()),
            numbers(real),
            *(_bounds(actions, real) if isinstance(actions, Box) else ()),
            _function("simulator_start", traced.start, real),
            _function("simulator_step", traced.step, real),
            _function("simulator_observe", traced.observe, real),
            *(_shared(name) for name in ("draws.h", "worlds.h")),
            shared("policy.h"),
            _shared("rollout.h"),
        ]
    )


def _shared(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _bounds(box: Box, real: torch.dtype) -> list[str]:
    literal = _LANGUAGES[real].literal
    return [
        f"static const real {name}[A] = {{{', '.join(literal(value) for value in side)}}};"
        for name, side in (("low", box.low), ("high", box.high))
    ]


def function_source(name: str, function: Function, lanes: int = LANES) -> str:
    """A program of one exported function alone. in: (inputs, lanes); out: (outputs, lanes)."""
    printed = _function(name, function, torch.float32).removeprefix("static ")
    return "\n".join([f"#define L {lanes}", numbers(torch.float32), printed])


def _function(name: str, function: Function, real: torch.dtype) -> str:
    """One loop over lanes. in: (inputs, L); out: (outputs, L)."""
    inputs = {text: f"in[{row} * L + j]" for row, text in enumerate(function.inputs)}
    body = print_function(function, _LANGUAGES[real], inputs)
    stores = [f"out[{row} * L + j] = {text};" for row, text in enumerate(body.outputs)]
    return "\n".join(
        [
            f"static void {name}(const real *restrict in, real *restrict out) {{",
            "#pragma omp simd",
            "    for (int j = 0; j < L; j++) {",
            *(f"        {line}" for line in (*body.lines, *stores)),
            "    }",
            "}",
        ]
    )
