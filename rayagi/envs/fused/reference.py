"""Reference backend (engine fused_torch): a simulator's functions on torch tensors over environments.

Nothing is traced: tests compare every other backend with the functions as the user wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rayagi.envs.fused.backends import BatchedEnvState, EnvConfig, StepBatch, check_actions
from rayagi.envs.fused.draws import START, seed_word, uniform
from rayagi.envs.fused.ops import clip
from rayagi.envs.fused.simulator import Box, Simulator, named


class TorchBackend:
    """Implements FusedBackend."""

    def __init__(self, env_config: EnvConfig) -> None:
        self.env_config = env_config
        self.env_state = BatchedEnvState.allocate(
            env_config.simulator, env_config.num_envs, real=env_config.real
        )
        first = env_config.first_env_index
        self._indices = torch.arange(first, first + env_config.num_envs)

    def start(self) -> None:
        """Start a new episode in every environment."""
        self.env_state.episode += 1
        self.env_state.elapsed.zero_()
        self.env_state.state.copy_(self._begun())

    def observe(self) -> Tensor:
        """(D, N)."""
        return observations(self.env_config.simulator, self.env_state.state)

    def run(self, actions: Tensor, out: StepBatch) -> None:
        """K steps, one after another."""
        check_actions(self.env_config, actions, len(out.rewards))
        for t in range(len(out.rewards)):
            self._step(t, actions[t], out)

    @torch.no_grad()
    def _step(self, t: int, actions: Tensor, out: StepBatch) -> None:
        """One step of every environment, with auto-reset."""
        simulator, env_state = self.env_config.simulator, self.env_state
        state, shape = env_state.state, env_state.elapsed.shape
        # 1. Dynamics, reward and termination.
        result = simulator.step(
            named(simulator, state.unbind(0)), clipped_actions(simulator, actions, state.dtype)
        )
        after = _stacked(result[0], shape, state)
        out.rewards[t] = _column(
            result[1], shape, state
        )  # it may be a view of a state, which is about to change
        out.terminated[t] = torch.as_tensor(result[2], dtype=torch.bool)
        # 2. Time limit.
        env_state.elapsed += 1
        out.truncated[t] = (env_state.elapsed >= self.env_config.limit) & ~out.terminated[t]
        ended = out.terminated[t] | out.truncated[t]
        env_state.episode += ended
        out.final_obs[t] = observations(simulator, after)
        # 3. Reset: first states of every environment's next episode, selected where one ended.
        state.copy_(torch.where(ended, self._begun(), after))
        env_state.elapsed.masked_fill_(ended, 0)
        out.obs[t] = observations(simulator, state)

    def _begun(self) -> Tensor:
        """First states of the environments' episodes, (S, N)."""
        env_config = self.env_config
        return started_states(
            env_config.simulator,
            seed_word(env_config.seed),
            self._indices,
            self.env_state.episode,
            env_config.real,
        )


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
