"""Which states of a checkpoint fit an Algorithm."""

from dataclasses import replace

import pytest

from rayagi.config.presets import preset
from rayagi.rllib_fit import meaning_of_state, refuse_unfit_state

SPEC = preset("CartPole-v1")
OTHERS = {
    "network.activation": replace(SPEC, network=replace(SPEC.network, activation="relu")),
    "ppo.normalize_obs": replace(SPEC, learning=replace(SPEC.learning, normalize_obs=False)),
    "algorithm": preset("CartPole-v1", "trpo"),
}


def meaning(spec):
    return meaning_of_state(spec, spec.env.info())


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_normalisation_and_algorithms_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"the checkpoint has {name} = "):
        refuse_unfit_state(meaning(SPEC), meaning(OTHERS[name]))


def test_another_task_is_refused_by_its_observations():
    with pytest.raises(ValueError, match="columns of an observation = 4, and this algorithm 3"):
        refuse_unfit_state(meaning(SPEC), meaning(replace(SPEC, env=replace(SPEC.env, id="Pendulum-v1"))))


def test_other_learning_rates_and_numbers_fit():
    other = replace(
        SPEC,
        learning=replace(SPEC.learning, learning_rate=1e-5, gamma=0.9),
        network=replace(SPEC.network, initial_log_std=-1.0),
        gmi=replace(SPEC.gmi, num_envs=3),
        seed=8,
    )
    refuse_unfit_state(meaning(SPEC), meaning(other))
    refuse_unfit_state({}, meaning(other))  # a checkpoint of an earlier version
