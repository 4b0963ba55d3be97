"""A simulator as pure functions of JAX arrays, usable in ``lax.scan`` or inside a user's jitted training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rayagi.envs.fused import draws
from rayagi.envs.fused.simulator import Box, Discrete, Simulator
from rayagi.envs.fused.trace import Function, trace

_OPS: dict[str, Callable[..., Any]] = {
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide, "neg": jnp.negative, "abs": jnp.abs,
    "sqrt": jnp.sqrt, "exp": jnp.exp, "log": jnp.log, "sin": jnp.sin, "cos": jnp.cos, "tan": jnp.tan, "tanh": jnp.tanh,
    "floor": jnp.floor, "minimum": jnp.minimum, "maximum": jnp.maximum, "lt": jnp.less, "le": jnp.less_equal,
    "gt": jnp.greater, "ge": jnp.greater_equal, "eq": jnp.equal, "ne": jnp.not_equal, "and": jnp.logical_and,
    "or": jnp.logical_or, "not": jnp.logical_not, "where": jnp.where,
}  # fmt: skip


class JaxEnvState(NamedTuple):
    """State of N environments.

    Attributes:
        state: (S, N)
        elapsed: steps of the running episodes      (N,) int32
        episode: their numbers, from 0              (N,) int32
    """

    state: jax.Array
    elapsed: jax.Array
    episode: jax.Array


class JaxWorld:
    """Pure functions of the environments' state; ``jit``, ``scan``, ``grad`` and ``vmap`` can trace them."""

    def __init__(
        self, simulator: Simulator, seed: int = 0, compute: int = 1, real: Any = jnp.float32
    ) -> None:
        """Raises SimulatorError.

        Args:
            simulator: the simulator
            seed: of the initial states
            compute: iterations of the dynamics per step
            real: dtype of reals; jnp.float64 needs ``jax.enable_x64`` around all calls
        """
        self.simulator, self.compute, self.real = simulator, compute, real
        self.traced = trace(simulator)
        self._word = draws.seed_word(seed)

    @property
    def obs_dim(self) -> int:
        """Number of reals of an observation."""
        return self.traced.obs_dim

    @property
    def num_choices(self) -> int:
        """Number of choices of a discrete action; 0 for a box."""
        return self.simulator.actions.count if isinstance(self.simulator.actions, Discrete) else 0

    def start(self, num_envs: int) -> JaxEnvState:
        """Start of the first episodes."""
        episode = jnp.zeros(num_envs, jnp.int32)
        return JaxEnvState(self._begin(episode), jnp.zeros(num_envs, jnp.int32), episode)

    def observe(self, worlds: JaxEnvState) -> jax.Array:
        """Observations (N, obs_dim)."""
        shape = worlds.elapsed.shape
        return jnp.stack(self._evaluate(self.traced.observe, tuple(worlds.state), shape), axis=-1)

    def step(self, worlds: JaxEnvState, actions: jax.Array) -> tuple[JaxEnvState, jax.Array, jax.Array]:
        """One step with auto-reset.

        Args:
            worlds: state of the environments
            actions: choices (N,) integers, or reals (N, dim)

        Returns:
            The next state, rewards (N,), and which episodes ended, (N,) bool.
        """
        # 1. Dynamics; 2. time limit; 3. first states of the next episodes, selected where one ended (as reference.advance).
        state, reward, terminated = self._iterate(worlds.state, self._inputs(actions))
        elapsed = worlds.elapsed + 1
        limit = self.simulator.max_episode_steps
        ended = terminated if limit is None else terminated | (elapsed >= limit)
        episode = worlds.episode + ended.astype(jnp.int32)
        state = jnp.where(ended, self._begin(episode), state)
        return JaxEnvState(state, jnp.where(ended, 0, elapsed), episode), reward, ended

    def _iterate(
        self, state: jax.Array, inputs: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        def once(state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            *after, reward, terminated = self._evaluate(self.traced.step, (*state, *inputs), state.shape[1:])
            return jnp.stack(after), reward, terminated

        if self.compute > 1:
            state = jax.lax.fori_loop(0, self.compute - 1, lambda _, s: once(s)[0], state)
        return once(state)

    def _inputs(self, actions: jax.Array) -> tuple[jax.Array, ...]:
        spec = self.simulator.actions
        if isinstance(spec, Box):
            reals = jnp.moveaxis(actions, -1, 0)
            return tuple(
                jnp.clip(a, low, high) for a, low, high in zip(reals, spec.low, spec.high, strict=True)
            )
        return (actions.astype(self.real),)

    def _begin(self, episode: jax.Array) -> jax.Array:
        indices = jnp.arange(len(episode), dtype=jnp.uint32)
        numbers = uniform(self._word, indices, episode.astype(jnp.uint32), self.simulator.num_draws)
        numbers = tuple(one.astype(self.real) for one in numbers)
        return jnp.stack(self._evaluate(self.traced.start, numbers, episode.shape))

    def _evaluate(
        self, function: Function, given: Sequence[jax.Array], shape: tuple[int, ...]
    ) -> tuple[jax.Array, ...]:
        """Evaluate a traced function on arrays of one shape; constant outputs are broadcast to it."""
        inputs = dict(zip(function.inputs, given, strict=True))
        values: list[Any] = []
        for node in function.nodes:
            if node.op == "input":
                values.append(inputs[str(node.value)])
            elif node.op == "constant":
                values.append(node.value if node.kind == "truth" else self.real(node.value))
            else:
                values.append(_OPS[node.op](*(values[arg] for arg in node.args)))
        return tuple(jnp.broadcast_to(values[output], shape) for output in function.outputs)


def uniform(word: int, indices: jax.Array, episode: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """Random numbers of an episode's start, equal to ``draws.uniform``: ``count`` arrays (N,) float32."""
    found: list[jax.Array] = []
    for block in range(-(-count // 4)):
        w = jnp.full_like(indices, (word + block * draws.BLOCK) % 2**32)
        words = _pcg4d(indices, episode, jnp.full_like(indices, draws.START), w)
        found += [(one >> 8).astype(jnp.float32) * 2.0**-24 for one in words]
    return tuple(found[:count])


def _pcg4d(*words: jax.Array) -> tuple[jax.Array, ...]:
    words = tuple(one * jnp.uint32(draws.MULTIPLIER) + jnp.uint32(draws.INCREMENT) for one in words)
    words = tuple(one ^ (one >> 16) for one in _round(*words))
    return _round(*words)


def _round(x: jax.Array, y: jax.Array, z: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
    x = x + y * w
    y = y + z * x
    z = z + x * y
    w = w + y * z
    return x, y, z, w
