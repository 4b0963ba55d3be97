"""DQN's model: a network of action values, and who acts with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actors.protocols import EnvInfo
from actors.rollout import epsilon_greedy_noise, exploration_noise
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

    def noise(self, num_steps: int, num_envs: int, *, seed: int, first_env_index: int, number: int) -> Tensor:
        """For epsilon-greedy actions; of noisy layers, one sample of the weights for each environment and rollout.

        The paper draws the weights anew after each replay step, and keeps them between two (Fortunato et al. 2018, §3.1).
        """
        whose: dict[str, Any] = {
            "seed": seed,
            "first_env_index": first_env_index,
            "num_envs": num_envs,
            "iteration": number,
        }
        if self.layer_noise_dim:
            drawn = exploration_noise(**whose, num_steps=1, dim=self.layer_noise_dim, gumbel=False)
            return drawn.expand(num_steps, -1, -1)
        choices, epsilon = self.head.num_outputs, float(self.head.epsilon)
        return epsilon_greedy_noise(**whose, num_steps=num_steps, num_choices=choices, epsilon=epsilon)
