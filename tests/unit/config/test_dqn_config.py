"""RLlib's face of DQN: its names, and what is said where rayagi has another."""

import pytest

from rayagi.algorithms.dqn import DQNSpec
from rayagi.config.errors import ConfigError
from rayagi.config.presets import preset
from rayagi.config.rllib_classes import CONFIGS

DQNConfig = CONFIGS["dqn"]


def test_unset_values_come_from_the_preset():
    assert DQNConfig().environment("CartPole-v1").to_run_spec() == preset("CartPole-v1", "dqn")


def test_rllibs_names_set_rayagis_fields():
    config = DQNConfig().environment("CartPole-v1").training(
        lr=2e-3, double_q=False, dueling=True, num_atoms=51, v_min=0.0, v_max=100.0, noisy=True, sigma0=0.3, n_step=3,
        tau=0.5, grad_clip=1.0, num_steps_sampled_before_learning_starts=500, target_interval=7, prioritized=True,
    )  # fmt: skip
    learning = config.to_run_spec().learning
    assert isinstance(learning, DQNSpec)
    assert (learning.learning_rate, learning.double, learning.dueling) == (2e-3, False, True)
    assert (learning.num_atoms, learning.v_min, learning.v_max) == (51, 0.0, 100.0)
    assert (learning.noisy, learning.sigma0, learning.n_step, learning.tau) == (True, 0.3, 3, 0.5)
    assert (learning.max_grad_norm, learning.learning_starts) == (1.0, 500)
    assert (learning.target_interval, learning.prioritized) == (7, True)


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"target_network_update_freq": 100}, "target_interval"),
        ({"epsilon": [(0, 1.0), (1000, 0.1)]}, "epsilon_start"),
        ({"adam_epsilon": 1e-4}, "adam_eps"),
        ({"hiddens": [64]}, "fcnet_hiddens"),
        ({"td_error_loss_fn": "mse"}, "Huber"),
        ({"burn_in_len": 4}, "no memory"),
        ({"replay_buffer_config": {"capacity": 10}}, "capacity="),
        # RLlib's own defaults, which rayagi's DQN does not have:
        ({"target_network_update_freq": 500}, "target_interval"),
        ({"epsilon": [(0, 1.0), (10_000, 0.05)]}, "epsilon_start"),
        ({"hiddens": [256]}, "fcnet_hiddens"),
        ({"train_batch_size": 32}, "batch_size="),
    ],
)
def test_other_settings_of_rllib_name_what_to_use(given, instead):
    config = DQNConfig().environment("CartPole-v1").training(**given)
    with pytest.raises(ConfigError) as caught:
        config.to_run_spec()
    assert instead in str(caught.value)


def test_unset_values_read_as_what_it_takes_or_as_none_where_it_has_them_in_another_form():
    config = DQNConfig().environment("CartPole-v1")
    assert config.train_batch_size == config.to_run_spec().learning.batch_size == 64
    assert (config.hiddens, config.epsilon, config.target_network_update_freq) == (None, None, None)


def test_one_result_is_one_iteration_of_the_gmis():
    """RLlib's DQN repeats training steps until it has 1,000 environment steps."""
    assert DQNConfig().min_sample_timesteps_per_iteration == 0
