"""A user's RLModule as the network: its distributions are RLlib's, and PPO trains it."""

from dataclasses import replace

import pytest
import torch
from ray.rllib.core.distribution.torch.torch_distribution import TorchDiagGaussian
from torch.distributions import kl_divergence

from actors.protocols import ActionSpec, EnvInfo
from rayagi.config.errors import ConfigError
from rayagi.config.rules import refuse_unfit_network
from rayagi.config.spec import EnvSpec, NetworkSpec
from rayagi.envs import make_env_factory
from rayagi.models.heads import StateGaussianHead
from rayagi.models.networks import make_model
from tests.fakes.echo import ACTIONS
from tests.unit.algorithms.test_program import SPEC, build

MODULES, ECHO = "tests.fakes.rl_modules", "tests.fakes.echo:Echo-v0"
BOX = ActionSpec(kind="continuous", dim=3, low=(-1.0,) * 3, high=(1.0,) * 3)
INFO = EnvInfo(env_id="Some-v0", engine="x", obs_dim=5, action=BOX, max_episode_steps=None)
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def named(name, **kwargs):
    return NetworkSpec(module=f"{MODULES}:{name}", module_kwargs=kwargs)


def test_the_outputs_are_those_of_rllib_s_gaussian():
    model = make_model(INFO, named("Trunk", width=7))
    assert model.network.module.module.trunk[0].weight.shape == (7, 5)
    obs = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    outputs, values = model(obs)
    assert outputs.shape == (4, 6)
    torch.testing.assert_close(values, model.network.module.module.compute_values({"obs": obs}))
    theirs, actions = TorchDiagGaussian.from_logits(outputs), torch.randn(4, 3)
    torch.testing.assert_close(model.head.log_prob(outputs, actions), theirs.logp(actions))
    torch.testing.assert_close(model.head.entropy(outputs), theirs.entropy().mean())
    torch.testing.assert_close(model.head.mode(outputs), theirs.to_deterministic().sample())
    assert model.network.module.module.observation_space.shape == (5,)


def test_samples_have_the_state_s_standard_deviation():
    head = StateGaussianHead(2)
    outputs = torch.tensor([[1.0, 2.0, 0.0, 3.0]])
    noise = torch.tensor([[1.0, -1.0, 9.0, 9.0]])
    torch.testing.assert_close(head.sample(outputs, noise), torch.tensor([[2.0, 2 - torch.e**3]]))
    other = torch.tensor([[1.0, 2.0, 1.0, 3.0]])
    found = kl_divergence(head.distribution(outputs), head.distribution(other))
    assert found.item() == pytest.approx(
        1 + 1 / (2 * torch.e**2) - 0.5
    )  # log(s2 / s1) + s1^2 / (2 s2^2) - 1/2


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one, two, other = (make_model(INFO, named("Trunk"), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.network.module.module.value.weight, other.network.module.module.value.weight)


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (named("WithoutValues"), r"has no method compute_values.*ValueFunctionAPI too"),
        (named("WithState"), r"has a state.*torch module with state_dim"),
        (named("Silent"), r"its forward gives embeddings, and no action_dist_inputs"),
        (named("MeansOnly"), r"outputs of shape \(3, 3\) .* return float32 outputs of shape \(3, 6\)"),
        (named("OfItsOwn"), r"has the action distribution Beta; use RLlib's TorchDiagGaussian"),
        (named("Trunk", width="wide"), r"cannot be built with .*TypeError.*setup\(self\)"),
        (replace(named("Trunk"), head="squashed_gaussian"), r"network.head = 'squashed_gaussian' another; leave"),
        (NetworkSpec(module="ray.rllib.core.rl_module:RLModule"), r"is an RLModule without torch"),
    ],
)  # fmt: skip
def test_an_rl_module_that_does_not_fit_is_refused_with_what_to_do(network, reason):
    with pytest.raises(ConfigError, match=reason):
        refuse_unfit_network(network, INFO)


@pytest.mark.parametrize("action", ACTIONS)
def test_it_trains_evaluates_and_resumes_on_every_action_space(action):
    spec = replace(SPEC, env=EnvSpec(id=ECHO, kwargs={"action": action}), network=named("Trunk"))
    make_env = make_env_factory(ECHO, kwargs={"action": action})
    still = build(replace(spec, learning=replace(spec.learning, learning_rate=1e-12)), make_env=make_env)
    assert still.iterate().metrics["approx_kl"] == pytest.approx(0.0, abs=1e-6)
    program, resumed = build(spec, make_env=make_env), build(spec, make_env=make_env)
    program.iterate()
    resumed.load_state_dict(program.state_dict())
    assert resumed.evaluate(3, seed=1).episode_returns == program.evaluate(3, seed=1).episode_returns
