"""DQN's model: a network of action values, and who acts with it."""

from __future__ import annotations

import torch
from torch import Tensor

from actors.protocols import EnvInfo
from rayagi.algorithms.categorical import Support
from rayagi.algorithms.dqn import DQNSpec
from rayagi.config.spec import NetworkSpec
from rayagi.models.heads import EpsilonGreedyHead
from rayagi.models.networks import Model
from rayagi.models.q_network import QNetwork
from rayagi.models.recurrent import Sequences


class QModel(Model):
    """Outputs are Q(s, .), the greedy action is the policy. Initial weights depend on ``seed`` alone."""

    head: EpsilonGreedyHead

    def __init__(self, info: EnvInfo, network: NetworkSpec, spec: DQNSpec, seed: int) -> None:
        super().__init__()
        self.network = QNetwork(
            info,
            network,
            torch.Generator().manual_seed(seed),
            num_atoms=spec.num_atoms,
            dueling=spec.dueling,
            noisy_sigma=spec.sigma0 if spec.noisy else None,
        )
        self.support = Support(spec.v_min, spec.v_max, spec.num_atoms) if spec.num_atoms > 1 else None
        self.head = EpsilonGreedyHead(info.action.num_choices)

    @property
    def layer_noise_dim(self) -> int:
        """Numbers of noise that the layers take for one sample of their weights; 0: not noisy."""
        return sum(self.network.noise_dims)

    def action_values(self, observed: Tensor, noise: Tensor | None = None) -> Tensor:
        """Q(s, .): (B, obs_dim) -> (B, num_actions). ``noise`` as of QNetwork."""
        return self.means(self.network(observed, noise))

    def means(self, found: Tensor) -> Tensor:
        """Q(s, .) of the network's outputs: (B, num_actions, num_atoms) -> (B, num_actions)."""
        return found.squeeze(-1) if self.support is None else self.support.expectation(found.softmax(-1))

    def noisy_outputs(self, observed: Tensor, noise: Tensor) -> Tensor:
        """Q(s, .) of a sample of the weights for each row."""
        return self.action_values(observed, noise)

    def outputs(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """Q(s, .) of the mean weights."""
        return self.action_values(observed.reshape(-1, observed.shape[-1])).view(*observed.shape[:-1], -1)

    def values(self, observed: Tensor, sequences: Sequences | None = None) -> Tensor:
        """max_a Q(s, a)."""
        return self.outputs(observed).amax(-1)
