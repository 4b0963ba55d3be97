import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from ray.rllib.core.rl_module.rl_module import RLModule

from actors.protocols import ActionSpec, EnvInfo
from rayagi.algorithms.normalisers import Moments, ObservationNormaliser
from rayagi.config.spec import NetworkSpec, RunSpec
from rayagi.models.networks import ActorCritic
from rayagi.models.policy import NetworkPolicy
from rayagi.rl_module import (
    ModuleWeightsError,
    empty_module,
    export_module,
    exported_weights,
    load_exported,
    spaces,
)

CPU = torch.device("cpu")
BOX = ActionSpec(kind="continuous", dim=3, low=(-1.0, -2.0, -3.0), high=(1.0, 2.0, 3.0))
CHOICES = ActionSpec(kind="discrete", dim=1, num_choices=4)


def info(action):
    return EnvInfo(env_id="test", engine="none", obs_dim=6, action=action, max_episode_steps=None)


def policy_of(action, network, batch, clip=10.0):
    """A policy with random weights, and observation statistics of ``batch``."""
    model = ActorCritic(info(action), network, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    normaliser = None
    if batch is not None:
        normaliser = ObservationNormaliser(6, clip, CPU)
        normaliser.update(Moments.from_batch(batch))
    return NetworkPolicy(model, info(action), normaliser, CPU)


def observations():
    return 3.0 * torch.randn((200, 6), generator=torch.Generator().manual_seed(2)) + 5.0


@pytest.mark.parametrize("action", [BOX, CHOICES], ids=["box", "choices"])
@pytest.mark.parametrize("activation", ["elu", "relu", "tanh", "silu"])
@pytest.mark.parametrize("normalised", [True, False])
def test_the_exported_module_agrees_with_the_policy_on_raw_observations(action, activation, normalised):
    network = NetworkSpec(hidden=(16, 12, 8), activation=activation, initial_log_std=-0.5)
    obs = observations()
    policy = policy_of(action, network, obs if normalised else None)
    module = export_module(policy, info(action), RunSpec(network=network))
    with torch.no_grad():
        inputs = module.forward_inference({"obs": obs})["action_dist_inputs"]
        wanted = policy.outputs(policy.observe(obs))
        values = policy.model.values(policy.observe(obs))
        if action is BOX:
            assert torch.allclose(inputs[:, 3:], policy.model.head.log_std.expand(200, 3))
        torch.testing.assert_close(inputs[:, : wanted.shape[1]], wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(module.compute_values({"obs": obs}), values, atol=1e-5, rtol=1e-5)


def test_an_observation_that_never_varied_has_no_influence():
    obs = observations()
    obs[:, 2] = 7.0
    network = NetworkSpec(hidden=(16,))
    policy = policy_of(BOX, network, obs)
    module = export_module(policy, info(BOX), RunSpec(network=network))
    with torch.no_grad():
        outputs = module.forward_inference({"obs": obs})["action_dist_inputs"][:, :3]
        torch.testing.assert_close(outputs, policy.outputs(policy.observe(obs)), atol=1e-5, rtol=1e-5)


def test_a_saved_module_is_loaded_by_rllib_alone(tmp_path):
    network = NetworkSpec(hidden=(16, 8))
    obs = observations()
    module = export_module(policy_of(BOX, network, obs), info(BOX), RunSpec(network=network))
    loaded = RLModule.from_checkpoint(module.save_to_path(tmp_path / "module"))
    wanted = module.forward_inference({"obs": obs})["action_dist_inputs"]
    assert torch.equal(loaded.forward_inference({"obs": obs})["action_dist_inputs"], wanted)


def test_weights_that_do_not_fit_are_refused_by_name():
    network = NetworkSpec(hidden=(16,))
    weights = exported_weights(policy_of(BOX, network, None), info(BOX))
    log_std = weights.pop("pi.log_std")
    with pytest.raises(ModuleWeightsError, match=r"missing weights: pi\.log_std; unexpected weights: none"):
        load_exported(empty_module(info(BOX), network), weights)
    with pytest.raises(ModuleWeightsError, match=r"missing weights: none; unexpected weights: pi\.sigma"):
        load_exported(
            empty_module(info(BOX), network), {**weights, "pi.log_std": log_std, "pi.sigma": log_std}
        )


def test_spaces_are_the_environments():
    obs, actions = spaces(info(BOX))
    assert obs == Box(-np.inf, np.inf, (6,), np.float32)
    assert actions == Box(np.float32([-1, -2, -3]), np.float32([1, 2, 3]), dtype=np.float32)
    assert spaces(info(CHOICES))[1] == Discrete(4)
