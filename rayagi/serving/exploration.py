"""Exploration noise of a policy that serves."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from actors.noise import exploration_noise
from rayagi.algorithms.policy import NetworkPolicy
from rayagi.serving.program import ServingJob

_STEPS = 32
"""That noise is drawn for at a time."""


class Exploration:
    """Noise step by step; each environment's own, whichever GMI draws it."""

    def __init__(self, seed: int, first_env_index: int, num_envs: int, dim: int, *, gumbel: bool) -> None:
        self._seed, self._first_env_index, self._num_envs = seed, first_env_index, num_envs
        self._dim, self._gumbel = dim, gumbel
        self._block = 0
        self._steps: Iterator[Tensor] = iter(())

    def next(self) -> Tensor:
        """Of one step, (N, output_dim) float32, on the host."""
        step = next(self._steps, None)
        if step is None:
            noise = exploration_noise(
                seed=self._seed,
                first_env_index=self._first_env_index,
                num_envs=self._num_envs,
                iteration=self._block,
                num_steps=_STEPS,
                dim=self._dim,
                gumbel=self._gumbel,
            )
            self._block += 1
            self._steps = iter(noise.unbind(0))
            step = next(self._steps)
        return step


def exploration_of(
    job: ServingJob, policy: NetworkPolicy, *, num_envs: int, first_env_index: int
) -> Exploration | None:
    """The noise of a GMI's environments; None where the policy's mode is served."""
    if job.greedy:
        return None
    action = policy.action
    dim = action.num_choices if action.kind == "discrete" else action.dim
    return Exploration(job.seed, first_env_index, num_envs, dim, gumbel=policy.model.head.gumbel_noise)
