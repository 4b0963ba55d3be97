"""Variant xla: K steps as one ``lax.scan`` in one compiled call. XLA fuses within a step, not across steps."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from experiments.fusion.variants.jax_world import JaxEnvState, JaxWorld
from experiments.fusion.variants.variant import (
    BenchmarkConfig,
    BenchmarkState,
    Counts,
    Totals,
    random_actions,
)
from rayagi.envs.fused.backends import BatchedEnvState
from rayagi.envs.fused.simulator import Discrete

Carried = tuple[JaxEnvState, jax.Array, jax.Array, jax.Array]
"""State of the environments, copies, and the call's rewards and ended episodes."""
NOT_KERNELS = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all",
}  # fmt: skip
"""HLO instructions that launch no kernel."""


class JaxStepper:
    """Implements Stepper. Methods run in a ``jax.enable_x64`` context, without which JAX has no float64."""

    def __init__(self, work: BenchmarkConfig) -> None:
        self.work = work
        self._double = work.real is torch.float64
        real = jnp.float64 if self._double else jnp.float32
        self._world = world = JaxWorld(work.simulator, work.seed, work.compute, real)

        def several(worlds: JaxEnvState, copies: jax.Array, actions: jax.Array) -> Carried:
            def one(carried: Carried, action: jax.Array) -> tuple[Carried, None]:
                before, copies, rewards, ended = carried
                after, reward, done = world.step(before, action)
                if work.copies > 1:
                    copies = copies + (after.state - before.state)
                return (after, copies, rewards + reward, ended + done.astype(jnp.int32)), None

            zeros = jnp.zeros(work.num_envs, real), jnp.zeros(work.num_envs, jnp.int32)
            return jax.lax.scan(one, (worlds, copies, *zeros), actions)[0]

        self._several = jax.jit(several, donate_argnums=(0, 1))
        self._now: Carried
        self.put(BenchmarkState.first(work))

    def put(self, bench_state: BenchmarkState) -> None:
        """Set the environments' state."""
        env_state = bench_state.env_state
        with jax.enable_x64(self._double):
            worlds = JaxEnvState(
                *(_array(one) for one in (env_state.state, env_state.elapsed, env_state.episode))
            )
            totals = bench_state.totals
            self._now = (worlds, _array(bench_state.copies), _array(totals.rewards), _array(totals.ended))

    def prepare(self, actions: Tensor) -> jax.Array:
        """Actions as a JAX array on the device."""
        given = actions if isinstance(self.work.simulator.actions, Discrete) else actions.movedim(1, -1)
        with jax.enable_x64(self._double):
            return _array(given)

    def step(self, prepared: jax.Array) -> None:
        """K steps; asynchronous."""
        with jax.enable_x64(self._double):
            self._now = self._several(self._now[0], self._now[1], prepared)

    def wait(self) -> None:
        """Wait until all steps are finished."""
        jax.block_until_ready(self._now)

    def get(self) -> BenchmarkState:
        """State of the environments."""
        worlds, copies, *totals = self._now
        return BenchmarkState(
            BatchedEnvState(*map(_tensor, worlds)), _tensor(copies), Totals(*map(_tensor, totals))
        )

    def counts(self) -> Counts:
        """One call; kernels as listed in XLA's compiled program, those in a loop times its trip count."""
        prepared = self.prepare(random_actions(self.work))
        with jax.enable_x64(self._double):
            compiled = self._several.lower(self._now[0], self._now[1], prepared).compile()
        return Counts(1, launches(compiled.as_text()))


class JaxVariant:
    """Implements Variant."""

    name = "xla"

    def missing(self, work: BenchmarkConfig) -> str | None:
        """None: JAX is installed if this module was imported."""
        return None

    def make(self, work: BenchmarkConfig) -> JaxStepper:
        """Construct the environments."""
        return JaxStepper(work)


def launches(program: str) -> int:
    """Kernels that a compiled XLA program runs.

    Args:
        program: HLO text after optimisation, with the trip counts that XLA found

    Raises:
        ValueError: a loop's trip count is unknown.
    """
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in program.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            name = head[2]
            entry = name if head[1] else entry
            bodies[name] = []
        elif line.startswith(" ") and " = " in line:
            bodies[name].append(line)
    return _launches_of(entry, bodies)


def _launches_of(computation: str, bodies: dict[str, list[str]]) -> int:
    count = 0
    for line in bodies[computation]:
        op = _operation(line)
        if op == "while":
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
            if trips is None:
                raise ValueError(f"XLA reports no trip count of this loop: {line.strip()[:120]}")
            count += int(trips[1]) * _launches_of(_called(line, "body"), bodies)
        elif op == "call":
            count += _launches_of(_called(line, "to_apply"), bodies)
        elif op not in NOT_KERNELS:
            count += 1
    return count


def _operation(line: str) -> str:
    """Opcode of an HLO line, such as while: ``%a.1 = (f32[4]{0}, s32[]) while(%b), ...``; the word after the type."""
    text = line.split(" = ", 1)[1]
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "({[") - (character in ")}]")
        if character == " " and depth == 0:
            return text[place + 1 :].split("(", 1)[0]
    return text


def _called(line: str, attribute: str) -> str:
    found = re.search(rf"{attribute}=%?([\w.\-]+)", line)
    assert found is not None, line
    return found[1]


def _array(tensor: Tensor) -> jax.Array:
    return jnp.array(tensor.numpy())


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array))
