"""The data collection loop in XLA: K steps of simulation, inference and sampling as one scan in one call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from experiments.fusion.collectors import CHOICES, OBS_DIM, SIMULATOR
from experiments.fusion.purejax import forward, network
from experiments.fusion.settings import Settings
from experiments.fusion.variants.jax_variant import launches
from experiments.fusion.variants.jax_world import JaxEnvState, JaxWorld
from experiments.fusion.variants.variant import Counts


class XlaCollector:
    """Implements Collector."""

    def __init__(self, num_envs: int, steps: int) -> None:
        world = JaxWorld(SIMULATOR)
        key, self._key = jax.random.split(jax.random.key(0))
        self._policy = network(key, (OBS_DIM, *Settings().hidden, CHOICES), 0.01)

        def several(model: Any, worlds: JaxEnvState, key: jax.Array) -> tuple[JaxEnvState, jax.Array, Any]:
            def one(worlds: JaxEnvState, key: jax.Array) -> tuple[JaxEnvState, Any]:
                # a ~ softmax(logits of pi(obs)); then dynamics with auto-reset. The scan keeps K rows.
                obs = world.observe(worlds)
                actions = jax.random.categorical(key, forward(model, obs))
                after, rewards, ended = world.step(worlds, actions)
                return after, (obs, actions, rewards, ended)

            key, here = jax.random.split(key)
            worlds, rows = jax.lax.scan(one, worlds, jax.random.split(here, steps))
            return worlds, key, rows

        self.compiled = jax.jit(several, donate_argnums=(1, 2))
        self._worlds = world.start(num_envs)
        self._rows: Any = jnp.zeros(())

    def collect(self) -> object:
        """K steps; asynchronous."""
        self._worlds, self._key, self._rows = self.compiled(self._policy, self._worlds, self._key)
        return self._rows

    def wait(self) -> None:
        """Return when they are done."""
        jax.block_until_ready((self._worlds, self._rows))

    def counts(self) -> Counts:
        """One call; kernels as in the compiled program."""
        program = self.compiled.lower(self._policy, self._worlds, self._key).compile().as_text()
        return Counts(1, launches(program))
