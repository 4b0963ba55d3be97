"""Printer of a Warp kernel from the trace: K steps of one environment per thread, with the state in registers."""

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

WARP = Language(
    name="Warp",
    operations={
        **INFIX,
        **{
            name: f"wp.{name}({{0}})"
            for name in ("abs", "sqrt", "exp", "log", "sin", "cos", "tan", "tanh", "floor")
        },
        "minimum": "wp.min({0}, {1})",
        "maximum": "wp.max({0}, {1})",
        "and": "{0} and {1}",
        "or": "{0} or {1}",
        "not": "not {0}",
        "where": "wp.where({0}, {1}, {2})",
    },
    declare={"real": "{name} = {value}", "truth": "{name} = {value}"},
    infinity="wp.inf",
    not_a_number="wp.nan",
    truths=("False", "True"),
)
_LANGUAGES = {
    torch.float32: WARP,
    torch.float64: replace(
        WARP,
        name="Warp in float64",
        number="wp.float64({})",
        infinity="wp.float64(wp.inf)",
        not_a_number="wp.float64(wp.nan)",
    ),
}
_TYPES = {torch.float32: "wp.float32", torch.float64: "wp.float64"}

_HEAD = f"""\
import warp as wp

@wp.func
def round4(x: wp.uint32, y: wp.uint32, z: wp.uint32, w: wp.uint32):
    x1 = x + y * w
    y1 = y + z * x1
    z1 = z + x1 * y1
    w1 = w + y1 * z1
    return x1, y1, z1, w1

@wp.func
def spread(x: wp.uint32):
    return x * wp.uint32({draws.MULTIPLIER}) + wp.uint32({draws.INCREMENT})

@wp.func
def folded(x: wp.uint32):
    return x ^ (x >> wp.uint32(16))

@wp.func
def unit(x: wp.uint32):
    return float(x >> wp.uint32(8)) * {2.0**-24!r}

@wp.func
def numbers(x: wp.uint32, y: wp.uint32, z: wp.uint32, w: wp.uint32):
    a, b, c, d = round4(spread(x), spread(y), spread(z), spread(w))
    p, q, r, s = round4(folded(a), folded(b), folded(c), folded(d))
    return unit(p), unit(q), unit(r), unit(s)
"""


def warp_source(work: BenchmarkConfig) -> str:
    """Source of a module with the kernel ``simulate``. Raises SimulatorError if the simulator cannot be traced."""
    simulator, limit = work.simulator, work.env_config.limit
    language, real = _LANGUAGES[work.real], _TYPES[work.real]
    traced = trace(simulator)
    names = traced.step.inputs[: len(simulator.state)]
    reals = traced.step.inputs[len(names) :]
    states = {name: f"s_{name}" for name in names}
    step = print_function(traced.step, language, {**states, **{name: name for name in reals}}, prefix="t")
    drawn = {name: f"{real}({name})" for name in traced.start.inputs}
    start = print_function(traced.start, language, drawn, prefix="b")
    discrete = not isinstance(simulator.actions, Box)
    actions = "wp.array2d(dtype=wp.uint8)" if discrete else f"wp.array3d(dtype={real})"
    read = [f"{name} = {_action(work, place)}" for place, name in enumerate(reals)]
    return f"""{_HEAD}
@wp.kernel(enable_backward=False)
def simulate(num_steps: int, num_copies: int, compute: int, word: wp.uint32, actions: {actions},
             state: wp.array2d(dtype={real}), elapsed: wp.array(dtype=int), episode: wp.array(dtype=int),
             copies: wp.array3d(dtype={real}), rewards: wp.array(dtype={real}), ended: wp.array(dtype=int)):
    i = wp.tid()
{_lines(1, [f"{states[name]} = state[{j}, i]" for j, name in enumerate(names)])}
{_lines(1, [f"from_{name} = state[{j}, i]" for j, name in enumerate(names)])}
    steps = elapsed[i]
    number = episode[i]
    total = {real}(0.0)
    count = int(0)
    for k in range(num_steps):
{_lines(2, read)}
{_iterated(work, step, [states[name] for name in names])}
        total += reward
        steps += 1
        if over or steps >= {limit}:
            steps = int(0)
            number += 1
            count += 1
{_lines(3, _drawn(len(drawn)))}
{_lines(3, start.lines)}
{_lines(3, [f"{states[name]} = {value}" for name, value in zip(names, start.outputs, strict=True)])}
{_lines(1, [f"state[{j}, i] = {states[name]}" for j, name in enumerate(names)])}
    elapsed[i] = steps
    episode[i] = number
    rewards[i] = total
    ended[i] = count
    for c in range(num_copies):
{_lines(2, [f"copies[c, {j}, i] = copies[c, {j}, i] + ({states[name]} - from_{name})" for j, name in enumerate(names)])}
"""


def _action(work: BenchmarkConfig, place: int) -> str:
    actions = work.simulator.actions
    if not isinstance(actions, Box):
        return f"{_TYPES[work.real]}(actions[k, i])"
    literal = _LANGUAGES[work.real].literal
    return f"wp.clamp(actions[k, {place}, i], {literal(actions.low[place])}, {literal(actions.high[place])})"


def _iterated(work: BenchmarkConfig, step: Body, states: Sequence[str]) -> str:
    """The dynamics once, or in a loop. New values are assigned after all are computed."""
    *after, reward, over = step.outputs
    assigned = [f"n_{name} = {value}" for name, value in zip(states, after, strict=True)]
    assigned += [f"{name} = n_{name}" for name in states]
    if work.compute == 1:
        return _lines(2, [*step.lines, *assigned, f"reward = {reward}", f"over = {over}"])
    outcome = [f"reward = {reward}", f"over = {over}"]
    before = [f"reward = {_TYPES[work.real]}(0.0)", "over = bool(False)", "for c in range(compute):"]
    return "\n".join([_lines(2, before), _lines(3, [*step.lines, *assigned, *outcome])])


def _drawn(count: int) -> list[str]:
    """Declarations of draw0, draw1, ..., equal to ``draws.uniform``."""
    lines = []
    for block in range(-(-count // 4)):
        word = f"word + wp.uint32({_signed(block * draws.BLOCK)})"
        names = ", ".join(f"draw{4 * block + lane}" for lane in range(4))
        lines.append(f"{names} = numbers(wp.uint32(i), wp.uint32(number), wp.uint32({draws.START}), {word})")
    return lines


def _signed(number: int) -> int:
    """The int32 with the same bits, since Warp's literals are signed."""
    return (number + 2**31) % 2**32 - 2**31


def _lines(depth: int, lines: Sequence[str]) -> str:
    return indent("\n".join(lines), "    " * depth)
