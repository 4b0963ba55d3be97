"""The reference form: the simulator's functions on torch tensors over environments, one operation after another.

Nothing is traced: what every other form is tested against is what the user wrote. ``compiled=True`` gives the same function
to ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayagi.envs.fused.draws import START, random_actions, seed_word, uniform
from rayagi.envs.fused.forms import Fleet, Setting, Steps, Totals, check_actions
from rayagi.envs.fused.ops import clip
from rayagi.envs.fused.simulator import Box, Simulator, named


class Advanced(NamedTuple):
    """One step of N environments: what Fleet and Steps hold, without the first dimension of the latter."""

    state: Tensor
    elapsed: Tensor
    episode: Tensor
    obs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor


class TorchForm:
    """Implements Form."""

    def __init__(
        self, setting: Setting, device: torch.device | str = "cpu", *, compiled: bool = False
    ) -> None:
        """``compiled``: one call of what torch.compile makes of a step, instead of an operation at a time."""
        self.setting = setting
        self.fleet = Fleet.allocate(setting.simulator, setting.num_envs, device, setting.real)
        self._indices = torch.arange(
            setting.first_env_index, setting.first_env_index + setting.num_envs, device=device
        )
        self._advance: Callable[..., Advanced] = torch.compile(advance) if compiled else advance

    def start(self) -> None:
        """A new episode everywhere."""
        self.fleet.episode += 1
        self.fleet.elapsed.zero_()
        setting, fleet = self.setting, self.fleet
        started = started_states(
            setting.simulator, seed_word(setting.seed), self._indices, fleet.episode, setting.real
        )
        self.fleet.state.copy_(started)

    def observe(self) -> Tensor:
        """(D, N)."""
        return observations(self.setting.simulator, self.fleet.state)

    def run(self, actions: Tensor, out: Steps) -> None:
        """K steps, each a chain of operations."""
        check_actions(self.setting, actions, len(out.rewards))
        for t in range(len(out.rewards)):
            after = self._step(actions[t])
            for name in ("obs", "rewards", "terminated", "truncated", "final_obs"):
                getattr(out, name)[t].copy_(getattr(after, name))

    def wander(self, iteration: int, num_steps: int, out: Totals) -> None:
        """K steps, each a chain of operations."""
        out.rewards.zero_()
        out.ended.zero_()
        word = seed_word(self.setting.seed)
        for t in range(num_steps):
            after = self._step(random_actions(self.setting.simulator, word, self._indices, iteration, t))
            out.rewards += after.rewards
            out.ended += after.terminated | after.truncated

    @torch.no_grad()
    def _step(self, actions: Tensor) -> Advanced:
        setting, fleet = self.setting, self.fleet
        after = self._advance(
            setting.simulator,
            seed_word(setting.seed),
            setting.limit,
            self._indices,
            fleet.state,
            fleet.elapsed,
            fleet.episode,
            actions,
        )
        fleet.copy_(Fleet(after.state, after.elapsed, after.episode))
        return after


def advance(
    simulator: Simulator,
    word: int,
    limit: int,
    indices: Tensor,
    state: Tensor,
    elapsed: Tensor,
    episode: Tensor,
    actions: Tensor,
) -> Advanced:
    """One step of every environment, those that end it begun anew."""
    shape = elapsed.shape
    result = simulator.step(named(simulator, state.unbind(0)), acted(simulator, actions, state.dtype))
    after = _stacked(result[0], shape, state)
    rewards = _column(result[1], shape, state)
    terminated = torch.as_tensor(result[2], dtype=torch.bool, device=state.device).expand(shape)
    elapsed = elapsed + 1
    truncated = (elapsed >= limit) & ~terminated
    ended = terminated | truncated
    episode = episode + ended.to(torch.int32)
    final_obs = observations(simulator, after)
    begun = started_states(simulator, word, indices, episode, state.dtype)
    after = torch.where(ended, begun, after)
    elapsed = torch.where(ended, 0, elapsed)
    obs = observations(simulator, after)
    return Advanced(after, elapsed, episode, obs, rewards, terminated, truncated, final_obs)


def acted(simulator: Simulator, actions: Tensor, real: torch.dtype) -> Any:
    """Actions as ``step`` sees them: a choice as a real, or the box's reals, clipped."""
    if not isinstance(simulator.actions, Box):
        return actions.to(real)
    box = simulator.actions
    reals = actions.unbind(-1)
    return tuple(clip(x, low, high) for x, low, high in zip(reals, box.low, box.high, strict=True))


def started_states(
    simulator: Simulator, word: int, indices: Tensor, episode: Tensor, real: torch.dtype
) -> Tensor:
    """First states of episodes, (S, N)."""
    drawn = uniform(word, indices, episode.to(torch.int64), 0, START, simulator.num_draws).to(real)
    like = torch.empty(0, dtype=real, device=indices.device)
    return _stacked(simulator.start(drawn.unbind(-1)), indices.shape, like)


def observations(simulator: Simulator, state: Tensor) -> Tensor:
    """(S, N) to (D, N)."""
    seen = simulator.observe(named(simulator, state.unbind(0)))
    return _stacked(seen, state.shape[1:], state)


def _stacked(values: Sequence[Any], shape: torch.Size, like: Tensor) -> Tensor:
    return torch.stack([_column(value, shape, like) for value in values])


def _column(value: Any, shape: torch.Size, like: Tensor) -> Tensor:
    """A value that may be a constant, for every environment."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(shape)
