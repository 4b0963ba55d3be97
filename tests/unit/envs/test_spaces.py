"""Gymnasium's spaces, one by one: what a policy is told of them, and that it trains, evaluates and goes into datasets."""

import json

import gymnasium
import numpy as np
import pyarrow as pa
import pytest
import torch
from gymnasium import spaces

from actors.gmi import GmiContext
from actors.protocols import ActionSpec
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.learning import LearningSpec
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import make_env_factory
from rayagi.envs.errors import UnsupportedSpaceError
from rayagi.envs.gymnasium_adapter import action_spec, to_space
from rayagi.rl_module import spaces as rllib_spaces
from rayagi.serving.column_layout import ColumnBlock, ColumnLayout, Numbering, record_batch
from rayagi.serving.dataset import spaces_of
from tests.fakes.echo import ACTIONS, CHOICES, OBSERVATIONS

ECHO = "tests.fakes.echo:Echo-v0"
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def program(obs="box", action="multi_discrete", *, algorithm="ppo", num_envs=16, **learning):
    settings = {
        "rollout_length": 16,
        "num_minibatches": 4,
        "num_epochs": 4,
        "learning_rate": 3e-3,
        **learning,
    }
    spec = RunSpec(
        algorithm=algorithm,
        env=EnvSpec(id=ECHO, kwargs={"obs": obs, "action": action}),
        gmi=GmiSpec(num_envs=num_envs, template=DEFINITIONS[algorithm].templates[-1]),
        network=NetworkSpec(hidden=(32,), activation="tanh"),
        learning=LearningSpec(**settings),
        seed=1,
    )
    return TrainingFactory(spec, make_env_factory(ECHO, kwargs=dict(spec.env.kwargs)))(GmiContext.local(ECHO))


@pytest.mark.parametrize(
    ("name", "kind", "outputs", "shape"),
    [
        ("discrete", "discrete", 3, ()),
        ("multi_discrete", "multi_discrete", 9, (3,)),
        ("multi_binary", "multi_discrete", 6, (3,)),
        ("integer_box", "multi_discrete", 9, (3,)),  # -1..1, 0..1, 2..5: three, two and four options
        ("box", "continuous", 2, (2,)),
    ],
)
def test_what_a_policy_is_told_of_an_action_space(name, kind, outputs, shape):
    spec = action_spec(ECHO, ACTIONS[name])
    assert (spec.kind, spec.output_dim, spec.shape, spec.is_discrete) == (kind, outputs, shape, name != "box")


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("discrete", [0, 2], [5, 7]),
        ("multi_discrete", [[0, 1, 3]], [[0, 1, 3]]),
        ("multi_discrete_from_two", [[0, 1, 3]], [[2, 3, 5]]),
        ("multi_binary", [[0, 1, 1]], [[0, 1, 1]]),
        ("integer_box", [[0, 0, 0], [2, 1, 3]], [[-1, 0, 2], [1, 1, 5]]),
        ("box", [[-3.0, 0.5]], [[-1.0, 0.5]]),
    ],
)
def test_actions_are_taken_as_the_space_has_them(name, given, taken):
    found = to_space(ACTIONS[name], np.array(given))
    assert found.tolist() == taken
    assert found.dtype == ACTIONS[name].dtype
    assert all(ACTIONS[name].contains(one) for one in found)


@pytest.mark.parametrize(
    ("space", "text"),
    [
        (spaces.Box(-1.0, 1.0, (2, 2)), r"Box.* of actions"),
        (spaces.MultiDiscrete([[2, 2], [2, 2]]), "MultiDiscrete"),
        (spaces.Text(5), "Text"),
        (spaces.Dict({"a": spaces.Discrete(2)}), "Dict"),
        # These had no outputs: a compiled update of them was a segmentation fault.
        (spaces.Box(-1.0, 1.0, (0,)), r"Box.* of actions.*empty"),
        (spaces.Box(-1, 1, (0,), np.int32), r"Box.* of actions.*empty"),
        (
            spaces.Box(0.0, 0.0, (2,)),
            r"Box.* of actions.*nothing to choose \(a MuJoCo actuator needs a ctrlrange\)",
        ),
        (spaces.MultiDiscrete(np.zeros(0, np.int64)), r"MultiDiscrete.* of actions.*empty"),
    ],
)
def test_a_space_that_no_policy_fits_is_refused_by_name(space, text):
    with pytest.raises(UnsupportedSpaceError, match=text):
        action_spec("Some-v0", space)


def test_whole_numbers_out_of_very_many_are_reals():
    # As choices they would be two milliards of logits.
    space = spaces.Box(0, 2**31 - 2, (2,), np.int32)
    assert action_spec(ECHO, space).kind == "continuous"
    # The nearest one, as a torque of 0.9 is 1 and not 0.
    assert to_space(space, np.array([[0.9, 1.2], [-3.0, 1e10]], np.float32)).tolist() == [
        [1, 1],
        [0, 2**31 - 2],
    ]


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_space_trains_evaluates_and_resumes(action):
    first = program(action=action)
    metrics = [first.iterate().metrics for _ in range(2)]
    assert all(np.isfinite(list(each.values())).all() for each in metrics)
    assert first.evaluate(4, seed=3).episode_lengths == [16] * 4
    second = program(action=action)
    second.load_state_dict(first.state_dict())
    for name, tensor in first.learner.policy.model.state_dict().items():
        assert torch.equal(second.learner.policy.model.state_dict()[name], tensor)
    first.close()
    second.close()


