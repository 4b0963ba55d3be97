"""RLlib's SACConfig: its names, those in another form, and what is refused."""

import pytest

from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.off_policy import ON_POLICY
from rayagi.config.presets import preset
from rayagi.config.rllib_classes import CONFIGS
from rayagi.config.rllib_settings import PRESET, AlgorithmSettings
from tests.unit.config.test_ppo_config import assert_it_keeps_its_meaning, refusal

CLASSES = [cls for name, cls in CONFIGS.items() if name in ("sac", "td3")]
EACH = pytest.mark.parametrize("cls", CLASSES)
SACConfig = CONFIGS["sac"]


def config(cls=SACConfig, **training):
    return cls().environment("Ant-v5").gmi(num_gmis=2, num_envs=8).training(**training)


@EACH
def test_unset_values_come_from_the_preset(cls):
    assert cls().environment("Ant-v5").to_run_spec() == preset("Ant-v5", cls.algorithm)


def test_a_task_s_settings_of_one_algorithm_come_before_the_algorithm_s():
    normalised = {
        (task, algorithm): preset(task, algorithm).learning.normalize_obs
        for task in ("Ant-v5", "HalfCheetah-v5")
        for algorithm in ("sac", "td3")
    }
    assert normalised == {
        ("Ant-v5", "sac"): False, ("Ant-v5", "td3"): True,
        ("HalfCheetah-v5", "sac"): True, ("HalfCheetah-v5", "td3"): True,
    }  # fmt: skip


def test_rllibs_names_are_the_settings():
    found = config(
        tau=0.01, n_step=3, actor_lr=1e-4, critic_lr=2e-4, alpha_lr=3e-4, initial_alpha=0.5, target_entropy=-4.0,
        gamma=0.98, grad_clip=1.0, num_steps_sampled_before_learning_starts=700, twin_q=True,
        train_batch_size_per_learner=64, replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 5000},
    ).to_run_spec().learning  # fmt: skip
    assert (found.tau, found.n_step, found.gamma, found.max_grad_norm) == (0.01, 3, 0.98, 1.0)
    assert (found.learning_rate, found.critic_learning_rate, found.alpha_learning_rate) == (1e-4, 2e-4, 3e-4)
    assert (found.initial_alpha, found.target_entropy, found.learning_starts) == (0.5, -4.0, 700)
    assert (found.batch_size, found.capacity) == (128, 5000)  # of two learners
    assert config(target_entropy="auto").to_run_spec().learning.target_entropy is None


def test_unset_values_read_as_those_in_effect():
    built = config(batch_size=100, capacity=7000)
    assert built._train_batch_size_per_learner == 50
    assert built.replay_buffer_config == {"type": "EpisodeReplayBuffer", "capacity": 7000}
    assert (built.actor_lr, built.normalize_actions, built.twin_q) == (1e-3, True, True)


def test_the_share_of_learners_that_are_not_counted_is_refused():
    built = SACConfig().environment("Ant-v5").training(train_batch_size_per_learner=64)
    assert "the share of one learner, whose number is not given; use gmi(num_gmis=) too" in refusal(built)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"twin_q": False}, "there are always two critics"),
        ({"lr": 1e-3}, "use training(actor_lr=, critic_lr=)"),
        (
            {"training_intensity": 4.0},
            "use training(updates_per_step=), the intensity divided by the batch size",
        ),
        ({"store_buffer_in_checkpoints": True}, "the checkpoints of `rayagi train` have the replay"),
        ({"target_network_update_freq": 5}, "training(tau=)"),
        (
            {"replay_buffer_config": {"type": "PrioritizedEpisodeReplayBuffer"}},
            "is for another replay than a uniform one",
        ),
        ({"batch_size": 3, "train_batch_size_per_learner": 2}, "contradicts training(batch_size=3)"),
        ({"n_step": (1, 5)}, "training(n_step=)"),
        ({"tau": 2.0}, "training(tau=) = 2.0: must be greater than 0 and at most 1"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_alternative(training, message):
    assert message in refusal(config(**training))


@EACH
def test_the_table_of_settings_agrees_with_the_config_and_the_spec(cls):
    settings, attributes = AlgorithmSettings(definition=DEFINITIONS[cls.algorithm]), vars(cls())
    assert set(settings.paths) <= set(attributes)
    assert {name for name, value in attributes.items() if value is PRESET} == set(settings.unset)
    fields = set(settings.definition.settings.__dataclass_fields__)
    assert set(settings.definition.training_names.values()) == fields - set(ON_POLICY)


@EACH
def test_the_config_keeps_its_meaning_through_everything_that_rllib_and_tune_do_to_it(cls):
    built = config(cls, actor_lr=1e-3, gamma=0.9, train_batch_size_per_learner=32)
    assert_it_keeps_its_meaning(built)
