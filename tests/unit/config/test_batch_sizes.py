import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rayagi.config.errors import ConfigError
from rayagi.config.rllib_values import GivenSizes, rollout_and_minibatches


def sizes(num_envs=32, num_gmis=None, preset_length=64, preset_minibatches=8, **given):
    return rollout_and_minibatches(
        GivenSizes(**given),
        num_envs=num_envs,
        num_gmis=num_gmis,
        preset_length=preset_length,
        preset_minibatches=preset_minibatches,
    )


def test_without_sizes_the_preset_applies():
    assert sizes() == (64, 8)


def test_a_batch_per_learner_is_the_steps_of_one_gmi():
    assert sizes(train_batch_size_per_learner=1024) == (32, 8)  # 1024 / 32 environments


def test_a_whole_batch_is_the_steps_of_all_gmis():
    assert sizes(train_batch_size=4096, num_gmis=4) == (32, 8)  # 4096 / (4 * 32)


def test_a_minibatch_size_becomes_a_number_of_minibatches():
    assert sizes(train_batch_size_per_learner=2048, minibatch_size=256) == (64, 8)
    assert sizes(minibatch_size=2048) == (64, 1)


def test_a_presets_minibatches_adapt_to_a_given_rollout_length():
    assert sizes(rollout_length=20) == (20, 4)  # gcd(20, 8)
    assert sizes(rollout_length=7) == (7, 1)
    assert sizes(rollout_length=20, num_minibatches=3) == (
        20,
        3,
    )  # given values stay, and the rules reject them


def test_sizes_that_agree_may_be_given_twice():
    assert sizes(
        rollout_length=32, train_batch_size_per_learner=1024, minibatch_size=512, num_minibatches=2
    ) == (32, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_batch_size_per_learner": 1000}, r"multiple of gmi\(num_envs=\) = 32; use 992 or 1024"),
        ({"train_batch_size_per_learner": 10}, r"use 32$"),
        ({"train_batch_size_per_learner": 0}, r"use 32$"),
        ({"train_batch_size": 4096}, r"gmi\(num_gmis=\) too, or train_batch_size_per_learner"),
        ({"train_batch_size": 4000, "num_gmis": 2}, r"num_gmis \* num_envs = 64; use 3968 or 4032"),
        (
            {"rollout_length": 64, "train_batch_size_per_learner": 1024},
            "sizes that disagree: .*64.*means 32 steps",
        ),
        ({"minibatch_size": 100}, "num_envs = 32 times a divisor of the rollout length 64; use 64 or 128"),
        ({"minibatch_size": 256, "num_minibatches": 4}, "means 8 minibatches, but num_minibatches is 4"),
    ],
)
def test_sizes_that_cannot_be_made_name_what_can(given, message):
    with pytest.raises(ConfigError, match=message):
        sizes(**given)


@given(
    num_envs=st.integers(1, 64),
    length=st.integers(1, 64),
    minibatches=st.integers(1, 64),
    num_gmis=st.integers(1, 8),
)
def test_whatever_batch_sizes_are_accepted_multiply_out(num_envs, length, minibatches, num_gmis):
    assume(length % minibatches == 0)
    got = sizes(
        num_envs=num_envs,
        num_gmis=num_gmis,
        train_batch_size=num_gmis * num_envs * length,
        minibatch_size=num_envs * length // minibatches,
    )
    assert got == (length, minibatches)
