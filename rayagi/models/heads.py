"""Action distributions as functions of network outputs and noise (reparameterised), so that all layouts agree.

A head takes outputs (B, output_dim) and noise of the same shape: Gumbel if ``gumbel_noise``, else standard normal. Actions
are (B, dim), or (B,) for one choice; log probabilities are (B,); the entropy in nats is a scalar.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from actors.protocols import ActionSpec

_LOG_SQRT_TAU = 0.5 * math.log(2 * math.pi)


class GaussianHead(nn.Module):
    """Diagonal Gaussian whose log standard deviation does not depend on the state."""

    gumbel_noise = False

    def __init__(self, dim: int, initial_log_std: float) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.full((dim,), float(initial_log_std)))

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Mean plus noise scaled by the standard deviation."""
        return torch.addcmul(outputs, noise, self.log_std.exp())

    def mode(self, outputs: Tensor) -> Tensor:
        """The mean."""
        return outputs

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Sum over dimensions of log N(action; mean, std)."""
        standardised = (actions - outputs) * (-self.log_std).exp()
        constant = self.log_std.sum() + _LOG_SQRT_TAU * outputs.shape[-1]
        return -0.5 * standardised.square().sum(-1) - constant

    def entropy(self, outputs: Tensor) -> Tensor:
        """Sum over dimensions of log std + log sqrt(2 pi e); the same for every state."""
        return self.log_std.sum() + (0.5 + _LOG_SQRT_TAU) * outputs.shape[-1]

    def spread(self) -> float:
        """Mean standard deviation."""
        return float(self.log_std.detach().exp().mean())


class CategoricalHead(nn.Module):
    """One choice out of ``output_dim``; sampled by the Gumbel-max trick."""

    gumbel_noise = True

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """argmax(logits + Gumbel noise) is distributed as softmax(logits)."""
        return (outputs + noise).argmax(-1)

    def mode(self, outputs: Tensor) -> Tensor:
        """The largest logit."""
        return outputs.argmax(-1)

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Log softmax at the chosen index."""
        return outputs.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self, outputs: Tensor) -> Tensor:
        """-sum p log p, averaged over the batch."""
        log_p = outputs.log_softmax(-1)
        return -(log_p.exp() * log_p).sum(-1).mean()

    def spread(self) -> float:
        """Not defined for choices."""
        return 0.0


class MultiCategoricalHead(nn.Module):
    """Several independent choices at once, (B, dim). The outputs are the logits of all options, concatenated."""

    gumbel_noise = True

    def __init__(self, choices: tuple[int, ...]) -> None:
        """``choices``: number of options of each choice."""
        super().__init__()
        self.choices = choices

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """For each choice argmax(logits + Gumbel noise)."""
        return self.mode(outputs + noise)

    def mode(self, outputs: Tensor) -> Tensor:
        """The largest logit of each choice."""
        return torch.stack([part.argmax(-1) for part in outputs.split(self.choices, -1)], -1)

    def log_prob(self, outputs: Tensor, actions: Tensor) -> Tensor:
        """Sum over choices of the log softmax at the chosen option: they are independent given the state."""
        return sum(
            part.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
            for part, chosen in zip(outputs.split(self.choices, -1), actions.unbind(-1), strict=True)
        )

    def entropy(self, outputs: Tensor) -> Tensor:
        """Sum over choices of -sum p log p, averaged over the batch."""
        log_p = torch.cat([part.log_softmax(-1) for part in outputs.split(self.choices, -1)], -1)
        return -(log_p.exp() * log_p).sum(-1).mean()

    def spread(self) -> float:
        """Not defined for choices."""
        return 0.0


Head = GaussianHead | CategoricalHead | MultiCategoricalHead


def make_head(action: ActionSpec, initial_log_std: float) -> Head:
    """The head for an action space."""
    if action.kind == "discrete":
        return CategoricalHead()
    if action.kind == "multi_discrete":
        return MultiCategoricalHead(action.choices)
    return GaussianHead(action.dim, initial_log_std)
