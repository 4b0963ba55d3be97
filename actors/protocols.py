"""The roles' interfaces, in one file. T is time steps of a rollout, N environments of one GMI; batches are time first.

The loop that a ``dp_only`` GMI runs, written against these interfaces::

    obs = env.reset()
    for t in range(T):
        actions = policy.act(obs)
        step = env.step(actions)
        obs = step.obs
    learner.update(rollout)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:  # plans, and what only watches, do not need torch; rollout needs EnvInfo
    from torch import Tensor

    from actors.policy_tensors import PolicyTensors
    from actors.rollout import Episodes, Rollout
    from collectives.barrier_progress import BarrierProgress

StateDict = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionSpec:
    """What a policy may do: a box of ``dim`` reals, one of ``num_choices`` choices, or ``dim`` choices at once."""

    kind: Literal["continuous", "discrete", "multi_discrete"]
    dim: int
    """Size of one action: reals in the box; 1 for a discrete action; choices made at once for a multi-discrete one."""
    num_choices: int = 0
    """Options of a discrete action; 0 for the others."""
    choices: tuple[int, ...] = ()
    """Options of each choice of a multi-discrete action, (dim,)."""
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def is_discrete(self) -> bool:
        """Whether actions are whole numbers, each counted from 0."""
        return self.kind != "continuous"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one action: () for a discrete one, else (dim,)."""
        return () if self.kind == "discrete" else (self.dim,)

    @property
    def output_dim(self) -> int:
        """What a policy network puts out: means, or logits of all options."""
        return {"continuous": self.dim, "discrete": self.num_choices, "multi_discrete": sum(self.choices)}[
            self.kind
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObsPart:
    """A part of a flat observation: a vector, or the pixels of an image."""

    size: int
    """Numbers in the flat observation."""
    shape: tuple[int, ...]
    """Of an image, (H, W, C) or, channels first, (C, H, W); of a vector, (size,)."""
    channels_last: bool = True
    scale: float = 1.0
    """Factor that brings pixels to [0, 1]."""

    @property
    def is_image(self) -> bool:
        """Whether convolutions encode it."""
        return len(self.shape) == 3

    @property
    def channels_height_width(self) -> tuple[int, int, int]:
        """Of an image."""
        first, second, third = self.shape
        return (third, first, second) if self.channels_last else (first, second, third)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvInfo:
    """What a policy and a report need to know of an environment."""

    env_id: str
    engine: str
    obs_dim: int
    action: ActionSpec
    max_episode_steps: int | None
    """Registered time limit; None where the environment has none."""
    obs_parts: tuple[ObsPart, ...] = ()
    """How the flat observation is made up, where images are among it; empty: it is one vector."""
    reward_terms: tuple[str, ...] = ()
    """Names of what its rewards are made of; empty where it does not tell."""


@dataclass(slots=True)
class StepResult:
    """What one step of N environments returned, after auto-reset in the same step.

    Attributes:
        obs: what to act on next; first observation of the new episode where one ended   (N, obs_dim) float32
        rewards: reward of this step                                                     (N,) float32
        terminated: the task ended (no bootstrap)                                        (N,) bool
        truncated: the time limit cut the episode (bootstrap from final_obs)             (N,) bool
        final_ids: environments whose episode ended on this step                         (K,) int64
        final_obs: their true last observation, before the reset                         (K, obs_dim) float32
        reward_terms: what the rewards are made of, by ``EnvInfo.reward_terms``; None where there are no terms  (N, terms)
    """

    obs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_ids: Tensor
    final_obs: Tensor
    reward_terms: Tensor | None = None


class VecEnv(Protocol):
    """``obs = env.reset()``; then ``env.step(actions)`` for ever: finished environments reset themselves.

    Environment ``i`` draws its randomness from ``(seed, first_env_index + i, episode)`` alone, so that the same
    global environment behaves alike whichever GMI hosts it. One that counts what goes wrong in its simulations has an
    attribute ``sim_errors``, how many times what, by name, since it was made; others raise.
    """

    num_envs: int
    info: EnvInfo
    resumes_episodes: bool
    """Whether ``load_state_dict`` goes on within the saved episodes; else it starts new ones."""

    def reset(self) -> Tensor:
        """Start a new episode everywhere. Returns (N, obs_dim) float32."""
        ...

    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment. ``actions``: (N, dim) float32, or (N,) int64 when discrete."""
        ...

    def state_dict(self) -> StateDict:
        """What a later process needs to go on from here; engines that cannot say so return episode counters only."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Tensor:
        """Go on from a saved state. Returns the observation to act on next, (N, obs_dim) float32."""
        ...

    def close(self) -> None:
        """Release threads and simulators."""
        ...


@runtime_checkable
class RolloutEnv(VecEnv, Protocol):
    """Environments that act, too: a whole rollout in one call, on the host."""

    def collect_rollout(
        self, rollout: Rollout, policy: PolicyTensors, iteration: int, running: Tensor
    ) -> Episodes:
        """What T steps with the policy give, whose exploration noise is at ``iteration``.

        Args:
            rollout: filled but for ``log_probs`` and ``running_returns``
            policy: on the host
            iteration: position of the noise
            running: return of each running episode, brought forward    (N,) float64

        Returns:
            the episodes that ended, in the order of steps and then environments.
        """
        ...


@runtime_checkable
class CoreSharingEnv(VecEnv, Protocol):
    """Environments of which some can be stepped on cores of other GMIs, while those have nothing to do."""

    def use_idle_cores(self, cores: Mapping[int, Collection[int]], barrier_progress: BarrierProgress) -> bool:
        """From now on, use cores that are lent. What is computed does not depend on it. Returns whether they are of use.

        Args:
            cores: ids of each lender's logical cores, by rank
            barrier_progress: who waits for this member lends its cores, and does not take them back before this one comes
        """
        ...


class EnvFactory(Protocol):
    """Makes the environments of one GMI. ``first_env_index`` counts over all GMIs; picklable."""

    def __call__(self, *, num_envs: int, first_env_index: int, seed: int, num_threads: int) -> VecEnv:
        """Make the environments."""
        ...


@dataclass(slots=True)
class IterationResult:
    """What one iteration of one GMI did. Values are named in rayagi.monitoring.catalogue."""

    iteration: int
    metrics: dict[str, float]
    episode_returns: list[float] = field(default_factory=list)
    episode_lengths: list[int] = field(default_factory=list)
    reward_terms: dict[str, list[float]] = field(default_factory=dict)
    """Sums over each of these episodes, by the names of ``EnvInfo.reward_terms``."""


@dataclass(slots=True)
class EvaluationResult:
    """Episodes run with the policy's mode, without exploration noise."""

    episode_returns: list[float]
    episode_lengths: list[int]

    def mean_return(self) -> float:
        """Mean undiscounted return."""
        return float(np.mean(self.episode_returns))


class Program(Protocol):
    """What a GMI runs: roles wired together. Built inside the GMI's process by a ``ProgramFactory``."""

    def iterate(self) -> IterationResult:
        """One iteration: T steps of every environment, then the update."""
        ...

    def evaluate(self, num_episodes: int, seed: int) -> EvaluationResult:
        """Run whole episodes without learning."""
        ...

    def state_dict(self) -> StateDict:
        """``{"shared": ..., "local": ...}``: what all replicas hold alike, and what is this GMI's own."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; ``local`` may be missing (then environments start anew)."""
        ...

    def close(self) -> None:
        """Release what the program holds."""
        ...


class Workload(Protocol):
    """What a GMI runs that is no reinforcement learning (actors.workload). Built by a ``WorkloadFactory``."""

    def gmi_run(self, *args: Any, **kwargs: Any) -> Any:
        """The main routine, called on every GMI at once."""
        ...

    def close(self) -> None:
        """Release what the workload holds."""
        ...


class Acting(Protocol):
    """What acts through a rollout with a policy as it was when this was made."""

    def __call__(self, t: int, obs: Tensor) -> Tensor:
        """Fill step ``t`` of the rollout but for its outcome.

        Args:
            t: step within the rollout
            obs: raw observations to act on   (N, obs_dim)

        Returns:
            actions on the host, (N, dim) or (N,), valid until the rollout is filled anew.
        """
        ...


class Policy(Protocol):
    """What an agent acts with. ``observe`` normalises; the same normalised tensor goes to the learner."""

    action: ActionSpec

    def observe(self, obs: Tensor) -> Tensor:
        """Raw observations (..., obs_dim) to what the networks see, on the policy's device."""
        ...

    def outputs(self, observed: Tensor) -> Tensor:
        """Distribution parameters, (..., output_dim): means, or logits."""
        ...

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Actions from outputs and noise of the same shape (see actors.noise)."""
        ...

    def mode(self, outputs: Tensor) -> Tensor:
        """The most likely actions."""
        ...

    def acting(self, rollout: Rollout, noise: Tensor) -> Acting | None:
        """A faster way through a rollout than the functions above, where there is one."""
        ...
