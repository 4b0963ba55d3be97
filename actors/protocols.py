"""Interfaces of the roles. T: steps of a rollout; N: environments of one GMI; batches are time first.

The training loop of a ``dp_only`` GMI in terms of these interfaces::

    obs = env.reset()
    for t in range(T):
        actions = policy.act(obs)
        step = env.step(actions)
        obs = step.obs
    learner.update(rollout)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:  # planning and monitoring import this without torch; rollout imports EnvInfo
    from torch import Tensor

    from actors.policy_tensors import PolicyTensors
    from actors.rollout import Episodes, Rollout

StateDict = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionSpec:
    """Action space: a box of ``dim`` reals, one of ``num_choices`` options, or ``dim`` discrete choices at once."""

    kind: Literal["continuous", "discrete", "multi_discrete"]
    dim: int
    """Size of one action: reals of a box; 1 for a discrete action; number of choices of a multi-discrete one."""
    num_choices: int = 0
    """Options of a discrete action; 0 for the others."""
    choices: tuple[int, ...] = ()
    """Options of each choice of a multi-discrete action, (dim,)."""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    starts: tuple[int, ...] = field(default=(), compare=False)
    """The environment's number of the first option of each choice, (dim,); empty: 0. Policies and datasets count from 0, so
    spaces that differ in this alone are equal to them."""
    num_outputs: int | None = None
    """Outputs of a policy network whose head needs another number than usual; None: the usual one."""

    @property
    def is_discrete(self) -> bool:
        """Whether actions are integers, each counted from 0."""
        return self.kind != "continuous"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one action: () for a discrete one, else (dim,)."""
        return () if self.kind == "discrete" else (self.dim,)

    @property
    def output_dim(self) -> int:
        """Number of outputs of a policy network: usually means, or logits of all options."""
        if self.num_outputs is not None:
            return self.num_outputs
        return {"continuous": self.dim, "discrete": self.num_choices, "multi_discrete": sum(self.choices)}[
            self.kind
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObsPart:
    """A part of a flat observation: a vector, or the pixels of an image."""

    size: int
    """Number of elements in the flat observation."""
    shape: tuple[int, ...]
    """Shape of an image, (H, W, C) or, channels first, (C, H, W); of a vector, (size,)."""
    channels_last: bool = True
    scale: float = 1.0
    """Factor that brings pixels to [0, 1]."""
    is_bytes: bool = False
    """Whether pixels are whole numbers from 0 to 255."""

    @property
    def is_image(self) -> bool:
        """Whether it is an image, which a CNN encodes."""
        return len(self.shape) == 3

    @property
    def channels_height_width(self) -> tuple[int, int, int]:
        """(C, H, W) of an image."""
        first, second, third = self.shape
        return (third, first, second) if self.channels_last else (first, second, third)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObsLeaf:
    """An array of an observation that is no vector."""

    path: tuple[str | int, ...]
    """Keys of dicts and places in tuples that lead to it; empty: it is the observation."""
    shape: tuple[int, ...]
    choices: tuple[int, ...] = ()
    """Options of each whole number in it, which is one-hot in the flat observation; empty: its numbers are taken as they
    are."""
    starts: tuple[int, ...] = ()
    """First option of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvInfo:
    """Description of an environment, for policies and reports."""

    env_id: str
    engine: str
    obs_dim: int
    action: ActionSpec
    max_episode_steps: int | None
    """Registered time limit; None where the environment has none."""
    obs_parts: tuple[ObsPart, ...] = ()
    """Layout of a flat observation with images; empty: it is one vector."""
    obs_members: tuple[tuple[str, int], ...] = ()
    """Keys of a Dict observation and their numbers of columns, in the order of the flat observation."""
    obs_leaves: tuple[ObsLeaf, ...] = ()
    """Arrays of an observation that is no vector already, such as a Dict, an image or a choice, in the order of the flat
    one; empty: it is one, or has members that are no arrays of numbers."""
    reward_terms: tuple[str, ...] = ()
    """Names of the terms of the reward; empty if the environment does not report them."""
    frames: int = 1
    """Frames of equal size that an observation stacks, oldest first: the next one has all but the first, and one more."""

    @property
    def obs_dtype(self) -> np.dtype[Any]:
        """Of raw observations: uint8 where all are images of bytes, else float32."""
        are_bytes = bool(self.obs_parts) and all(part.is_bytes for part in self.obs_parts)
        return np.dtype(np.uint8 if are_bytes else np.float32)

    @property
    def obs_bytes(self) -> int:
        """Of one raw observation."""
        return self.obs_dtype.itemsize * self.obs_dim


@dataclass(slots=True)
class StepResult:
    """Result of one step of N environments, with same-step auto-reset. Observations have ``EnvInfo.obs_dtype``.

    Attributes:
        obs: observation to act on next; after an episode end, the new episode's first   (N, obs_dim)
        rewards: reward of this step                                                     (N,) float32
        terminated: the task ended (no bootstrap)                                        (N,) bool
        truncated: the time limit cut the episode (bootstrap from final_obs)             (N,) bool
        final_ids: environments whose episode ended on this step                         (K,) int64
        final_obs: their final observation, before the reset                             (K, obs_dim)
        reward_terms: terms of the rewards, by ``EnvInfo.reward_terms``; None without terms    (N, terms)
    """

    obs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_ids: Tensor
    final_obs: Tensor
    reward_terms: Tensor | None = None


class VecEnv(Protocol):
    """Vectorized environments with auto-reset: call ``reset`` once, then only ``step``.

    Environment ``i`` draws its randomness from ``(seed, first_env_index + i, episode)`` alone, so it behaves the same in
    whichever GMI it runs. An environment that counts simulation errors has an attribute ``sim_errors``: counts by name
    since its construction. Others raise.
    """

    num_envs: int
    info: EnvInfo
    resumes_episodes: bool
    """Whether ``load_state_dict`` continues the saved episodes; else it starts new ones."""

    def reset(self) -> Tensor:
        """Start a new episode in every environment. Returns (N, obs_dim) of ``EnvInfo.obs_dtype``."""

    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment. ``actions``: (N, dim) float32, or (N,) int64 when discrete."""

    def state_dict(self) -> StateDict:
        """State for a later restore; engines that do not expose their state return episode counters only."""

    def load_state_dict(self, state: Mapping[str, Any]) -> Tensor:
        """Restore a saved state. Returns the observation to act on next, (N, obs_dim) float32."""

    def close(self) -> None:
        """Release threads and simulators: at once, or at the end of the call in progress. Safe to call twice."""


@runtime_checkable
class RolloutEnv(VecEnv, Protocol):
    """Environments that also evaluate the policy: a whole rollout in one call, on the host."""

    def collect_rollout(
        self, rollout: Rollout, policy: PolicyTensors, iteration: int, running: Tensor
    ) -> Episodes:
        """Fill a rollout with T steps of the policy.

        Args:
            rollout: to fill, except ``log_probs`` and ``running_returns``
            policy: on the host
            iteration: position of the exploration noise
            running: return of each running episode; updated in place    (N,) float64

        Returns:
            the episodes that ended, ordered by step, then environment.
        """


class EnvFactory(Protocol):
    """Makes the environments of one GMI. ``first_env_index`` counts over all GMIs; picklable."""

    def __call__(self, *, num_envs: int, first_env_index: int, seed: int, num_threads: int) -> VecEnv:
        """Make the environments."""


@dataclass(slots=True)
class IterationResult:
    """Result of one iteration of one GMI. Metrics are named in rayagi.monitoring.catalogue."""

    iteration: int
    metrics: dict[str, float]
    episode_returns: list[float] = field(default_factory=list)
    episode_lengths: list[int] = field(default_factory=list)
    reward_terms: dict[str, list[float]] = field(default_factory=dict)
    """Sums of each reward term over each of these episodes, by name."""
    histograms: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Counts by powers of two, named in the catalogue. Bin 0: values of at most 0; bin b: 2**(b - 1) to 2**b - 1."""
    notes: tuple[str, ...] = ()
    """What to say to the user."""


@dataclass(slots=True)
class EvaluationResult:
    """Episodes run with the policy's mode, without exploration noise."""

    episode_returns: list[float]
    episode_lengths: list[int]
    num_cut: int = 0
    """Those that were cut, since they did not end and the task has no time limit."""

    def mean_return(self) -> float:
        """Mean undiscounted return."""
        return float(np.mean(self.episode_returns))


class Program(Protocol):
    """What a GMI runs: its connected roles. Built inside the GMI's process by a ``ProgramFactory``."""

    def iterate(self) -> IterationResult:
        """One iteration: T steps of every environment, then the update."""

    def evaluate(self, num_episodes: int, seed: int) -> EvaluationResult:
        """Run whole episodes without learning."""

    def state_dict(self) -> StateDict:
        """``{"shared": ..., "local": ...}``: state that is equal on all replicas, and this GMI's own."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; without ``local``, environments restart."""

    def close(self) -> None:
        """Release what the program holds."""


class Workload(Protocol):
    """A user-defined workload of a GMI, other than reinforcement learning (rayagi.programs)."""

    def gmi_run(self, *args: Any, **kwargs: Any) -> Any:
        """The main routine, called on every GMI at once."""

    def close(self) -> None:
        """Release what the workload holds."""


class Acting(Protocol):
    """Acts through a rollout with the policy's parameters at the time of construction."""

    def __call__(self, t: int, obs: Tensor) -> Tensor:
        """Fill the agent's fields of step ``t`` of the rollout.

        Args:
            t: step within the rollout
            obs: raw observations to act on   (N, obs_dim)

        Returns:
            actions on the host, (N, dim) or (N,), valid until the next rollout.
        """


class Policy(Protocol):
    """An agent's policy. ``observe`` normalises; the learner trains on the same normalised tensor."""

    action: ActionSpec
    state_dim: int
    """Numbers of one environment's state of a recurrent policy; 0: not recurrent."""

    def observe(self, obs: Tensor) -> Tensor:
        """Normalise raw observations (..., obs_dim), on the policy's device."""

    def outputs(self, observed: Tensor) -> Tensor:
        """Distribution parameters, (..., output_dim): means, or logits."""

    def step(self, observed: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """A recurrent policy's distribution parameters (N, output_dim), and its states (N, state_dim) after the step."""

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Actions from outputs and noise of the same shape (see actors.rollout)."""

    def noise(self, num_steps: int, num_envs: int, *, seed: int, first_env_index: int, number: int) -> Tensor:
        """Exploration noise of rollout ``number``, (T, N, output_dim) float32, on the policy's device."""

    def mode(self, outputs: Tensor) -> Tensor:
        """The most likely actions."""

    def environment_actions(self, actions: Tensor) -> Tensor:
        """What the environment receives for actions of ``sample`` or ``mode``; only a squashed Gaussian changes them."""

    def acting(self, rollout: Rollout, noise: Tensor) -> Acting | None:
        """A compiled kernel that replaces the functions above for a rollout; None if there is none."""
