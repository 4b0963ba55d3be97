"""A simulator as a C program: its functions, printed, between the parts that all simulators share."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from rayagi.envs.fused.printing import INFIX, Language, print_function
from rayagi.envs.fused.simulator import Box, Choices, action_dim
from rayagi.envs.fused.trace import Function, Traced
from rayagi.native.headers import shared

LANES = 64
"""Environments of a tile: enough vectors in flight, and a tile of a small policy still fits the first-level cache."""

C = Language(
    name="C",
    operations={
        **INFIX,
        "abs": "fabsf({0})", "sqrt": "sqrtf({0})", "floor": "floorf({0})", "exp": "real_exp({0})", "log": "real_log({0})",
        "sin": "real_sin({0})", "cos": "real_cos({0})", "tan": "real_tan({0})", "tanh": "real_tanh({0})",
        "minimum": "real_min({0}, {1})", "maximum": "real_max({0}, {1})",
        "and": "{0} & {1}", "or": "{0} | {1}", "not": "!{0}", "where": "{0} ? {1} : {2}",
    },
    declare={"real": "float {name} = {value};", "truth": "int {name} = {value};"},
    infinity="INFINITY",
    not_a_number="NAN",
    truths=("0", "1"),
    suffix="f",
)  # fmt: skip


def source(traced: Traced) -> str:
    """The whole program."""
    actions = traced.simulator.actions
    sizes: Mapping[str, int] = {
        "L": LANES,
        "S": len(traced.simulator.state),
        "A": action_dim(traced.simulator),
        "D": traced.obs_dim,
        "DRAWS": traced.simulator.num_draws,
        "CHOICES": actions.count if isinstance(actions, Choices) else 0,
    }
    return "\n".join(
        [
            f"/* {traced.simulator.name}, written by rayagi. */",
            *(f"#define {name} {size}" for name, size in sizes.items()),
            shared("numbers.h"),
            *(_bounds(actions) if isinstance(actions, Box) else ()),
            _function("simulator_start", traced.start),
            _function("simulator_step", traced.step),
            _function("simulator_observe", traced.observe),
            *(_shared(name) for name in ("draws.h", "worlds.h")),
            shared("policy.h"),
            _shared("rollout.h"),
        ]
    )


def _shared(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _bounds(box: Box) -> list[str]:
    return [
        f"static const float {name}[A] = {{{', '.join(C.literal(value) for value in side)}}};"
        for name, side in (("low", box.low), ("high", box.high))
    ]


def function_source(name: str, function: Function, lanes: int = LANES) -> str:
    """A program of one exported function alone. in: (inputs, lanes); out: (outputs, lanes)."""
    printed = _function(name, function).removeprefix("static ")
    return "\n".join([f"#define L {lanes}", shared("numbers.h"), printed])


def _function(name: str, function: Function) -> str:
    """One loop over lanes. in: (inputs, L); out: (outputs, L)."""
    inputs = {text: f"in[{row} * L + j]" for row, text in enumerate(function.inputs)}
    body = print_function(function, C, inputs)
    stores = [f"out[{row} * L + j] = {text};" for row, text in enumerate(body.outputs)]
    return "\n".join(
        [
            f"static void {name}(const float *restrict in, float *restrict out) {{",
            "#pragma omp simd",
            "    for (int j = 0; j < L; j++) {",
            *(f"        {line}" for line in (*body.lines, *stores)),
            "    }",
            "}",
        ]
    )