@pytest.mark.parametrize("obs", OBSERVATIONS)
def test_every_observation_space_trains(obs):
    made = program(obs=obs)
    assert np.isfinite(list(made.iterate().metrics.values())).all()
    flat = {"box": 3, "discrete": 5, "multi_discrete": 33, "multi_binary": 3, "dict": 7, "tuple": 6}
    assert made.rollout.raw_obs.shape == (16, 16, flat[obs])
    made.close()


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("trpo", "appo", "impala", "a3c") else ())
        for name, each in DEFINITIONS.items()
        if each.model is None and each.templates[0] != "offline"
    ],
)
def test_several_choices_at_once_are_learned_by_every_algorithm(algorithm):
    learner = program(algorithm=algorithm)
    before = learner.evaluate(8, seed=3).mean_return()
    # impala and a3c make one gradient step per rollout; the others have epochs of minibatches.
    for _ in range(400 if algorithm in ("impala", "a3c") else 80):
        learner.iterate()
    # Of 16: by chance 16 * (1/3 + 1/2 + 1/4) / 3 = 5.8.
    assert before < 9
    assert learner.evaluate(8, seed=3).mean_return() > 13
    learner.close()


def test_the_probability_of_several_choices_is_the_product_of_each():
    model = program().learner.policy.model
    outputs = torch.randn((4, sum(CHOICES)), generator=torch.Generator().manual_seed(0))
    actions = torch.tensor([[0, 1, 3], [2, 0, 0], [1, 1, 1], [0, 0, 2]])
    parts = [torch.distributions.Categorical(logits=part) for part in outputs.split(CHOICES, -1)]
    expected = sum(part.log_prob(actions[:, i]) for i, part in enumerate(parts))
    torch.testing.assert_close(model.head.log_prob(outputs, actions), expected)
    torch.testing.assert_close(model.head.entropy(outputs), sum(part.entropy() for part in parts).mean())
    assert torch.equal(model.head.mode(outputs), torch.stack([part.logits.argmax(-1) for part in parts], -1))


def test_gumbel_noise_samples_each_choice_by_its_own_probability():
    head = program().learner.policy.model.head
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5, -0.5, 0.0, 0.0, 1.0, -1.0]).expand(20_000, -1)
    noise = -torch.log(-torch.log(torch.rand((20_000, 9), generator=generator)))
    sampled = head.sample(logits, noise)
    for i, part in enumerate(logits[0].split(CHOICES)):
        found = torch.bincount(sampled[:, i], minlength=len(part)) / 20_000
        torch.testing.assert_close(found, part.softmax(0), rtol=0, atol=0.015)  # four standard errors


def test_several_choices_go_into_a_dataset_s_columns_and_its_spaces():
    layout = ColumnLayout(obs_dim=2, action=ActionSpec(kind="multi_discrete", dim=3, choices=CHOICES))
    block = ColumnBlock(
        obs=np.zeros((1, 2, 2), np.float32), action=np.array([[[0, 1, 3], [2, 0, 1]]]),
        log_prob=np.zeros((1, 2), np.float32),
        reward=np.ones((1, 2), np.float32), terminated=np.zeros((1, 2), bool), truncated=np.zeros((1, 2), bool),
        final_obs=np.zeros((1, 2, 2), np.float32), last_obs=np.zeros((1, 2), np.float32), version=0,
    )  # fmt: skip
    numbering = Numbering(num_envs=1, first_env_index=0, total_envs=1, first_episode=0)
    episode, step, _ = numbering.enter(block)
    batch = record_batch(
        block,
        layout.arrow({}),
        episode=episode,
        step=step,
        envs=numbering.envs,
        gmi=0,
        session=0,
        is_last=True,
    )
    assert batch.schema.field("action").type == pa.list_(pa.int64(), 3)
    assert batch["action"].to_pylist() == [[0, 1, 3], [2, 0, 1]]
    assert ColumnLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout
    assert spaces_of(layout)[1] == gymnasium.spaces.MultiDiscrete(CHOICES)


def test_a_layout_of_before_several_choices_is_read():
    stored = {"obs_dim": 4, "action": {"kind": "discrete", "dim": 1, "num_choices": 2, "low": [], "high": []}}
    assert ColumnLayout.from_dict(stored).action == ActionSpec(kind="discrete", dim=1, num_choices=2)


def test_rllib_gets_the_space_of_several_choices():
    made = make_env_factory(ECHO, kwargs={"action": "multi_discrete"})
    env = made(num_envs=1, first_env_index=0, seed=0, num_threads=1)
    assert rllib_spaces(env.info)[1] == gymnasium.spaces.MultiDiscrete(CHOICES)
    env.close()
