"""Rollout buffer, T steps of N environments, and layout-independent random numbers: resets, noise, minibatch order.

Each environment has its own streams of Philox, a counter-based generator. The key is (seed, global environment index), the
position is the iteration or episode. So N environments draw the same noise on one GMI or on several, and a resumed run
draws the same numbers without stored generator state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.protocols import EnvInfo
from placement.errors import counted


def obs_type(info: EnvInfo) -> torch.dtype:
    """``EnvInfo.obs_dtype`` as torch has it."""
    return torch.uint8 if info.obs_dtype == np.uint8 else torch.float32


class StepRow(NamedTuple):
    """Views of one step of a rollout; names and shapes as in Rollout without the first dimension."""

    raw_obs: Tensor
    obs: Tensor
    outputs: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor


class Episodes(NamedTuple):
    """Undiscounted returns and lengths of episodes that ended, in order."""

    returns: list[float]
    lengths: list[int]


@dataclass(slots=True)
class Rollout:
    """T steps of N environments, time first. ``outputs`` are the policy's distribution parameters.

    A rollout of a remote collector has ``log_probs`` and ``running_returns``; the learner does not use its ``obs`` and
    ``outputs``. With the simulator on a GPU, all tensors are there, and ``final_obs`` replaces ``finals``, whose size would
    need a synchronization with the host.

    Attributes:
        raw_obs: observations as the simulator returned them                (T, N, obs_dim) EnvInfo.obs_dtype, host
        obs: normalised observations, input of the networks                 (T, N, obs_dim) EnvInfo.obs_dtype
        outputs: distribution parameters                                    (T, N, output_dim) float32
        actions: actions taken, before a head squashes them                 (T, N, dim) float32 or int64, or (T, N) int64
        rewards: reward after each action, not scaled                       (T, N) float32, host
        terminated: the task ended on this step                             (T, N) bool, host
        truncated: the time limit cut the episode on this step              (T, N) bool, host
        last_obs: observations after the last step; the next rollout's first   (N, obs_dim) EnvInfo.obs_dtype, host
        finals: per step with ended episodes: step, environment ids, final observations
        log_probs: log probability of each action under the behaviour policy   (T, N) float32
        running_returns: discounted return of the episode so far, at each step (T, N) float32, host
        final_obs: observation after each action, before any reset          (T, N, obs_dim) EnvInfo.obs_dtype
        states: of a recurrent policy, before every L-th step               (T / L, N, state_dim) float32
    """

    raw_obs: Tensor
    obs: Tensor
    outputs: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    last_obs: Tensor
    finals: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)
    log_probs: Tensor | None = None
    running_returns: Tensor | None = None
    final_obs: Tensor | None = None
    states: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        num_steps: int,
        num_envs: int,
        info: EnvInfo,
        device: torch.device,
        *,
        all_there: bool = False,
        state_shape: tuple[int, int] | None = None,
    ) -> Rollout:
        """A zeroed buffer. The simulator's tensors are on the host, the agent's on ``device``; or all on ``device``.

        ``state_shape``: sequences of an environment and ``state_dim``, for a recurrent policy.
        """
        host = device if all_there else torch.device("cpu")
        shape = (num_steps, num_envs)
        action = info.action
        dtype, obs_dtype = torch.int64 if action.is_discrete else torch.float32, obs_type(info)
        return cls(
            raw_obs=torch.zeros((*shape, info.obs_dim), dtype=obs_dtype, device=host),
            obs=torch.zeros((*shape, info.obs_dim), dtype=obs_dtype, device=device),
            outputs=torch.zeros((*shape, action.output_dim), device=device),
            actions=torch.zeros((*shape, *action.shape), dtype=dtype, device=device),
            rewards=torch.zeros(shape, device=host),
            terminated=torch.zeros(shape, dtype=torch.bool, device=host),
            truncated=torch.zeros(shape, dtype=torch.bool, device=host),
            last_obs=torch.zeros((num_envs, info.obs_dim), dtype=obs_dtype, device=host),
            final_obs=torch.zeros((*shape, info.obs_dim), dtype=obs_dtype, device=device)
            if all_there
            else None,
            states=None
            if state_shape is None
            else torch.zeros((state_shape[0], num_envs, state_shape[1]), device=device),
        )

    def steps(self) -> Iterator[StepRow]:
        """Views of each step in turn, unbound once per rollout: indexing costs as much as copying a small row."""
        fields = (getattr(self, name).unbind(0) for name in StepRow._fields)
        return map(StepRow, *fields)

    def gather_finals(self, final_obs: Tensor) -> tuple[Tensor, Tensor]:
        """Fill ``finals`` from the steps where episodes ended.

        Args:
            final_obs: final observations, valid at those steps    (T, N, obs_dim)

        Returns:
            steps and environments where episodes ended, (K,) int64 each, ordered by step, then environment.
        """
        steps, ids = (self.terminated | self.truncated).nonzero(as_tuple=True)
        at, counts = torch.unique_consecutive(steps, return_counts=True)
        sizes = counts.tolist()
        parts = ids.split(sizes), final_obs[steps, ids].split(sizes)
        self.finals = list(zip(at.tolist(), *parts, strict=True))
        return steps, ids

    @property
    def num_steps(self) -> int:
        """T."""
        return self.rewards.shape[0]

    @property
    def num_envs(self) -> int:
        """N."""
        return self.rewards.shape[1]

    @property
    def sequence_length(self) -> int:
        """L: steps between two stored states; 1 without states, whose samples are independent."""
        return 1 if self.states is None else self.num_steps // len(self.states)


Stream = Literal["reset", "exploration", "order", "noise_level"]
_NUMBER: dict[Stream, int] = {"reset": 0, "exploration": 1, "order": 2, "noise_level": 3}


def environment_generator(seed: int, env_index: int, stream: Stream, position: int) -> np.random.Generator:
    """Generator of one environment and one stream, starting at a position (iteration or episode).

    Streams are disjoint: stream number and position are the upper two of the counter's four words, and each has
    2**128 blocks.
    """
    key = np.array([seed % 2**64, env_index], dtype=np.uint64)
    counter = np.array([0, 0, _NUMBER[stream], position], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def environment_generators(
    seed: int, env_indices: Iterable[int], stream: Stream, position: int
) -> Iterator[np.random.Generator]:
    """The generators of several environments in turn, each valid until the next is requested.

    One generator is repositioned: constructing another costs four times as much.
    """
    generator = environment_generator(seed, 0, stream, position)
    begin = generator.bit_generator.state
    for env_index in env_indices:
        begin["state"]["key"][1] = env_index
        generator.bit_generator.state = begin
        yield generator


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
            f"sequences of {sequence_length} of {counted(num_steps, 'step')} and "
            f"{counted(num_minibatches, 'minibatch', 'minibatches')} need a multiple of "
            f"{counted(group, 'environment')}, not {num_envs} from {first_env_index}"
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
