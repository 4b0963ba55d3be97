"""Multi-Agent Transformer (Wen et al. 2022): an encoder gives a team's values, a decoder its actions, agent by agent.

The encoder reads the observations of all n agents, and gives each agent's representation and value (eq. 4). The decoder
generates actions in the order of the agents: that of agent m depends on the representations up to m and on the actions of
agents before m (figure 2). B timesteps, D units. Weights are the same for all agents, which an embedding tells apart.

Blocks are pre-norm, as of ``experiments.replay.transformer``; the authors' code normalises after each residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.replay.transformer import TransformerBlock, attend, initialise
from rayagi.models.heads import GaussianHead


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamSizes:
    """Sizes of a team, and of its network."""

    agents: int
    """n."""
    obs_dim: int
    """Of one agent's observation."""
    action_dim: int
    """Of one agent's action."""
    units: int = 64
    """D."""
    blocks: int = 1
    """Of the encoder, and of the decoder."""
    heads: int = 1
    """Of attention; divides units."""

    def __post_init__(self) -> None:
        if min(self.agents, self.obs_dim, self.action_dim, self.units, self.blocks, self.heads) < 1:
            raise ValueError(f"{self}: all sizes must be at least 1")
        if self.units % self.heads:
            raise ValueError(f"heads = {self.heads} must divide units = {self.units}")


class MultiAgentTransformer(nn.Module):
    """Policy and values of a team. Initial weights depend on ``seed`` alone."""

    def __init__(self, sizes: TeamSizes, *, initial_log_std: float = -1.0, seed: int = 0) -> None:
        super().__init__()
        self.sizes = sizes
        units = sizes.units
        self.agent = nn.Embedding(sizes.agents, units)
        self.obs = nn.Sequential(nn.Linear(sizes.obs_dim, units), nn.GELU())
        self.encoder = nn.ModuleList(TransformerBlock(units, sizes.heads) for _ in range(sizes.blocks))
        self.encoder_norm = nn.LayerNorm(units)
        self.value = _perceptron(units, 1)
        self.start = nn.Parameter(torch.zeros(units))
        """Stands for the action before the first agent's."""
        self.action = nn.Sequential(nn.Linear(sizes.action_dim, units), nn.GELU())
        self.decoder = nn.ModuleList(_DecoderBlock(units, sizes.heads) for _ in range(sizes.blocks))
        self.decoder_norm = nn.LayerNorm(units)
        self.mean = _perceptron(units, sizes.action_dim)
        initialise(self, seed)
        self.head = GaussianHead(sizes.action_dim, initial_log_std)
        """Of one agent: its standard deviations do not depend on the state."""

    def encode(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Representations (B, n, D) and values (B, n) of observations (B, n, obs_dim)."""
        hidden = self.obs(obs) + self.agent.weight
        for block in self.encoder:
            hidden = block(hidden, None)
        encoded = self.encoder_norm(hidden)
        return encoded, self.value(encoded).squeeze(-1)

    def decode(self, encoded: Tensor, before: Tensor) -> Tensor:
        """Means of the first m agents' actions.

        Args:
            encoded: their representations                  (B, m, D)
            before: actions of all but the last of them     (B, m - 1, action_dim)

        Returns:
            (B, m, action_dim); row i depends on rows up to i of ``encoded``, and on rows before i of ``before``.
        """
        # Token i has the action of agent i - 1; the first one is the start.
        start = self.start.expand(len(encoded), 1, -1)
        count = encoded.shape[1]
        tokens = torch.cat((start, self.action(before)), 1) + self.agent.weight[:count]
        earlier = torch.ones((count, count), dtype=torch.bool, device=encoded.device).tril()
        for block in self.decoder:
            tokens = block(tokens, encoded, earlier)
        means: Tensor = self.mean(self.decoder_norm(tokens))
        return means

    def forward(self, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Means of all agents at once, each given the ``actions`` (B, n, action_dim) before its own, and values (B, n)."""
        encoded, values = self.encode(obs)
        return self.decode(encoded, actions[:, :-1]), values

    def act(self, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Generate actions, one agent after the other.

        Args:
            obs: (B, n, obs_dim)
            noise: standard normal; zeros give the mode of each action   (B, n, action_dim)

        Returns:
            actions (B, n, action_dim), and the log probability of each agent's, given those before it (B, n).
        """
        encoded, _ = self.encode(obs)
        actions, log_probs = torch.zeros_like(noise), []
        for m in range(self.sizes.agents):
            # a^m ~ pi(. | o^1..n, a^1..m-1)
            mean = self.decode(encoded[:, : m + 1], actions[:, :m])[:, m]
            actions[:, m] = self.head.sample(mean, noise[:, m])
            log_probs.append(self.head.log_prob(mean, actions[:, m]))
        return actions, torch.stack(log_probs, 1)


class _DecoderBlock(nn.Module):
    """Attention among the actions, then from the observations' representations to the actions; both masked."""

    def __init__(self, units: int, heads: int) -> None:
        super().__init__()
        self.block = TransformerBlock(units, heads)
        self.norms = nn.ModuleList(nn.LayerNorm(units) for _ in range(2))
        self.query, self.key_value = nn.Linear(units, units), nn.Linear(units, 2 * units)
        self.out = nn.Linear(units, units)

    def forward(self, actions: Tensor, encoded: Tensor, earlier: Tensor) -> Tensor:
        """(B, m, D) of both -> (B, m, D)."""
        actions = self.block.add_attention(actions, earlier)
        query = self.query(self.norms[0](encoded))
        key, value = self.key_value(self.norms[1](actions)).chunk(2, -1)
        hidden = encoded + self.out(attend(query, key, value, self.block.heads, earlier))
        return self.block.add_feed_forward(hidden)


def _perceptron(units: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(units, units), nn.GELU(), nn.LayerNorm(units), nn.Linear(units, outputs))
