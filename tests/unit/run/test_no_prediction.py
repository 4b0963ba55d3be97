"""Where a run was not predicted, its user reads which command measures, if there is one."""

import pytest

from rayagi.envs.creators import register_creator
from rayagi.run.prediction import no_prediction_text


@pytest.mark.parametrize(
    ("env_id", "hint"),
    [
        ("CartPole-v1", "; `rayagi search CartPole-v1` does"),
        # Made by a function in another program: a command cannot make it.
        (register_creator("mine", lambda config: None), ""),
    ],
)
def test_a_search_is_offered_only_for_environments_that_a_command_can_make(env_id, hint):
    assert no_prediction_text(env_id) == "no prediction: this plan was not measured here" + hint
