"""Any policy as an RLlib RLModule on raw observations: its model, and the statistics of observations as buffers."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchCategorical,
    TorchDeterministic,
    TorchDiagGaussian,
    TorchDistribution,
    TorchMultiCategorical,
    TorchSquashedGaussian,
)
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor

from actors.protocols import ActionSpec, EnvInfo, ObsPart
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.spec import NetworkSpec, RunSpec
from rayagi.models.exploring_heads import DeterministicHead, StateSquashedGaussianHead
from rayagi.models.heads import (
    BernoulliHead,
    CategoricalHead,
    EpsilonGreedyHead,
    GaussianHead,
    Head,
    SquashedGaussianHead,
)
from rayagi.models.networks import algorithm_model
from rayagi.models.policy import NetworkPolicy, vector_columns
from rayagi.models.recurrent import Sequences
from rayagi.models.rllib_module import spaces

_STATE = "state"
LEAST_PROBABILITY = 1e-9
"""Of a choice, so that its logit is finite."""


class PolicyModule(TorchRLModule, ValueFunctionAPI):
    """Outputs are in RLlib's convention: means and log standard deviations of a Gaussian, logits of all options.

    A recurrent policy follows RLlib's convention too: observations are (B, T, obs_dim), and ``state_in`` and ``state_out``
    hold {"state": (B, state_dim)}. Loading needs rayagi, and the file of a user's own network.
    """

    shift: Tensor
    scale: Tensor
    bound: Tensor

    def setup(self) -> None:
        """Build the model that ``model_config`` describes, as ``module_of`` writes it."""
        given = self.model_config["info"]
        action, parts = ActionSpec(**given["action"]), tuple(ObsPart(**part) for part in given["obs_parts"])
        info = EnvInfo(**{**given, "action": action, "obs_parts": parts})
        algorithm = self.model_config.get("algorithm", "ppo")
        settings = DEFINITIONS[algorithm].settings(**self.model_config.get("settings", {}))
        network = NetworkSpec(**self.model_config["network"])
        # The run's seed: a user's network may have random numbers that its state lacks.
        seed = self.model_config.get("seed", 0)
        self.model = algorithm_model(algorithm, info, network, settings, seed)
        for name, value in (("shift", 0.0), ("scale", 1.0), ("bound", math.inf)):
            self.register_buffer(name, torch.full((info.obs_dim,), value))
        self.action_dist_cls = _distribution(self.model.head, action)

    def get_initial_state(self) -> dict[str, Tensor]:
        """Zeros; nothing if the policy is not recurrent."""
        return {_STATE: torch.zeros(self.model.state_dim)} if self.model.state_dim else {}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        observed = self._observed(batch)
        if not self.model.state_dim:
            return {Columns.ACTION_DIST_INPUTS: _inputs(self.model.head, self.model.outputs(observed))}
        states, outputs = batch[Columns.STATE_IN][_STATE], []
        for step in observed.unbind(1):
            found, states = self.model.step(step, states)
            outputs.append(found)
        return {
            Columns.ACTION_DIST_INPUTS: _inputs(self.model.head, torch.stack(outputs, 1)),
            Columns.STATE_OUT: {_STATE: states},
        }

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        """V(s), (B,), or (B, T) of a recurrent policy."""
        observed = self._observed(batch)
        if not self.model.state_dim:
            return self.model.values(observed)
        steps = observed.transpose(0, 1)
        done = torch.zeros(steps.shape[:2], dtype=torch.bool, device=steps.device)
        sequences = Sequences(batch[Columns.STATE_IN][_STATE], done)
        return self.model.unroll_values(steps, sequences).outputs.squeeze(-1).transpose(0, 1)

    def _observed(self, batch: dict[str, Any]) -> Tensor:
        # clip((obs - mean) / std, -bound, bound), as ObservationNormaliser.
        return ((batch[Columns.OBS] - self.shift) * self.scale).clamp(-self.bound, self.bound)


def module_of(policy: NetworkPolicy, spec: RunSpec) -> PolicyModule:
    """The policy of a run as a PolicyModule."""
    observations, actions = spaces(policy.info)
    module = PolicyModule(
        observation_space=observations,
        action_space=actions,
        inference_only=False,
        model_config={
            "info": asdict(policy.info),
            "network": asdict(spec.network),
            "algorithm": spec.algorithm,
            "settings": asdict(spec.learning),
            "seed": spec.seed,
        },
    )
    module.model.load_state_dict(policy.model.state_dict())
    normaliser = policy.normaliser
    if normaliser is not None:
        module.shift.copy_(normaliser.shift)
        module.scale.copy_(normaliser.scale)
        columns = vector_columns(policy.info)
        module.bound[slice(None) if columns is None else list(columns)] = normaliser.clip
    return module


def _inputs(head: Head, outputs: Tensor) -> Tensor:
    """A network's outputs as RLlib's distributions take them."""
    if isinstance(head, GaussianHead):
        return torch.cat((outputs, head.log_std.expand_as(outputs)), -1)
    if isinstance(head, DeterministicHead):
        return head.environment_actions(head.mode(outputs))
    if isinstance(head, StateSquashedGaussianHead):
        return torch.cat(head.gaussian(outputs), -1)
    if isinstance(head, EpsilonGreedyHead):
        return head.probabilities(outputs).clamp(min=LEAST_PROBABILITY).log()
    if isinstance(head, BernoulliHead):
        return torch.stack((torch.zeros_like(outputs), outputs), -1).flatten(-2)  # two options for each bit
    return outputs


def _distribution(head: Head, action: ActionSpec) -> type[TorchDistribution]:
    if isinstance(head, SquashedGaussianHead | StateSquashedGaussianHead):
        return _bounded_gaussian(action)
    if isinstance(head, DeterministicHead):
        return _Action
    if isinstance(head, CategoricalHead):
        return TorchCategorical
    if action.kind == "multi_discrete":
        return TorchMultiCategorical.get_partial_dist_cls(input_lens=list(action.choices))
    return TorchDiagGaussian


class _Action(TorchDeterministic):
    """The environment's action itself."""

    @classmethod
    def from_logits(cls, logits: Tensor, **kwargs: Any) -> TorchDeterministic:
        return cls(loc=logits)

    def to_deterministic(self) -> TorchDeterministic:
        return self


def _bounded_gaussian(action: ActionSpec) -> type[TorchDistribution]:
    """RLlib's squashed Gaussian within a box, with the squashed mean as its deterministic action."""
    low, high = torch.tensor(action.low), torch.tensor(action.high)

    class BoundedGaussian(TorchSquashedGaussian):
        @classmethod
        def from_logits(cls, logits: Tensor, **kwargs: Any) -> TorchSquashedGaussian:
            mean, log_std = logits.chunk(2, -1)
            return cls(mean, log_std.exp(), low=low.to(logits), high=high.to(logits))

        def to_deterministic(self) -> TorchDeterministic:
            return TorchDeterministic(loc=self._squash(self.loc))

    return BoundedGaussian
