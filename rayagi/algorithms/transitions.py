"""Transitions of rollouts, as a replay stores them and as a learner draws them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from actors.protocols import EnvInfo
from actors.replay import Column, ReplaySchema, Subscription, SubSequences, Uniform
from actors.rollout import Rollout
from rayagi.config.off_policy import OffPolicySpec
from rayagi.envs.errors import FrameStackError

OBS, NEXT_OBS, ACTION, REWARD, DISCOUNT, LATER = "obs", "next_obs", "action", "reward", "discount", "later"


@dataclass(frozen=True, slots=True)
class TransitionLayout:
    """How a replay holds transitions: a row is up to ``steps`` consecutive ones of one episode.

    The later state of step t is observation t + ``reach`` of its row, which so has each observation once. Behind an
    episode's end its last one is repeated.

    Of observations that stack ``frames`` each frame is there once: observation t is frames t to t + ``frames`` - 1 of its
    row. Since no frame is repeated behind an episode's end, each step has a column for the steps to its later state.
    """

    info: EnvInfo
    steps: int
    reach: int
    frames: int = 1

    @classmethod
    def of(cls, info: EnvInfo, spec: OffPolicySpec) -> TransitionLayout:
        """That of an algorithm's replay."""
        steps, reach = spec.row_form(info.max_episode_steps)
        return cls(info, steps, reach, info.frames if steps > 1 else 1)

    @property
    def schema(self) -> ReplaySchema:
        """Columns of a row.

        obs: raw, or frames of it; action; reward: discounted sum of n rewards; discount: of the value of the later state, 0
        if the episode was terminated before it; of frames, later: steps to that state.
        """
        info = self.info
        action = np.int64 if info.action.is_discrete else np.float32
        extra = self.reach + self.frames - 1
        columns = (
            Column(name=OBS, dtype=info.obs_dtype, shape=(info.obs_dim // self.frames,), extra=extra),
            Column(name=ACTION, dtype=action, shape=info.action.shape),
            Column(name=REWARD, dtype=np.float32),
            Column(name=DISCOUNT, dtype=np.float32),
            *([Column(name=LATER, dtype=np.int32)] if self.frames > 1 else []),
        )
        return ReplaySchema(columns, self.steps)

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        """What a batch takes of a transition."""
        observed = (Subscription(column=OBS), Subscription(column=OBS, offset=self.reach, name=NEXT_OBS))
        if self.frames > 1:
            # One window from the first frame of the state to the last that its later state may have.
            window = Subscription(column=OBS, length=self.frames + self.reach)
            observed = (window, Subscription(column=LATER))
        return (*observed, *(Subscription(column=name) for name in (ACTION, REWARD, DISCOUNT)))

    def batch(self, size: int) -> dict[str, Tensor]:
        """Host memory for what a batch takes of ``size`` transitions, by name."""
        columns, found = {column.name: column for column in self.schema.columns}, {}
        for wanted in self.subscriptions:
            column, window = columns[wanted.column], () if wanted.length is None else (wanted.length,)
            found[wanted.key] = torch.from_numpy(np.empty((size, *window, *column.shape), column.dtype))
        return found

    def observations(self, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """States of the transitions of a batch, and later states, raw: (B, obs_dim) each."""
        if self.frames == 1:
            return values[OBS], values[NEXT_OBS]
        window = values[OBS]  # (B, frames + reach, obs_dim / frames)
        first = torch.arange(len(window), device=window.device) * window.shape[1] + values[LATER]
        later = first.unsqueeze(1) + torch.arange(self.frames, device=window.device)
        obs, later = window[:, : self.frames], window.flatten(0, 1).index_select(0, later.flatten())
        return obs.flatten(1), later.view(len(window), -1)

    @property
    def selector(self) -> Uniform | SubSequences:
        """Draws all transitions with equal probability."""
        return Uniform() if self.steps == 1 else SubSequences(1)


class TransitionRows(NamedTuple):
    """M rows of a replay.

    Attributes:
        columns: of ``TransitionLayout.schema``; what is behind a row's length means nothing    (M, steps + extra, ...)
        lengths: transitions of each                                                            (M,) int64
    """

    columns: dict[str, Tensor]
    lengths: Tensor

    def part(self, first: int, stride: int) -> TransitionRows:
        """Every ``stride``-th of them by rising length, so that all parts have about as many transitions."""
        own = self.lengths.argsort(stable=True)[first::stride].sort().values
        return TransitionRows({name: column[own] for name, column in self.columns.items()}, self.lengths[own])


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
    """Turns rollouts into rows of a ``TransitionLayout``.

    With n > 1 the last n - 1 steps of a rollout wait for the next one, whose first steps their returns need. Rollouts of
    collectors may be of other environments each time: there, returns end with the rollout and have fewer rewards.
    """

    def __init__(self, layout: TransitionLayout, gamma: float, n_step: int) -> None:
        self._layout, self._gamma, self._n = layout, gamma, n_step
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
    def rows(self, rollout: Rollout) -> TransitionRows:
        """The transitions that this rollout completes, in order of their rows' first steps, then environment."""
        steps = _steps_of(rollout)
        if rollout.log_probs is not None:  # of collectors
            steps.cut[-1] = True
        elif self._waiting is not None:
            steps = _Steps(*map(torch.cat, zip(self._waiting, steps, strict=True)))
        count = len(steps.rewards)
        starts = count if rollout.log_probs is not None else max(0, count - self._n + 1)
        if rollout.log_probs is None and self._n > 1:
            self._waiting = _Steps(*(field[starts:].clone() for field in steps))
        return _rows(steps, starts, self._layout, self._gamma, self._n)


@torch.inference_mode()
def recorded_rows(
    layout: TransitionLayout,
    obs: Tensor,
    next_obs: Tensor,
    actions: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    is_last: Tensor,
    gamma: float,
    n_step: int,
) -> TransitionRows:
    """The transitions of recorded trajectories that follow each other, L steps in all.

    Args:
        layout: of the rows
        obs: before each action                          (L, obs_dim)
        next_obs: after each action                      (L, obs_dim)
        actions: as a rollout holds them                 (L, dim), or (L,)
        rewards: after each action                       (L,)
        terminated: after each action                    (L,) bool
        is_last: whether its trajectory ends with it     (L,) bool
        gamma: discount
        n_step: rewards of a return
    """
    steps = _Steps(*(field.unsqueeze(1) for field in (obs, next_obs, actions, rewards, terminated, is_last)))
    return _rows(steps, len(rewards), layout, gamma, n_step)


def _rows(steps: _Steps, starts: int, layout: TransitionLayout, gamma: float, n: int) -> TransitionRows:
    """The transitions that begin with the first ``starts`` steps."""
    rewards, discounts, last, later = _returns(steps, starts, gamma, n)
    firsts, lengths = _pieces(steps.cut[:starts], layout.steps)
    num_envs = steps.rewards.shape[1]
    # Step i of row m is the firsts[m] + i num_envs -th of all steps; behind the row's end its last one is repeated.
    ends = lengths.unsqueeze(1) - 1
    at = firsts.unsqueeze(1) + num_envs * torch.minimum(torch.arange(layout.steps), ends)
    flat = {ACTION: steps.actions[:starts], REWARD: rewards, DISCOUNT: discounts}
    columns = {name: column.flatten(0, 1)[at] for name, column in flat.items()}
    if layout.frames > 1:
        columns[LATER] = later.flatten(0, 1)[at]
        _refuse_broken_stacks(steps, layout)
        observed = _frames(steps.obs[:starts], last, later, firsts, lengths, layout)
        return TransitionRows({OBS: observed, **columns}, lengths)
    # Observation i is that of step i; from the row's length on, what step i - reach leads to.
    number = torch.arange(layout.steps + layout.reach)
    observed = steps.obs[:starts].flatten(0, 1)[firsts.unsqueeze(1) + num_envs * torch.minimum(number, ends)]
    row, i = (number > ends).nonzero(as_tuple=True)
    source = torch.minimum(i - layout.reach, ends[row, 0]).clamp(min=0)
    observed[row, i] = last.flatten(0, 1)[firsts[row] + num_envs * source]
    return TransitionRows({OBS: observed, **columns}, lengths)


def _frames(
    obs: Tensor, last: Tensor, later: Tensor, firsts: Tensor, lengths: Tensor, layout: TransitionLayout
) -> Tensor:
    """Frames of M rows, (M, steps + extra, obs_dim / frames).

    Args:
        obs: before each action                                    (L, N, obs_dim)
        last: of each transition's later state                     (L, N, obs_dim)
        later: steps to that state                                 (L, N)
        firsts, lengths: of the rows, as of ``_pieces``            (M,) each
        layout: of the rows
    """
    num_envs, stack, size = obs.shape[1], layout.frames, layout.info.obs_dim // layout.frames
    obs, last, later = (field.flatten(0, 1) for field in (obs, last, later))
    every = torch.arange(len(firsts))
    row, step = (torch.arange(layout.steps) < lengths.unsqueeze(1)).nonzero(as_tuple=True)
    each = firsts[row] + num_envs * step
    found = torch.zeros((len(firsts), layout.steps + layout.reach + stack - 1, size), dtype=obs.dtype)
    # The whole stack of a row's first state, of others the newest frame, behind those of the state before it. Later states
    # first: that of a simulation's error, which is not the next one, must not replace the frames of another.
    for states, ahead in ((last, later), (obs, torch.zeros_like(later))):
        place = ahead[firsts].unsqueeze(1) + torch.arange(stack)
        found[every.unsqueeze(1), place] = states[firsts].view(-1, stack, size)
        found[row, step + ahead[each] + stack - 1] = states[each, -size:]
    return found


def _refuse_broken_stacks(steps: _Steps, layout: TransitionLayout) -> None:
    """Raise FrameStackError if an observation lacks a frame of the one before it.

    But not behind a termination, whose value counts for nothing: that of a simulation's error repeats the one before it.
    """
    size = layout.info.obs_dim // layout.frames
    kept = steps.obs[..., size:]
    continues = (steps.next_obs[..., :-size] == kept).all(-1) | steps.terminated
    follows = (steps.obs[1:, :, :-size] == kept[:-1]).all(-1) | steps.cut[:-1]
    if not (continues.all() and follows.all()):
        raise FrameStackError(layout.info.env_id, layout.frames)


def _pieces(cut: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Cut L steps of N environments into rows of at most ``steps``, which end where trajectories do.

    Args:
        cut: nothing that follows belongs to the same trajectory                   (L, N) bool

    Returns:
        first step of each row, t N + environment, in rising order; lengths        (M,) int64 each
    """
    count = len(cut)
    time = torch.arange(count).unsqueeze(1).expand_as(cut)
    begins = torch.ones_like(cut)
    begins[1:] = cut[:-1]
    begins = (time - torch.where(begins, time, 0).cummax(0).values) % steps == 0
    # A row is as long as it is until the next one of its environment begins.
    following = torch.full_like(time, count)
    following[:-1] = torch.where(begins, time, count)[1:]
    lengths = following.flip(0).cummin(0).values.flip(0) - time
    return begins.flatten().nonzero().squeeze(1), lengths[begins]


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


def _returns(steps: _Steps, starts: int, gamma: float, n: int) -> tuple[Tensor, ...]:
    """R = sum_{j<k} gamma^j r_{t+j}, the discount gamma^k (0 if terminated), s_{t+k}, and k, for the first ``starts`` steps.

    k is n, or fewer where the trajectory ends.
    """
    rewards, last = steps.rewards[:starts].clone(), steps.next_obs[:starts]
    terminated, cut = steps.terminated[:starts].clone(), steps.cut[:starts].clone()
    discounts, count = torch.full_like(rewards, gamma), torch.ones_like(cut, dtype=torch.int32)
    for j in range(1, min(n, len(steps.rewards))):
        # Step t + j continues the return of t unless the trajectory has ended before it. Steps beyond the last one are
        # only asked for after a cut.
        later = _Steps(*(_shifted(field, j, starts) for field in steps))
        goes_on = ~cut
        rewards += goes_on * gamma**j * later.rewards
        discounts = torch.where(goes_on, gamma ** (j + 1), discounts)
        count += goes_on
        last = torch.where(goes_on.unsqueeze(-1), later.next_obs, last)
        terminated |= goes_on & later.terminated
        cut |= later.cut
    return rewards, discounts * ~terminated, last, count


def _shifted(field: Tensor, by: int, count: int) -> Tensor:
    """Rows ``by`` to ``by + count`` of a field; the last one again where it has no more."""
    found = field[by : by + count]
    missing = count - len(found)
    return torch.cat((found, field[-1:].expand(missing, *field.shape[1:]))) if missing else found
