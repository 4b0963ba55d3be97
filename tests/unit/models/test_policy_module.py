"""Policies that RLlib's default module cannot be, as RLModules: outputs, values, states, and a save that RLlib loads."""

from dataclasses import replace

import pytest
import torch
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.core.rl_module.rl_module import RLModule

from actors.protocols import ActionSpec, EnvInfo, ObsPart
from rayagi.config.spec import NetworkSpec, RunSpec
from rayagi.models.policy import new_policy
from rayagi.policy_module import PolicyModule
from rayagi.rl_module import export_module, save_modules

BOX = ActionSpec(kind="continuous", dim=2, low=(-1.0, 0.0), high=(1.0, 3.0))
CHOICE = ActionSpec(kind="discrete", dim=1, num_choices=3)
BITS = ActionSpec(kind="multi_discrete", dim=2, choices=(2, 2))
OPTIONS = ActionSpec(kind="multi_discrete", dim=2, choices=(2, 3))
INFO = EnvInfo(env_id="Some-v0", engine="x", obs_dim=5, action=BOX, max_episode_steps=None)
IMAGE = replace(
    INFO, obs_dim=1298, obs_parts=(ObsPart(size=1296, shape=(36, 36, 1)), ObsPart(size=2, shape=(2,)))
)
NETWORK = NetworkSpec(hidden=(8,), core_size=4)
OTHERS = [
    (IMAGE, NETWORK),
    (INFO, replace(NETWORK, core="lstm")),
    (INFO, replace(NETWORK, core="gru", shared=True)),
    (INFO, replace(NETWORK, shared=True)),
    (INFO, replace(NETWORK, critic_only=("1:3",))),
    (INFO, replace(NETWORK, head="squashed_gaussian")),
    (replace(INFO, action=BITS), replace(NETWORK, head="bernoulli")),
    (replace(INFO, action=CHOICE), replace(NETWORK, core="gru")),
    (replace(INFO, action=OPTIONS), replace(NETWORK, shared=True)),
    (INFO, RunSpec(algorithm="sac", network=NETWORK)),
    (INFO, RunSpec(algorithm="td3", network=NETWORK)),
    (INFO, NetworkSpec(module="tests.fakes.networks:Plain")),
    (INFO, NetworkSpec(module="tests.fakes.networks:Remembering")),
    (INFO, NetworkSpec(module="tests.fakes.networks:Fourier")),
    (INFO, NetworkSpec(module="tests.fakes.rl_modules:Trunk", module_kwargs={"width": 7})),
]
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def run_of(network):
    """A run with this network, and with observations normalised."""
    spec = network if isinstance(network, RunSpec) else RunSpec(network=network)
    return replace(spec, seed=3, learning=replace(spec.learning, normalize_obs=True))


def policy_of(info, network):
    """With statistics of observations; some exceed the clip."""
    policy = new_policy(run_of(network), info, torch.device("cpu"))
    policy.normaliser.clip = 10.0
    policy.normaliser.update(policy.normaliser.moments_of(observations(info) / 20 + 1))
    return policy


def observations(info):
    return torch.randn(6, info.obs_dim, generator=torch.Generator().manual_seed(0))


def of_module(module, obs, states):
    """Inputs of the distribution and values, by RLlib's names."""
    batch = {"obs": obs}
    if states is not None:
        batch = {"obs": obs.view(2, 3, -1), "state_in": {"state": states}}
    with torch.no_grad():
        found = module.forward_inference(batch)
        return found["action_dist_inputs"], module.compute_values(batch), found.get("state_out")


@pytest.mark.parametrize(("info", "network"), OTHERS)
def test_outputs_and_values_are_the_policy_s_before_and_after_a_save(info, network, tmp_path):
    policy, obs = policy_of(info, network), observations(info)
    module = export_module(policy, info, run_of(network))
    assert isinstance(module, PolicyModule)
    assert module.is_stateful() == bool(policy.state_dim)
    assert {name: each.shape for name, each in module.get_initial_state().items()} == (
        {"state": (policy.state_dim,)} if policy.state_dim else {}
    )
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(2, policy.state_dim, generator=generator) if policy.state_dim else None
    inputs, values, state_out = of_module(module, obs, states)
    observed = policy.observe(obs)
    assert (observed.abs() == 10.0).any()  # some are clipped
    with torch.no_grad():
        if states is None:
            outputs, expected = policy.model(observed)
            torch.testing.assert_close(values, expected)
        else:
            stepped, after = [], states
            for step in observed.view(2, 3, -1).unbind(1):
                found, after = policy.step(step, after)
                stepped.append(found)
            outputs = torch.stack(stepped, 1)
            torch.testing.assert_close(state_out["state"], after)
    mode = module.get_inference_action_dist_cls().from_logits(inputs).to_deterministic().sample()
    torch.testing.assert_close(mode, policy.environment_actions(policy.mode(outputs)))
    loaded = RLModule.from_checkpoint(module.save_to_path(tmp_path / "module"))
    for one, other in zip(of_module(loaded, obs, states)[:2], (inputs, values), strict=True):
        assert torch.equal(one, other)
    save_modules(module, tmp_path / "modules")
    again = MultiRLModule.from_checkpoint(tmp_path / "modules")["default_policy"]
    assert torch.equal(of_module(again, obs, states)[0], inputs)


@pytest.mark.parametrize(
    ("info", "network"),
    [
        each
        for each in OTHERS
        if run_of(each[1]).network.core == "none"
        and "Remembering" not in str(each)
        and "td3" not in str(each)
    ],
)
def test_densities_are_the_policy_s(info, network):
    policy, obs = policy_of(info, network), observations(info)
    module = export_module(policy, info, run_of(network))
    with torch.no_grad():
        outputs = policy.model.outputs(policy.observe(obs))
        noise = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(2))
        actions = policy.sample(outputs, noise)
        inputs = module.forward_exploration({"obs": obs})["action_dist_inputs"]
        theirs = module.get_train_action_dist_cls().from_logits(inputs)
        expected = policy.model.head.log_prob(outputs, actions)
        # RLlib's squashed density leaves out the box's scale, (1 * 1.5).
        if policy.model.head.bounded:
            expected = expected + policy.model.head.scale.log().sum()
        found = theirs.logp(policy.environment_actions(actions))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("action", [BOX, CHOICE, OPTIONS])
def test_two_mlps_are_rllib_s_default_module(action):
    info = replace(INFO, action=action)
    assert (
        type(export_module(policy_of(info, NETWORK), info, RunSpec(network=NETWORK)))
        is DefaultPPOTorchRLModule
    )


def test_values_of_sequences_follow_the_states():
    network = replace(NETWORK, core="gru")
    policy, obs = policy_of(INFO, network), observations(INFO)
    module = export_module(policy, INFO, run_of(network))
    states = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    values = of_module(module, obs, states)[1]
    with torch.no_grad():
        for t, step in enumerate(policy.observe(obs).view(2, 3, -1).unbind(1)):
            torch.testing.assert_close(values[:, t], policy.model.step_values(step, states[:, 4:]))
            states = policy.model.step(step, states)[1]
