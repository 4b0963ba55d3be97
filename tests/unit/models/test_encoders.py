"""Convolutional encoders: how flat observations are taken apart, and that policies learn from pixels."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from actors.gmi import GmiContext
from actors.protocols import ActionSpec, EnvInfo, ObsPart
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.errors import ConfigError
from rayagi.config.rules import NATURE_LEAST_PIXELS, refuse_unfit_network
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import env_info, make_env_factory
from rayagi.envs.errors import UnsupportedSpaceError
from rayagi.envs.gymnasium_adapter import observation_parts
from rayagi.models.encoders import PartsEncoder, impala_cnn, nature_cnn
from rayagi.models.networks import ActorCritic
from rayagi.models.policy import new_policy, vector_columns

BARS = "tests.fakes.echo:Bars-v0"


def generator():
    return torch.Generator().manual_seed(0)


pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize(
    ("space", "parts"),
    [
        (spaces.Box(0, 255, (84, 84, 4), np.uint8), [((84, 84, 4), True, 1 / 255)]),
        (spaces.Box(0, 255, (4, 84, 84), np.uint8), [((4, 84, 84), False, 1 / 255)]),
        (spaces.Box(0, 255, (84, 84), np.uint8), [((84, 84, 1), True, 1 / 255)]),
        (spaces.Box(0.0, 1.0, (3, 40, 50), np.float32), [((3, 40, 50), False, 1.0)]),
        (spaces.Box(0.0, 255.0, (84, 84, 3), np.float32), [((84, 84, 3), True, 1 / 255)]),
        (spaces.Box(0, 10, (19, 19, 24), np.uint8), [((19, 19, 24), True, 0.1)]),
        (spaces.Box(-1.0, 1.0, (96, 84, 84), np.float32), [((96, 84, 84), False, 1.0)]),
        (spaces.Box(0, 255, (7, 7, 3), np.uint8), [((147,), True, 1.0)]),  # a board, no picture
        (spaces.Box(0, 255, (4, 2), np.uint8), [((8,), True, 1.0)]),
        (spaces.Box(-1.0, 1.0, (5,)), [((5,), True, 1.0)]),
        (spaces.Box(-1.0, 1.0, (5, 2)), [((10,), True, 1.0)]),
        (
            spaces.Dict({"b": spaces.Discrete(3), "a": spaces.Box(0, 255, (40, 40, 3), np.uint8)}),
            [((40, 40, 3), True, 1 / 255), ((3,), True, 1.0)],  # Gymnasium sorts a dictionary's keys
        ),
    ],
)
def test_a_flat_observation_is_made_up_as_gymnasium_flattens_it(space, parts):
    found = observation_parts("x", space)
    assert [(part.shape, part.channels_last, part.scale) for part in found] == parts
    assert sum(part.size for part in found) == spaces.flatdim(space)


def test_an_image_of_four_dimensions_is_refused():
    with pytest.raises(UnsupportedSpaceError, match=r"Box\(2, 84, 84, 3\).*join its frames"):
        observation_parts("x", spaces.Box(0, 255, (2, 84, 84, 3), np.uint8))


def test_the_nature_cnn_has_the_paper_s_sizes():
    # 84 -> (84 - 8) / 4 + 1 = 20 -> (20 - 4) / 2 + 1 = 9 -> 9 - 3 + 1 = 7: 7 * 7 * 64 = 3136 features, then 512 units.
    cnn = nature_cnn(4, 84, 84, generator())
    linear = next(layer for layer in cnn if isinstance(layer, nn.Linear))
    assert (linear.in_features, linear.out_features) == (3136, 512)
    weights = 4 * 32 * 64 + 32 * 64 * 16 + 64 * 64 * 9 + 3136 * 512
    assert sum(p.numel() for p in cnn.parameters()) == weights + 32 + 64 + 64 + 512


def test_the_impala_cnn_has_fifteen_convolutions_and_halves_the_image_three_times():
    cnn = impala_cnn(3, 64, 64, generator())
    convolutions = [layer for layer in cnn.modules() if isinstance(layer, nn.Conv2d)]
    linear = next(layer for layer in cnn if isinstance(layer, nn.Linear))
    assert len(convolutions) == 3 * (1 + 2 * 2)
    assert (linear.in_features, linear.out_features) == (8 * 8 * 32, 256)


def test_an_image_that_is_too_small_is_refused_with_what_to_use():
    info = env_info(BARS, kwargs={"size": 20})
    with pytest.raises(
        ConfigError, match=r"at least 36 x 36 pixels, .* has 20 x 20; use network.cnn = 'impala'"
    ):
        refuse_unfit_network(NetworkSpec(), info)
    refuse_unfit_network(NetworkSpec(cnn="impala"), info)
    refuse_unfit_network(NetworkSpec(), env_info(BARS, kwargs={"size": NATURE_LEAST_PIXELS}))
    smallest = nature_cnn(3, NATURE_LEAST_PIXELS, NATURE_LEAST_PIXELS, generator())
    assert smallest(torch.zeros(1, 3, 36, 36)).shape == (1, 512)
    assert impala_cnn(3, 20, 36, generator())(torch.zeros(1, 3, 20, 36)).shape == (1, 256)


def test_the_same_picture_gives_the_same_features_wherever_its_channels_are():
    picture = torch.rand((2, 40, 40, 3), generator=generator())
    last = PartsEncoder([ObsPart(size=4800, shape=(40, 40, 3))], "nature", generator())
    first = PartsEncoder([ObsPart(size=4800, shape=(3, 40, 40), channels_last=False)], "nature", generator())
    expected = last(picture.reshape(2, -1))
    torch.testing.assert_close(first(picture.permute(0, 3, 1, 2).reshape(2, -1)), expected)
    bytes_ = PartsEncoder([ObsPart(size=4800, shape=(40, 40, 3), scale=1 / 255)], "nature", generator())
    torch.testing.assert_close(bytes_(255 * picture.reshape(2, -1)), expected)


def test_vectors_go_beside_the_features_and_leading_dimensions_stay():
    parts = [ObsPart(size=2, shape=(2,)), ObsPart(size=1296, shape=(36, 36, 1)), ObsPart(size=3, shape=(3,))]
    encoder = PartsEncoder(parts, "nature", generator())
    assert encoder.num_features == 2 + 512 + 3
    obs = torch.rand((4, 5, 1301), generator=generator())
    features = encoder(obs)
    assert features.shape == (4, 5, 517)
    assert torch.equal(features[..., :2], obs[..., :2])
    assert torch.equal(features[..., -3:], obs[..., -3:])


def test_weights_depend_on_the_seed_alone():
    info = EnvInfo(
        env_id="x", engine="x", obs_dim=1296, action=ActionSpec(kind="discrete", dim=1, num_choices=2),
        max_episode_steps=None, obs_parts=(ObsPart(size=1296, shape=(36, 36, 1)),),
    )  # fmt: skip
    before = torch.get_rng_state()
    one, two, other = (ActorCritic(info, NetworkSpec(hidden=(4,)), seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert not one.fits_kernels
    assert ActorCritic(replace(info, obs_parts=()), NetworkSpec(hidden=(4,))).fits_kernels


def test_pixels_are_left_alone_and_vectors_are_normalised():
    info = env_info(BARS, kwargs={"kind": "dict"})
    assert vector_columns(info) == (1296, 1297)
    policy = new_policy(RunSpec(env=EnvSpec(id=BARS)), info, torch.device("cpu"))
    obs = torch.tensor([[100.0] * 1296 + [1.0, 5.0], [200.0] * 1296 + [3.0, 5.0]])
    policy.normaliser.update(policy.normaliser.moments_of(obs))
    observed = policy.observe(obs)
    assert torch.equal(observed[:, :1296], obs[:, :1296])
    torch.testing.assert_close(observed[:, 1296], torch.tensor([-1.0, 1.0]), rtol=1e-4, atol=0)
    again = new_policy(RunSpec(env=EnvSpec(id=BARS)), info, torch.device("cpu"))
    again.normaliser.load_state_dict(policy.normaliser.state_dict())
    assert torch.equal(again.observe(obs), observed)
    assert new_policy(RunSpec(), env_info(BARS), torch.device("cpu")).normaliser is None


def program(kind, cnn, size):
    spec = RunSpec(
        env=EnvSpec(id=BARS, kwargs={"kind": kind, "size": size}),
        gmi=GmiSpec(num_envs=8),
        network=NetworkSpec(hidden=(16,), activation="tanh", cnn=cnn),
        learning=PPOSpec(rollout_length=16, num_minibatches=2, num_epochs=2, learning_rate=1e-3),
        seed=2,
    )
    return TrainingFactory(spec, make_env_factory(BARS, kwargs={"kind": kind}))(GmiContext.local(BARS))


@pytest.mark.parametrize(
    ("kind", "cnn", "size"),
    [
        ("last", "nature", 36),
        pytest.param("dict", "nature", 36, marks=pytest.mark.slow),
        pytest.param("first", "nature", 36, marks=pytest.mark.slow),
        pytest.param("gray", "nature", 36, marks=pytest.mark.slow),
        pytest.param("last", "impala", 16, marks=pytest.mark.slow),
    ],
)
def test_a_policy_learns_from_pixels(kind, cnn, size):
    learner = program(kind, cnn, size)
    before = learner.evaluate(8, seed=3).mean_return()
    for _ in range(25):
        learner.iterate()
    # Of 16, by chance 4.
    assert before < 8
    assert learner.evaluate(8, seed=3).mean_return() > 15
    learner.close()
