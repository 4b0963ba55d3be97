"""Parts of transformers: attention, a pre-norm block as in GPT-2, and its initial weights. B sequences, D units."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, allowed: Tensor | None) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V in each head, with d = D / heads.

    Args:
        query: (B, T, D)
        key, value: (B, S, D)
        heads: number of heads; divides D
        allowed: which tokens see which, bool, broadcast to (B, heads, T, S); None: all see all

    Returns:
        (B, T, D).
    """
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (query, key, value))
    return scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2).flatten(2)


class TransformerBlock(nn.Module):
    """Pre-norm transformer block, as in GPT-2."""

    def __init__(self, units: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(units) for _ in range(2))
        self.qkv, self.out = nn.Linear(units, 3 * units), nn.Linear(units, units)
        self.up, self.down = nn.Linear(units, 4 * units), nn.Linear(4 * units, units)

    def forward(self, hidden: Tensor, allowed: Tensor | None) -> Tensor:
        """(B, T, D) -> (B, T, D); ``allowed`` as of ``attend``."""
        return self.add_feed_forward(self.add_attention(hidden, allowed))

    def add_attention(self, hidden: Tensor, allowed: Tensor | None) -> Tensor:
        """h + W_o attend(Q, K, V)."""
        query, key, value = self.qkv(self.norms[0](hidden)).chunk(3, -1)
        return hidden + self.out(attend(query, key, value, self.heads, allowed))

    def add_feed_forward(self, hidden: Tensor) -> Tensor:
        """h + W_2 gelu(W_1 h)."""
        return hidden + self.down(gelu(self.up(self.norms[1](hidden))))


def initialise(module: nn.Module, seed: int) -> None:
    """Weights N(0, 0.02), as of GPT-2; biases 0; norms 1. They depend on ``seed`` alone."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in module.modules():
            if isinstance(each, nn.Linear | nn.Embedding):
                each.weight.normal_(0.0, 0.02, generator=generator)
            if isinstance(each, nn.Linear):
                each.bias.zero_()
