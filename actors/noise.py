"""Random numbers that do not depend on the layout: resets, exploration noise, minibatch order.

Each environment has streams of its own, keyed by (seed, global environment index), positioned by iteration or episode.
So N environments draw the same noise on one GMI or spread over several, and a resumed run draws what it would have drawn.
Philox is a counter-based generator: nothing has to be stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Stream = Literal["reset", "exploration", "order"]
_NUMBER: dict[Stream, int] = {"reset": 0, "exploration": 1, "order": 2}


def environment_generator(seed: int, env_index: int, stream: Stream, position: int) -> np.random.Generator:
    """One environment's random numbers of one purpose, from a position (iteration or episode) on.

    Streams never meet: purpose and position are the upper two of the counter's four words, and each has
    2**128 blocks of its own.
    """
    return np.random.Generator(_philox(seed, env_index, stream, position))


def environment_generators(
    seed: int, env_indices: Iterable[int], stream: Stream, position: int
) -> Iterator[np.random.Generator]:
    """Those of several environments in turn, each valid until the next is asked for.

    It is one generator that is moved: making another costs four times as much.
    """
    bits = _philox(seed, 0, stream, position)
    generator, begin = np.random.Generator(bits), bits.state
    for env_index in env_indices:
        begin["state"]["key"] = _key(seed, env_index)
        bits.state = begin
        yield generator


def _philox(seed: int, env_index: int, stream: Stream, position: int) -> np.random.Philox:
    counter = np.array([0, 0, _NUMBER[stream], position], dtype=np.uint64)
    return np.random.Philox(key=_key(seed, env_index), counter=counter)


def _key(seed: int, env_index: int) -> NDArray[np.uint64]:
    return np.array([seed % 2**64, env_index], dtype=np.uint64)


def exploration_noise(
    *, seed: int, first_env_index: int, num_envs: int, iteration: int, num_steps: int, dim: int, gumbel: bool
) -> Tensor:
    """Standard normal noise (Gaussian policies) or Gumbel noise (categorical ones), (num_steps, num_envs, dim) float32."""
    noise = np.empty((num_steps, num_envs, dim), dtype=np.float32)
    envs = range(first_env_index, first_env_index + num_envs)
    for i, generator in enumerate(environment_generators(seed, envs, "exploration", iteration)):
        if gumbel:
            noise[:, i] = generator.gumbel(size=(num_steps, dim))
        else:
            noise[:, i] = generator.standard_normal((num_steps, dim), dtype=np.float32)
    return torch.from_numpy(noise)


def minibatch_orders(
    *,
    seed: int,
    first_env_index: int,
    num_envs: int,
    iteration: int,
    num_steps: int,
    num_epochs: int,
    num_minibatches: int,
) -> Tensor:
    """Which samples each minibatch takes: indices into a flattened (T, N) batch.

    Shape (num_epochs, num_minibatches, T * N / num_minibatches), int64.

    Every environment's steps are shuffled by themselves and dealt evenly: a minibatch holds T / num_minibatches steps of
    every environment. The union over GMIs of their m-th minibatches is thus the same set for every layout of the same
    environments, which makes 1 GMI of 2N and 2 GMIs of N the same algorithm.

    Raises:
        ValueError: num_minibatches does not divide num_steps.
    """
    if num_steps % num_minibatches:
        raise ValueError(f"num_minibatches={num_minibatches} does not divide rollout_length={num_steps}")
    keys = np.empty((num_epochs, num_steps, num_envs))
    envs = range(first_env_index, first_env_index + num_envs)
    for i, generator in enumerate(environment_generators(seed, envs, "order", iteration)):
        keys[:, :, i] = generator.random((num_epochs, num_steps))
    steps = np.argsort(keys, axis=1)
    flat = steps * num_envs + np.arange(num_envs)
    return torch.from_numpy(flat.reshape(num_epochs, num_minibatches, -1))
