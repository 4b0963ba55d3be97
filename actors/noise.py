"""Layout-independent random numbers: resets, exploration noise, minibatch order.

Each environment has its own streams of Philox, a counter-based generator. The key is (seed, global environment index), the
position is the iteration or episode. So N environments draw the same noise on one GMI or on several, and a resumed run
draws the same numbers without stored generator state.
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
    """Generator of one environment and one stream, starting at a position (iteration or episode).

    Streams are disjoint: stream number and position are the upper two of the counter's four words, and each has
    2**128 blocks.
    """
    return np.random.Generator(_philox(seed, env_index, stream, position))


def environment_generators(
    seed: int, env_indices: Iterable[int], stream: Stream, position: int
) -> Iterator[np.random.Generator]:
    """The generators of several environments in turn, each valid until the next is requested.

    One generator is repositioned: constructing another costs four times as much.
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
    """Sample indices of each minibatch, into a flattened (T, N) batch.

    Shape (num_epochs, num_minibatches, T * N / num_minibatches), int64.

    Each environment's steps are shuffled separately, and a minibatch has T / num_minibatches steps of every environment.
    So the union of all GMIs' m-th minibatches is the same set for every layout of the same environments: 1 GMI of 2N and
    2 GMIs of N run the same algorithm.

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
