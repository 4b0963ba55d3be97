"""RLModules as users of RLlib write them."""

from typing import Any

import torch
from gymnasium import spaces
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor, nn


class Trunk(TorchRLModule, ValueFunctionAPI):
    """Common features of outputs and values."""

    def setup(self) -> None:
        width, space = self.model_config.get("width", 16), self.action_space
        if isinstance(space, spaces.Box):
            num_outputs = 2 * space.shape[0]
        else:
            num_outputs = int(space.n if isinstance(space, spaces.Discrete) else sum(space.nvec))
        self.trunk = nn.Sequential(nn.Linear(self.observation_space.shape[0], width), nn.Tanh())
        self.outputs, self.value = nn.Linear(width, num_outputs), nn.Linear(width, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        hidden = self.trunk(batch[Columns.OBS])
        return {Columns.ACTION_DIST_INPUTS: self.outputs(hidden), Columns.EMBEDDINGS: hidden}

    def compute_values(self, batch: dict[str, Any], embeddings: Tensor | None = None) -> Tensor:
        hidden = self.trunk(batch[Columns.OBS]) if embeddings is None else embeddings
        return self.value(hidden).squeeze(-1)


class WithoutValues(TorchRLModule):
    """Acts only."""

    setup, _forward = Trunk.setup, Trunk._forward


class WithState(Trunk):
    """Has an initial state."""

    def get_initial_state(self) -> dict[str, Tensor]:
        return {"h": torch.zeros(4)}


class Silent(Trunk):
    """Its forward returns embeddings only."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.EMBEDDINGS: self.trunk(batch[Columns.OBS])}


class MeansOnly(Trunk):
    """Of a Box, without the standard deviations that RLlib's Gaussian needs."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        found = super()._forward(batch)
        return {**found, Columns.ACTION_DIST_INPUTS: found[Columns.ACTION_DIST_INPUTS].chunk(2, -1)[0]}


class OfItsOwn(Trunk):
    """Draws actions by another distribution."""

    def get_inference_action_dist_cls(self) -> type:
        return torch.distributions.Beta
