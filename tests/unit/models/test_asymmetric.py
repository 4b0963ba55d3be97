"""An asymmetric critic: the value network sees what is kept from the policy, by name or by range."""

from dataclasses import replace

import pytest
import torch

from actors.protocols import ActionSpec, EnvInfo, ObsPart
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.trpo import TRPOSpec
from rayagi.config.convert import run_spec_from_dict, run_spec_to_dict, with_settings
from rayagi.config.errors import ConfigError
from rayagi.config.rules import checked, refuse_unfit_network
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec
from rayagi.config.yaml_text import parse_yaml
from rayagi.envs import env_info, make_env_factory
from rayagi.models.columns import policy_view
from rayagi.models.networks import ActorCritic
from rayagi.models.policy import load_policy
from tests.unit.algorithms.test_program import SPEC, build

HINT, ECHO = "tests.fakes.hint:Hint-v0", "tests.fakes.echo:Echo-v0"
INFO = EnvInfo(
    env_id="Some-v0", engine="x", obs_dim=6, action=ActionSpec(kind="continuous", dim=2), max_episode_steps=None,
    obs_members=(("force", 2), ("joints", 3), ("time", 1)),
)  # fmt: skip
IMAGE = replace(
    INFO,
    obs_dim=2 + 1296 + 1,
    obs_parts=(
        ObsPart(size=2, shape=(2,)),
        ObsPart(size=1296, shape=(36, 36, 1)),
        ObsPart(size=1, shape=(1,)),
    ),
    obs_members=(("force", 2), ("image", 1296), ("time", 1)),
)
pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize(
    ("critic_only", "seen"),
    [
        ((), (0, 1, 2, 3, 4, 5)),
        (("force",), (2, 3, 4, 5)),
        (("joints", "time"), (0, 1)),
        (("1:3",), (0, 3, 4, 5)),
        (("4:",), (0, 1, 2, 3)),
        ((":2", "force", "5:6"), (2, 3, 4)),
    ],
)
def test_the_policy_sees_what_is_not_kept_from_it(critic_only, seen):
    view, columns = policy_view(INFO, critic_only)
    assert columns == seen
    assert view.obs_dim == len(seen)
    assert view.obs_parts == ()


def test_an_image_is_kept_from_the_policy_as_a_whole():
    view, columns = policy_view(IMAGE, ("image",))
    assert (view.obs_parts, columns) == ((), (0, 1, 1298))
    view, columns = policy_view(IMAGE, ("0:1", "time"))
    assert [part.shape for part in view.obs_parts] == [(1,), (36, 36, 1)]
    assert columns == tuple(range(1, 1298))
    network = NetworkSpec(hidden=(4,), critic_only=("0:1", "time"))
    assert ActorCritic(IMAGE, network).outputs(torch.zeros(2, 1299)).shape == (2, 2)


@pytest.mark.parametrize(
    ("info", "critic_only", "reason"),
    [
        (INFO, ("torque",), "names 'torque', which Some-v0 does not have: its keys are force, joints, time; use"),
        (replace(INFO, obs_members=()), ("force",), "one vector without names; use a range of its 6 columns, such as 0:3"),
        (INFO, ("4:9",), "has '4:9', and Some-v0 has columns 0:6; name columns within them"),
        (INFO, ("3:3",), "has '3:3'"),
        (INFO, ("0:4", "4:6"), "leaves nothing of Some-v0's 6 columns for the policy; name fewer"),
        (IMAGE, ("5:9",), "a part of an image of Some-v0, which is columns 2:1298; take all of it, or none"),
    ],
)  # fmt: skip
def test_columns_that_cannot_be_kept_are_refused_with_what_there_is(info, critic_only, reason):
    with pytest.raises(ConfigError, match=reason):
        refuse_unfit_network(NetworkSpec(critic_only=critic_only), info)


def test_shared_layers_and_a_network_of_one_s_own_are_refused_beside_it():
    for changes in ({"shared": True}, {"module": "net.py:Net"}):
        with pytest.raises(ConfigError, match=r"network\.critic_only"):
            checked(replace(SPEC, network=NetworkSpec(critic_only=("0:2",), **changes)))


def test_ranges_are_text_in_files_and_options():
    assert parse_yaml("[27:45, 0x1f, 12, -3]") == ["27:45", 31, 12, -3]
    spec = with_settings(SPEC, ["network.critic_only=[27:45, force]"])
    assert spec.network.critic_only == ("27:45", "force")
    assert run_spec_from_dict(run_spec_to_dict(spec)) == spec


@pytest.mark.parametrize("core", ["none", "gru"])
def test_actions_do_not_depend_on_these_columns_and_values_do(core):
    model = ActorCritic(INFO, NetworkSpec(hidden=(8,), core=core, core_size=4, critic_only=("joints",)))
    one = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[:, 2:5] += 1.0
    if core == "none":
        assert torch.equal(model.outputs(one), model.outputs(other))
        assert (model.values(one) != model.values(other)).all()
    else:
        states = torch.zeros(5, model.state_dim)
        for _ in range(2):
            (outputs, after), (others, afterwards) = model.step(one, states), model.step(other, states)
            assert torch.equal(outputs, others)
            assert torch.equal(after[:, :4], afterwards[:, :4])
            assert (after[:, 4:] != afterwards[:, 4:]).any(1).all()
            states = after
    assert not model.fits_kernels


def test_names_of_a_dict_observation_are_known():
    info = env_info(ECHO, kwargs={"obs": "dict"})
    assert info.obs_members == (("noise", 4), ("shown", 3))
    assert env_info(ECHO).obs_members == ()


def spec_of(critic_only, algorithm="ppo"):
    settings = {
        "rollout_length": 16,
        "num_minibatches": 2,
        "num_epochs": 8,
        "learning_rate": 3e-3,
        "gamma": 0.1,
    }
    return replace(
        SPEC,
        algorithm=algorithm,
        env=EnvSpec(id=HINT),
        gmi=GmiSpec(num_envs=16),
        network=NetworkSpec(hidden=(16,), activation="tanh", critic_only=critic_only),
        learning={"ppo": PPOSpec, "trpo": TRPOSpec}[algorithm](**settings),
    )


@pytest.mark.parametrize("algorithm", ["ppo", "trpo"])
def test_the_value_is_learned_from_what_only_it_sees(algorithm):
    spec = spec_of(("hint",), algorithm)
    program = build(spec, make_env=make_env_factory(HINT))
    fits = [program.iterate().metrics["explained_variance"] for _ in range(25)]
    # The rest is the noise of later rewards, some 0.095^2 of the variance.
    assert fits[-1] > 0.95
    saved = program.state_dict()["shared"]
    policy = load_policy(saved, spec, program.learner.policy.info)
    obs = torch.tensor([[0.9, 0.1, 0.2], [-0.9, 0.1, 0.2]])
    outputs = policy.outputs(policy.observe(obs))
    assert torch.equal(outputs[0], outputs[1])
    assert program.evaluate(2, seed=1).episode_lengths == [8, 8]
