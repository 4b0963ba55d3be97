"""Reference backend (engine fused_torch): a simulator's functions on torch tensors over environments.

Nothing is traced: tests compare every other backend with the functions as the user wrote them. ``compiled=True`` passes
them to ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayagi.envs.fused.backends import BatchedEnvState, EnvConfig, StepBatch, check_actions
from rayagi.envs.fused.draws import START, seed_word, uniform
from rayagi.envs.fused.ops import clip
from rayagi.envs.fused.simulator import Box, Simulator, named


class TorchStepResult(NamedTuple):
    """One step of N environments: the fields of BatchedEnvState and of StepBatch without its dimension K."""

    state: Tensor
    elapsed: Tensor
    episode: Tensor
    obs: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    final_obs: Tensor


class TorchBackend:
    """Implements FusedBackend."""

    def __init__(
        self, env_config: EnvConfig, device: torch.device | str = "cpu", *, compiled: bool = False
    ) -> None:
        """``compiled``: run each step through torch.compile instead of eagerly."""
        self.env_config = env_config
        self.env_state = BatchedEnvState.allocate(
            env_config.simulator, env_config.num_envs, device, env_config.real
        )
        self._indices = torch.arange(
            env_config.first_env_index, env_config.first_env_index + env_config.num_envs, device=device
        )
        self._advance: Callable[..., TorchStepResult] = torch.compile(advance) if compiled else advance

    def start(self) -> None:
        """Start a new episode in every environment."""
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
        """K steps, one after another."""
        check_actions(self.env_config, actions, len(out.rewards))
        for t in range(len(out.rewards)):
            after = self._step(actions[t])
            for name in ("obs", "rewards", "terminated", "truncated", "final_obs"):
                getattr(out, name)[t].copy_(getattr(after, name))

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
    """One step of every environment, with auto-reset."""
    shape = elapsed.shape
    # 1. Dynamics, reward and termination.
    result = simulator.step(
        named(simulator, state.unbind(0)), clipped_actions(simulator, actions, state.dtype)
    )
    after = _stacked(result[0], shape, state)
    rewards = _column(
        result[1], shape, state
    ).clone()  # it may be a view of a state, which is about to change
    terminated = torch.as_tensor(result[2], dtype=torch.bool, device=state.device).expand(shape)
    # 2. Time limit.
    elapsed = elapsed + 1
    truncated = (elapsed >= limit) & ~terminated
    ended = terminated | truncated
    episode = episode + ended.to(torch.int32)
    final_obs = observations(simulator, after)
    # 3. Reset: first states of every environment's next episode, selected where one ended.
    begun = started_states(simulator, word, indices, episode, state.dtype)
    after = torch.where(ended, begun, after)
    elapsed = torch.where(ended, 0, elapsed)
    obs = observations(simulator, after)
    return TorchStepResult(after, elapsed, episode, obs, rewards, terminated, truncated, final_obs)


def clipped_actions(simulator: Simulator, actions: Tensor, real: torch.dtype) -> Any:
    """Arguments of ``Simulator.step``: a discrete action as a real, or a tuple of reals clipped to the box."""
    if not isinstance(simulator.actions, Box):
        return actions.to(real)
    box = simulator.actions
    reals = actions.unbind(-1)
    return tuple(clip(x, low, high) for x, low, high in zip(reals, box.low, box.high, strict=True))


def started_states(
    simulator: Simulator, word: int, indices: Tensor, episode: Tensor, real: torch.dtype
) -> Tensor:
    """Initial states of episodes, (S, N)."""
    drawn = uniform(word, indices, episode.to(torch.int64), 0, START, simulator.num_draws).to(real)
    like = torch.empty(0, dtype=real, device=indices.device)
    return _stacked(simulator.start(drawn.unbind(-1)), indices.shape, like)


def observations(simulator: Simulator, state: Tensor) -> Tensor:
    """Observations (D, N) of states (S, N)."""
    obs = simulator.observe(named(simulator, state.unbind(0)))
    return _stacked(obs, state.shape[1:], state)


def _stacked(values: Sequence[Any], shape: torch.Size, like: Tensor) -> Tensor:
    return torch.stack([_column(value, shape, like) for value in values])


def _column(value: Any, shape: torch.Size, like: Tensor) -> Tensor:
    """A value, possibly a constant, expanded to every environment."""
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(shape)
