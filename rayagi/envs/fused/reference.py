"""The reference form: the simulator's functions on torch tensors over environments, one operation after another.

Nothing is traced: what every other form is tested against is what the user wrote. ``compiled=True`` gives the same function
to ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayagi.envs.fused.backends import BatchedEnvState, EnvConfig, StepBatch, Totals, check_actions
from rayagi.envs.fused.draws import START, random_actions, seed_word, uniform
from rayagi.envs.fused.ops import clip
from rayagi.envs.fused.simulator import Box, Simulator, named


class TorchStepResult(NamedTuple):
    """One step of N environments: what BatchedEnvState and StepBatch hold, without the first dimension of the latter."""

    state: Tensor
    elapsed: Tensor
    episode: Tensor
    obs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor


class TorchBackend:
    """Implements Form."""

    def __init__(
        self, env_config: EnvConfig, device: torch.device | str = "cpu", *, compiled: bool = False
    ) -> None:
        """``compiled``: one call of what torch.compile makes of a step, instead of an operation at a time."""
        self.env_config = env_config
        self.env_state = BatchedEnvState.allocate(
            env_config.simulator, env_config.num_envs, device, env_config.real
        )
        self._indices = torch.arange(
            env_config.first_env_index, env_config.first_env_index + env_config.num_envs, device=device
        )
        self._advance: Callable[..., TorchStepResult] = torch.compile(advance) if compiled else advance

    def start(self) -> None:
        """A new episode everywhere."""
        self.env_state.episode += 1
        self.env_state.elapsed.zero_()
        env_config, env_state = self.env_config, self.env_state
        started = started_states(
            env_config.simulator,
            seed_word(env_config.seed),
            self._indices,
            env_state.episode,
            env_config.real,
        )
        self.env_state.state.copy_(started)

    def observe(self) -> Tensor:
        """(D, N)."""
        return observations(self.env_config.simulator, self.env_state.state)

    def run(self, actions: Tensor, out: StepBatch) -> None:
        """K steps, each a chain of operations."""
        check_actions(self.env_config, actions, len(out.rewards))
        for t in range(len(out.rewards)):
            after = self._step(actions[t])
            for name in ("obs", "rewards", "terminated", "truncated", "final_obs"):
                getattr(out, name)[t].copy_(getattr(after, name))

    def run_random_actions(self, iteration: int, num_steps: int, out: Totals) -> None:
        """K steps, each a chain of operations."""
        out.rewards.zero_()
        out.ended.zero_()
        word = seed_word(self.env_config.seed)
        for t in range(num_steps):
            after = self._step(random_actions(self.env_config.simulator, word, self._indices, iteration, t))
            out.rewards += after.rewards
            out.ended += after.terminated | after.truncated

    @torch.no_grad()
    def _step(self, actions: Tensor) -> TorchStepResult:
        env_config, env_state = self.env_config, self.env_state
        after = self._advance(
            env_config.simulator,
            seed_word(env_config.seed),
            env_config.limit,
            self._indices,
            env_state.state,
            env_state.elapsed,
            env_state.episode,
            actions,
        )
        env_state.copy_(BatchedEnvState(after.state, after.elapsed, after.episode))
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
) -> TorchStepResult:
    """One step of every environment, those that end it begun anew."""
    shape = elapsed.shape
    result = simulator.step(
        named(simulator, state.unbind(0)), clipped_actions(simulator, actions, state.dtype)
    )
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
    return TorchStepResult(after, elapsed, episode, obs, rewards, terminated, truncated, final_obs)


def clipped_actions(simulator: Simulator, actions: Tensor, real: torch.dtype) -> Any:
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
