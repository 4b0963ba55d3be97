"""Printer of a CUDA kernel from the trace: K steps of one environment per thread, with the state in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from textwrap import indent

import torch

from experiments.fusion.variants.variant import BenchmarkConfig
from rayagi.envs.fused import draws
from rayagi.envs.fused.printing import INFIX, Body, Language, print_function
from rayagi.envs.fused.simulator import Box
from rayagi.envs.fused.trace import trace

_FUNCTIONS = {  # overloaded: of float and double
    name: f"{name}({{0}})" for name in ("sqrt", "exp", "log", "sin", "cos", "tan", "tanh", "floor")
}
CUDA = Language(
    name="CUDA",
    operations={
        **INFIX,
        **_FUNCTIONS,
        "abs": "fabs({0})",
        "minimum": "fmin({0}, {1})",
        "maximum": "fmax({0}, {1})",
        "and": "{0} && {1}",
        "or": "{0} || {1}",
        "not": "!{0}",
        "where": "{0} ? {1} : {2}",
    },
    declare={"real": "const real {name} = {value};", "truth": "const bool {name} = {value};"},
    infinity="CUDART_INF_F",
    not_a_number="CUDART_NAN_F",
    truths=("false", "true"),
    number="{}f",
)
_LANGUAGES = {torch.float32: CUDA, torch.float64: replace(CUDA, name="CUDA in float64", number="{}")}
_TYPES = {torch.float32: "float", torch.float64: "double"}

_HEAD = f"""\
#define CUDART_INF_F __int_as_float(0x7f800000)
#define CUDART_NAN_F __int_as_float(0x7fffffff)
typedef unsigned int word_t;

/* PCG-4D (draws.py): an LCG step of each word, a mixing round, a xorshift, a second round; 24 bits of each word. */
__device__ void mix(word_t &x, word_t &y, word_t &z, word_t &w) {{
    x += y * w;
    y += z * x;
    z += x * y;
    w += y * z;
}}

__device__ float4 numbers(word_t x, word_t y, word_t z, word_t w) {{
    x = x * {draws.MULTIPLIER}u + {draws.INCREMENT}u;
    y = y * {draws.MULTIPLIER}u + {draws.INCREMENT}u;
    z = z * {draws.MULTIPLIER}u + {draws.INCREMENT}u;
    w = w * {draws.MULTIPLIER}u + {draws.INCREMENT}u;
    mix(x, y, z, w);
    x ^= x >> 16;
    y ^= y >> 16;
    z ^= z >> 16;
    w ^= w >> 16;
    mix(x, y, z, w);
    const float unit = 0x1p-24f;
    return make_float4((x >> 8) * unit, (y >> 8) * unit, (z >> 8) * unit, (w >> 8) * unit);
}}
"""


def cuda_source(work: BenchmarkConfig) -> str:
    """A translation unit with the kernel ``simulate``. Raises SimulatorError if the simulator cannot be traced."""
    simulator, traced = work.simulator, trace(work.simulator)
    names = traced.step.inputs[: len(simulator.state)]
    reals = traced.step.inputs[len(names) :]
    states = {name: f"s_{name}" for name in names}
    language = _LANGUAGES[work.real]
    step = print_function(traced.step, language, {**states, **{name: name for name in reals}}, prefix="t")
    start = print_function(traced.start, language, {name: name for name in traced.start.inputs}, prefix="b")
    kind = "real" if isinstance(simulator.actions, Box) else "unsigned char"
    return f"""{_HEAD}
typedef {_TYPES[work.real]} real;

extern "C" __global__ void simulate(
    int num_envs, int num_steps, int num_copies, int compute, word_t seed, const {kind} *actions, real *state,
    int *elapsed, int *episode, real *copies, real *rewards, int *ended
) {{
    /* A thread per environment; state[j * n + i]: neighbouring threads read neighbouring words. No memory is shared. */
    const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, n = num_envs;
    if (i >= n) return;
{_lines(1, [f"real {states[name]} = state[{j} * n + i];" for j, name in enumerate(names)])}
{_lines(1, [f"const real from_{name} = {states[name]};" for name in names])}
    int steps = elapsed[i], number = episode[i], count = 0;
    real total = 0.0f;
    for (int k = 0; k < num_steps; k++) {{
{_lines(2, [f"const real {name} = {_action(work, place)};" for place, name in enumerate(reals)])}
{_iterated(work, step, list(states.values()))}
        /* Reward and time limit; at an episode's end its successor's first state, keyed by (i, number). */
        total += reward;
        steps += 1;
        if (over || steps >= {work.env_config.limit}) {{
            steps = 0;
            number += 1;
            count += 1;
{_lines(3, _drawn(len(traced.start.inputs)))}
{_lines(3, start.lines)}
{_lines(3, [f"{states[name]} = {value};" for name, value in zip(names, start.outputs, strict=True)])}
        }}
    }}
{_lines(1, [f"state[{j} * n + i] = {states[name]};" for j, name in enumerate(names)])}
    elapsed[i] = steps;
    episode[i] = number;
    rewards[i] = total;
    ended[i] = count;
    for (long long c = 0; c < num_copies; c++) {{
        real *copy = copies + c * {len(names)} * n;
{_lines(2, [f"copy[{j} * n + i] += {states[name]} - from_{name};" for j, name in enumerate(names)])}
    }}
}}
"""


def _action(work: BenchmarkConfig, place: int) -> str:
    actions = work.simulator.actions
    if not isinstance(actions, Box):
        return "actions[k * n + i]"
    literal = _LANGUAGES[work.real].literal
    low, high = literal(actions.low[place]), literal(actions.high[place])
    return f"fmin(fmax(actions[(k * {len(actions.low)} + {place}) * n + i], {low}), {high})"


def _iterated(work: BenchmarkConfig, step: Body, states: Sequence[str]) -> str:
    """The dynamics once, or in a loop. New values are assigned after all are computed."""
    *after, reward, over = step.outputs
    moved = [f"const real n_{name} = {value};" for name, value in zip(states, after, strict=True)]
    moved += [f"{name} = n_{name};" for name in states]
    if work.compute == 1:
        return _lines(
            2, [*step.lines, *moved, f"const real reward = {reward};", f"const bool over = {over};"]
        )
    inner = [*step.lines, *moved, f"reward = {reward};", f"over = {over};"]
    before = ["real reward = 0.0f;", "bool over = false;", "for (int c = 0; c < compute; c++) {"]
    return "\n".join([_lines(2, before), _lines(3, inner), _lines(2, ["}"])])


def _drawn(count: int) -> list[str]:
    """Declarations of draw0, draw1, ..., equal to ``draws.uniform``."""
    lines = []
    for block in range(-(-count // 4)):
        word = f"seed + {block * draws.BLOCK % 2**32}u"
        lines.append(
            f"const float4 block{block} = numbers((word_t)i, (word_t)number, {draws.START}u, {word});"
        )
        lines += [
            f"const real draw{4 * block + lane} = block{block}.{component};"
            for lane, component in enumerate("xyzw")
            if 4 * block + lane < count
        ]
    return lines


def _lines(depth: int, lines: Sequence[str]) -> str:
    return indent("\n".join(lines), "    " * depth)
