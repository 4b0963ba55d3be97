"""Decision Transformer (Chen et al. 2021) for several tasks: one causal transformer, projections of each task's own.

A timestep has three tokens: return-to-go, observation, action. Action a_t is predicted from observation token t, which sees
the tokens before it, R_t and s_t (figure 1, algorithm 1). B sequences of L timesteps, D units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.replay.transformer import TransformerBlock, initialise

_TOKENS = 3
"""Of a timestep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerSizes:
    """Defaults are those of Chen et al. 2021 for MuJoCo (table 9)."""

    units: int = 128
    """D: of a token."""
    layers: int = 3
    heads: int = 1
    """Of attention; divides units."""
    context: int = 20
    """K: timesteps that an action is predicted from."""
    longest_episode: int = 1000
    """Timesteps that have an embedding of their own; later ones share the last."""

    def __post_init__(self) -> None:
        if min(self.units, self.layers, self.heads, self.context, self.longest_episode) < 1:
            raise ValueError(f"{self}: all sizes must be at least 1")
        if self.units % self.heads:
            raise ValueError(f"heads = {self.heads} must divide units = {self.units}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSizes:
    """What the network reads and predicts of one task."""

    obs_dim: int
    action_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """Timesteps of B sequences of one task, the newest last.

    Attributes:
        obs: normalised                                                  (B, L, obs_dim)
        actions: in [-1, 1]; that of the last step is not read           (B, L, action_dim)
        returns: returns-to-go, scaled                                   (B, L)
        steps: timestep in the episode, from 0                           (B, L) int64
        mask: whether a timestep exists; others are padding, and unread  (B, L) bool
    """

    obs: Tensor
    actions: Tensor
    returns: Tensor
    steps: Tensor
    mask: Tensor


class DecisionTransformer(nn.Module):
    """One transformer for all tasks. Initial weights depend on ``seed`` alone; there is no dropout."""

    def __init__(self, tasks: Sequence[TaskSizes], sizes: TransformerSizes, seed: int = 0) -> None:
        super().__init__()
        self.sizes = sizes
        units = sizes.units
        self.of_tasks = nn.ModuleList(_Projections(task, units) for task in tasks)
        self.timestep = nn.Embedding(sizes.longest_episode, units)
        self.first_norm, self.last_norm = nn.LayerNorm(units), nn.LayerNorm(units)
        self.blocks = nn.ModuleList(TransformerBlock(units, sizes.heads) for _ in range(sizes.layers))
        initialise(self, seed)

    def forward(self, contexts: Mapping[int, Context]) -> dict[int, Tensor]:
        """Actions of each timestep of each task's sequences, in [-1, 1]: by task number (B, L, action_dim).

        Sequences of all tasks go through the transformer together; L is the same for all.
        """
        tokens = torch.cat([self._tokens(task, context) for task, context in contexts.items()])
        exists = torch.cat([context.mask for context in contexts.values()])
        hidden = self.first_norm(tokens)
        allowed = attention_mask(exists)
        for block in self.blocks:
            hidden = block(hidden, allowed)
        observed = self.last_norm(hidden).unflatten(1, (-1, _TOKENS))[:, :, 1]
        parts = observed.split([len(context.mask) for context in contexts.values()])
        return {
            task: self._projections(task).action_of(part) for task, part in zip(contexts, parts, strict=True)
        }

    def _projections(self, task: int) -> _Projections:
        found = self.of_tasks[task]
        assert isinstance(found, _Projections)
        return found

    def _tokens(self, task: int, context: Context) -> Tensor:
        """(R_1, s_1, a_1, R_2, ...), each with the embedding of its timestep: (B, 3 L, D)."""
        embed = self._projections(task)
        when = self.timestep(context.steps.clamp(0, self.sizes.longest_episode - 1))
        tokens = torch.stack(
            (
                embed.returns(context.returns.unsqueeze(-1)) + when,
                embed.obs(context.obs) + when,
                embed.action(context.actions) + when,
            ),
            2,
        )
        return tokens.flatten(1, 2)


def attention_mask(exists: Tensor) -> Tensor:
    """Which tokens see which: (B, 1, 3 L, 3 L) of (B, L). Earlier ones of timesteps that exist, and each token itself."""
    real = exists.repeat_interleave(_TOKENS, 1)
    size = real.shape[1]
    earlier = torch.ones((size, size), dtype=torch.bool, device=real.device).tril()
    # Padding sees itself: a row without any token would be NaN.
    itself = torch.eye(size, dtype=torch.bool, device=real.device)
    return (earlier & real.unsqueeze(1) | itself).unsqueeze(1)


class _Projections(nn.Module):
    """Of one task, to and from D units."""

    def __init__(self, task: TaskSizes, units: int) -> None:
        super().__init__()
        self.returns = nn.Linear(1, units)
        self.obs = nn.Linear(task.obs_dim, units)
        self.action = nn.Linear(task.action_dim, units)
        self.output = nn.Linear(units, task.action_dim)

    def action_of(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., action_dim) in [-1, 1]."""
        predicted: Tensor = self.output(hidden).tanh()
        return predicted


def action_loss(predicted: Tensor, context: Context) -> Tensor:
    """Mean over a sequence's timesteps that exist of |a - a'|^2 / action_dim (Chen et al. 2021, algorithm 1): (B,)."""
    error = (predicted - context.actions).square().mean(-1) * context.mask
    return error.sum(1) / context.mask.sum(1)
