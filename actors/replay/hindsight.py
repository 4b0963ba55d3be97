"""Hindsight experience replay (Andrychowicz et al. 2017): when rows are copied, goals are replaced by what was achieved.

Nothing is stored twice. Which rows get another goal, and which one, is a function of (seed, draw, position in the batch) and
of the trajectory's length: the same for any number of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from actors.replay.candidates import Numbers
from actors.replay.errors import ReplayError
from actors.replay.rows import Selection
from actors.replay.schema import ReplaySchema
from actors.replay.shards import ReplayShards
from actors.replay.store import ReplayStore
from actors.replay.subscriptions import Gathered, Gatherer, Subscription
from actors.replay.tree import Integers

Strategy = Literal["future", "final", "episode"]
Reward = Callable[[NDArray[Any], NDArray[Any]], Any]
_WHICH, _WHERE = 3, 4
"""Streams of random numbers, beside those of selection."""
_INNER = "hindsight achieved: "
"""Begin of the names of windows that only rewards need."""


class Relabelled(NamedTuple):
    """Goals of a batch, (n,) each.

    Attributes:
        chosen: rows whose goal is replaced
        achieved: by the goal that was achieved at this timestep, counted from 0 for the first observation to T for the last
    """

    chosen: NDArray[np.bool_]
    achieved: Integers


@dataclass(frozen=True, kw_only=True, slots=True)
class Hindsight:
    """Which goals are replaced by which, and the reward for them.

    The column ``achieved`` has one step more than trajectories (extra=1): what the observation after action t achieves is at
    t + 1. A selected sub-sequence has one goal.
    """

    reward: Reward
    """Of arrays of achieved goals, after the actions, and of goals, (m, *shape) or (m, length, *shape) each. Returns
    rewards, (m,) or (m, length)."""
    strategy: Strategy = "future"
    """future: of a random later observation; final: of the last; episode: of any but the first. Of the same trajectory."""
    k: float = 4.0
    """Replaced goals per goal that is kept: a goal is replaced with probability k / (k + 1). inf: always."""
    achieved: str = "achieved_goal"
    desired: str = "desired_goal"
    rewards: str = "reward"

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            raise ReplayError(f"strategy {self.strategy!r} is not known: use {', '.join(get_args(Strategy))}")
        if not self.k >= 0:
            raise ReplayError(f"k is {self.k}: use a number that is at least 0")

    def relabel(self, selection: Selection, *, seed: int, draw: int) -> Relabelled:
        """Choose goals for a whole batch, wherever its rows are.

        Raises:
            ReplayError: the selection does not know the lengths of its trajectories.
        """
        if selection.lengths is None:
            raise ReplayError(
                "hindsight needs the lengths of trajectories: use a selection of select, or give lengths="
            )
        n, lengths = len(selection), selection.lengths
        numbers = Numbers(seed, draw, 0)
        chosen = numbers.uniforms(_WHICH, 0, n) < 1.0 - 1.0 / (1.0 + self.k)
        u = numbers.uniforms(_WHERE, 0, n)
        if self.strategy == "final":
            return Relabelled(chosen, lengths.copy())
        # future: one of t + 1 .. T; episode: one of 1 .. T.
        first = selection.steps + 1 if self.strategy == "future" else np.ones(n, np.int64)
        return Relabelled(chosen, first + (u * (lengths + 1 - first)).astype(np.int64))


class HindsightGatherer:
    """Copies windows as a ``Gatherer`` does, with goals and rewards of hindsight."""

    def __init__(
        self,
        store: ReplayStore | ReplayShards,
        subscriptions: Sequence[Subscription],
        n: int,
        hindsight: Hindsight,
        *,
        out: Mapping[str, Any] | None = None,
        threads: int | None = None,
    ) -> None:
        """Prepare the batch. Arguments as of ``Gatherer``; windows of goals and of rewards are relabelled.

        Raises:
            ReplayError: as of ``Gatherer``; or there is nothing to relabel, or the columns do not fit together.
        """
        self._hindsight = hindsight
        _check_columns(store.schema, hindsight)
        self._goals = [each.key for each in subscriptions if each.column == hindsight.desired]
        self._rewards = [each for each in subscriptions if each.column == hindsight.rewards]
        if not self._goals and not self._rewards:
            raise ReplayError(
                f"no window of {hindsight.desired} or {hindsight.rewards} is subscribed: there is nothing to relabel"
            )
        inner = [_achieved_window(each, hindsight) for each in self._rewards]
        self._gatherer = Gatherer(store, [*subscriptions, *inner], n, out=out, threads=threads)
        # At step j - 1: the last step of a trajectory is T - 1, and the last achieved goal is at T.
        wanted = [Subscription(column=hindsight.achieved, offset=1)]
        self._achieved = Gatherer(store, wanted, n, threads=threads)

    def __call__(self, selection: Selection, *, seed: int, draw: int) -> Gathered:
        """Copy the windows of these n rows and relabel them; the values of the call before are overwritten.

        ``seed`` and ``draw`` may be those of the selection, since the random numbers are others.

        Raises:
            ReplayError: as of ``Gatherer`` and ``Hindsight.relabel``; or the reward function returns something else.
        """
        plan = self._hindsight.relabel(selection, seed=seed, draw=draw)
        batch = self._gatherer(selection)
        achieved = self._achieved(
            Selection(selection.keys, plan.achieved - 1, selection.probabilities, selection.weights)
        )
        current = batch.current & achieved.current
        chosen = np.flatnonzero(plan.chosen & current)
        goals = achieved.values[self._hindsight.achieved][chosen]
        for key in self._goals:
            _place(batch.values[key], batch.masks[key], chosen, goals)
        for each in self._rewards if len(chosen) else []:
            reached = batch.values[_INNER + each.key][chosen]
            rewards = self._reward(reached, goals)
            _place(batch.values[each.key], batch.masks[each.key], chosen, rewards, per_step=True)
        return Gathered(
            {name: value for name, value in batch.values.items() if not name.startswith(_INNER)},
            {name: mask for name, mask in batch.masks.items() if not name.startswith(_INNER)},
            current,
        )

    def _reward(self, achieved: NDArray[Any], goals: NDArray[Any]) -> NDArray[Any]:
        """Rewards of achieved goals, (m, *shape) or (m, length, *shape), for goals (m, *shape)."""
        windowed = achieved.ndim > goals.ndim
        wanted = np.broadcast_to(goals[:, None] if windowed else goals, achieved.shape).copy()
        shape = achieved.shape[: 1 + windowed]
        rewards = np.asarray(self._hindsight.reward(achieved, wanted))
        if rewards.shape != shape or rewards.dtype.kind not in "biuf":
            raise ReplayError(
                f"the reward function returned {rewards.dtype}{list(rewards.shape)} where numbers {list(shape)} are expected"
            )
        if not np.isfinite(rewards).all():
            raise ReplayError("the reward function returned a number that is not finite")
        return rewards


def _place(
    values: Any,
    mask: NDArray[np.bool_],
    chosen: Integers,
    replaced: NDArray[Any],
    *,
    per_step: bool = False,
) -> None:
    """Write into the chosen rows of a window, where it is of the trajectory; padding stays zero."""
    array = np.asarray(values)  # of a CPU tensor: a view
    inside = mask[chosen]
    if inside.ndim == 2 and not per_step:
        replaced = replaced[:, None]
    inside = inside.reshape(inside.shape + (1,) * (array.ndim - inside.ndim))
    array[chosen] = np.where(inside, replaced, array[chosen])


def _achieved_window(rewards: Subscription, hindsight: Hindsight) -> Subscription:
    """What was achieved after each action of a window of rewards."""
    if rewards.padding == "tail" and rewards.offset < 0:
        raise ReplayError(
            f"the window of {rewards.column} begins before the selected step and is padded at the tail: for hindsight, "
            "pad it in_place or at the head"
        )
    return replace(rewards, column=hindsight.achieved, offset=rewards.offset + 1, name=_INNER + rewards.key)


def _check_columns(schema: ReplaySchema, hindsight: Hindsight) -> None:
    achieved = schema.columns[schema.position(hindsight.achieved)]
    desired = schema.columns[schema.position(hindsight.desired)]
    rewards = schema.columns[schema.position(hindsight.rewards)]
    if achieved.extra < 1:
        raise ReplayError(
            f"column {achieved} has no extra step: hindsight needs what the last action achieves (extra=1)"
        )
    if achieved.shape != desired.shape or not np.can_cast(achieved.dtype, desired.dtype, "same_kind"):
        raise ReplayError(f"columns {achieved} and {desired} differ: goals have one type and shape")
    if rewards.shape != ():
        raise ReplayError(f"column {rewards} has more than one number a step")
