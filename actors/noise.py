"""Layout-independent random numbers: resets, exploration noise, minibatch order.

Each environment has its own streams of Philox, a counter-based generator. The key is (seed, global environment index), the
position is the iteration or episode. So N environments draw the same noise on one GMI or on several, and a resumed run
draws the same numbers without stored generator state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Stream = Literal["reset", "exploration", "order", "noise_level"]
_NUMBER: dict[Stream, int] = {"reset": 0, "exploration": 1, "order": 2, "noise_level": 3}


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


def epsilon_greedy_noise(
    *,
    seed: int,
    first_env_index: int,
    num_envs: int,
    iteration: int,
    num_steps: int,
    num_choices: int,
    epsilon: float,
) -> Tensor:
    """Noise with which argmax(values + noise) is epsilon-greedy, (num_steps, num_envs, num_choices) float32.

    With probability ``epsilon`` it is infinite at a uniformly chosen action; else it is zero.
    """
    uniforms = np.empty((num_steps, num_envs, 2))
    envs = range(first_env_index, first_env_index + num_envs)
    for i, generator in enumerate(environment_generators(seed, envs, "exploration", iteration)):
        uniforms[:, i] = generator.random((num_steps, 2))
    explores, choices = uniforms[..., 0] < epsilon, (uniforms[..., 1] * num_choices).astype(np.int64)
    noise = np.zeros((num_steps, num_envs, num_choices), dtype=np.float32)
    np.put_along_axis(noise, choices[..., None], np.where(explores, np.inf, 0.0)[..., None], -1)
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
    sequence_length: int = 1,
) -> Tensor:
    """Sample indices of each minibatch, into a flattened (T, N) batch.

    Shape (num_epochs, num_minibatches, T * N / num_minibatches), int64. A minibatch of n sequences of L steps is (L, n),
    flattened.

    Each environment's sequences are shuffled separately, and a minibatch has an equal share of every environment's. So the
    union of all GMIs' m-th minibatches is the same set for every layout of the same environments: 1 GMI of 2N and 2 GMIs of
    N run the same algorithm. If an environment has too few sequences, a group of neighbours is shuffled together.

    Raises:
        ValueError: sequence_length does not divide num_steps, or the environments do not form whole groups.
    """
    # The fewest environments whose sequences can be shared equally by all minibatches.
    group = num_minibatches // math.gcd(num_steps // sequence_length, num_minibatches)
    if num_steps % sequence_length or num_envs % group or first_env_index % group:
        raise ValueError(
            f"sequences of {sequence_length} of {num_steps} steps and {num_minibatches} minibatches need a multiple of "
            f"{group} environments, not {num_envs} from {first_env_index}"
        )
    per_env = num_steps // sequence_length
    groups = num_envs // group
    # One random key for each sequence of a group; sequences in the order of their keys go to the minibatches in turn.
    keys = np.empty((num_epochs, group * per_env, groups))
    envs = range(first_env_index, first_env_index + num_envs, group)
    for i, generator in enumerate(environment_generators(seed, envs, "order", iteration)):
        keys[:, :, i] = generator.random((num_epochs, group * per_env))
    chosen = np.argsort(keys, axis=1)
    # Sequence q of a group is the (q % per_env)-th of the group's environment q // per_env.
    env = chosen // per_env + group * np.arange(groups)
    starts = chosen % per_env * sequence_length * num_envs + env
    starts = starts.reshape(num_epochs, num_minibatches, 1, -1)
    flat = starts + num_envs * np.arange(sequence_length).reshape(-1, 1)
    return torch.from_numpy(flat.reshape(num_epochs, num_minibatches, -1))
