"""Transitions of rollouts, as a replay stores them and as a learner draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.protocols import EnvInfo
from actors.replay import Column, ReplaySchema, Subscription
from actors.rollout import Rollout

OBS, ACTION, REWARD, DISCOUNT = "obs", "action", "reward", "discount"


def transition_schema(info: EnvInfo) -> ReplaySchema:
    """Columns of a transition.

    obs: of s_t and of the state that ``discount`` belongs to, raw; action; reward: discounted sum of n rewards; discount:
    of the value of the later state, 0 if the episode was terminated before it.
    """
    action = np.int64 if info.action.is_discrete else np.float32
    return ReplaySchema(
        (
            Column(name=OBS, dtype=info.obs_dtype, shape=(info.obs_dim,), extra=1),
            Column(name=ACTION, dtype=action, shape=info.action.shape),
            Column(name=REWARD, dtype=np.float32),
            Column(name=DISCOUNT, dtype=np.float32),
        )
    )


SUBSCRIPTIONS = (
    Subscription(column=OBS, length=2),
    Subscription(column=ACTION),
    Subscription(column=REWARD),
    Subscription(column=DISCOUNT),
)
"""What a batch takes of a transition: both observations at once, (B, 2, obs_dim)."""


class Transitions(NamedTuple):
    """A batch of B transitions, on the learner's device.

    Attributes:
        obs: normalised observations                                (B, obs_dim)
        next_obs: of the state that follows, or n steps later       (B, obs_dim)
        actions: as a rollout holds them                            (B, dim), or (B,)
        rewards: discounted sum of up to n rewards                  (B,)
        discounts: of the value of next_obs; 0 after termination    (B,)
        weights: importance weights; None: all 1                    (B,)
    """

    obs: Tensor
    next_obs: Tensor
    actions: Tensor
    rewards: Tensor
    discounts: Tensor
    weights: Tensor | None = None


class _Steps(NamedTuple):
    """Consecutive steps of N environments, (L, N, ...). ``cut``: nothing that follows belongs to the same trajectory."""

    obs: Tensor
    next_obs: Tensor
    actions: Tensor
    rewards: Tensor
    terminated: Tensor
    cut: Tensor


class TransitionAssembler:
    """Turns rollouts into rows of ``transition_schema``.

    With n > 1 the last n - 1 steps of a rollout wait for the next one, whose first steps their returns need. Rollouts of
    collectors may be of other environments each time: there, returns end with the rollout and have fewer rewards.
    """

    def __init__(self, gamma: float, n_step: int) -> None:
        self._gamma, self._n = gamma, n_step
        self._waiting: _Steps | None = None

    def forget(self) -> None:
        """Drop the steps that wait: the next rollout does not continue them."""
        self._waiting = None

    def waiting(self) -> list[Tensor]:
        """The steps that wait, field by field; none where nothing waits."""
        return [] if self._waiting is None else list(self._waiting)

    def load(self, waiting: Sequence[Tensor]) -> None:
        """Inverse of ``waiting``."""
        self._waiting = _Steps(*waiting) if waiting else None

    @torch.inference_mode()
    def rows(self, rollout: Rollout) -> dict[str, Tensor]:
        """The transitions that this rollout completes, in order of time, then environment: (M, ...) by column."""
        steps = _steps_of(rollout)
        if rollout.log_probs is not None:  # of collectors
            steps.cut[-1] = True
        elif self._waiting is not None:
            steps = _Steps(*map(torch.cat, zip(self._waiting, steps, strict=True)))
        count = len(steps.rewards)
        starts = count if rollout.log_probs is not None else max(0, count - self._n + 1)
        if rollout.log_probs is None and self._n > 1:
            self._waiting = _Steps(*(field[starts:].clone() for field in steps))
        return _rows(steps, starts, self._gamma, self._n)


@torch.inference_mode()
def recorded_rows(
    obs: Tensor,
    next_obs: Tensor,
    actions: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    is_last: Tensor,
    gamma: float,
    n_step: int,
) -> dict[str, Tensor]:
    """The transitions of recorded trajectories that follow each other, L steps in all: (L, ...) by column.

    Args:
        obs: before each action                          (L, obs_dim)
        next_obs: after each action                      (L, obs_dim)
        actions: as a rollout holds them                 (L, dim), or (L,)
        rewards: after each action                       (L,)
        terminated: after each action                    (L,) bool
        is_last: whether its trajectory ends with it     (L,) bool
        gamma: discount
        n_step: rewards of a return
    """
    each = (obs, next_obs, actions, rewards, terminated, is_last)
    return _rows(_Steps(*(field.unsqueeze(1) for field in each)), len(rewards), gamma, n_step)


def _rows(steps: _Steps, starts: int, gamma: float, n: int) -> dict[str, Tensor]:
    """The transitions that begin with the first ``starts`` steps."""
    rewards, discounts, last = _returns(steps, starts, gamma, n)
    return {
        OBS: torch.stack((steps.obs[:starts], last), 2).flatten(0, 1),
        ACTION: steps.actions[:starts].flatten(0, 1),
        REWARD: rewards.flatten(0, 1),
        DISCOUNT: discounts.flatten(0, 1),
    }


def _steps_of(rollout: Rollout) -> _Steps:
    """The steps of a rollout, in host memory, with the true observation after each."""
    next_obs = torch.cat((rollout.raw_obs[1:], rollout.last_obs.unsqueeze(0)))
    done = rollout.terminated | rollout.truncated
    # Where an episode ended, its final observation instead of the first one of the next episode.
    if rollout.final_obs is not None:
        next_obs = torch.where(done.unsqueeze(-1), rollout.final_obs, next_obs)
    for step, ids, final in rollout.finals:
        next_obs[step, ids] = final
    found = (rollout.raw_obs, next_obs, rollout.actions, rollout.rewards, rollout.terminated, done)
    return _Steps(*(field.cpu() for field in found))


def _returns(steps: _Steps, starts: int, gamma: float, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """R = sum_{j<k} gamma^j r_{t+j}, the discount gamma^k (0 if terminated), and s_{t+k}, for the first ``starts`` steps.

    k is n, or fewer where the trajectory ends.
    """
    rewards, last = steps.rewards[:starts].clone(), steps.next_obs[:starts]
    terminated, cut = steps.terminated[:starts].clone(), steps.cut[:starts].clone()
    discounts = torch.full_like(rewards, gamma)
    for j in range(1, min(n, len(steps.rewards))):
        # Step t + j continues the return of t unless the trajectory has ended before it. Steps beyond the last one are
        # only asked for after a cut.
        later = _Steps(*(_shifted(field, j, starts) for field in steps))
        goes_on = ~cut
        rewards += goes_on * gamma**j * later.rewards
        discounts = torch.where(goes_on, gamma ** (j + 1), discounts)
        last = torch.where(goes_on.unsqueeze(-1), later.next_obs, last)
        terminated |= goes_on & later.terminated
        cut |= later.cut
    return rewards, discounts * ~terminated, last


def _shifted(field: Tensor, by: int, count: int) -> Tensor:
    """Rows ``by`` to ``by + count`` of a field; the last one again where it has no more."""
    found = field[by : by + count]
    missing = count - len(found)
    return torch.cat((found, field[-1:].expand(missing, *field.shape[1:]))) if missing else found
