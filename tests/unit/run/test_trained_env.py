"""A run keeps sizes and actions of its environment, and refuses one that was changed."""

import json
import math
from dataclasses import replace

import pytest

from actors.protocols import ActionSpec, EnvInfo
from rayagi.run.errors import EnvironmentChangedError, RunFolderError
from rayagi.run.trained_env import env_to_dict, refuse_changed_env

BOX = ActionSpec(kind="continuous", dim=2, low=(-1.0, -1.0), high=(1.0, 1.0))
ACTIONS = (
    BOX,
    ActionSpec(kind="continuous", dim=2, low=(-5.0, -5.0), high=(5.0, 5.0)),
    ActionSpec(kind="continuous", dim=2, low=(-math.inf, 0.1), high=(math.inf, math.inf)),
    ActionSpec(kind="discrete", dim=1, num_choices=3),
    ActionSpec(kind="discrete", dim=1, num_choices=4),
    ActionSpec(kind="discrete", dim=1, num_choices=4, starts=(-1,)),
    ActionSpec(kind="multi_discrete", dim=2, choices=(2, 3)),
    ActionSpec(kind="multi_discrete", dim=2, choices=(3, 2)),
)


def info(action=BOX, obs_dim=3):
    return EnvInfo(env_id="A", engine="gymnasium", obs_dim=obs_dim, action=action, max_episode_steps=None)


def kept(action=BOX, obs_dim=3):
    """What run.json gives again."""
    text = json.dumps(env_to_dict(info(action, obs_dim)), allow_nan=False)
    return json.loads(text)


@pytest.mark.parametrize("action", ACTIONS)
def test_an_environment_fits_its_own_run_and_no_other_s(action):
    refuse_changed_env("runs/a", kept(action), info(action))
    for other in ACTIONS:
        if other is not action:
            with pytest.raises(EnvironmentChangedError, match="actions were"):
                refuse_changed_env("runs/a", kept(other), info(action))


def test_all_that_differs_is_named():
    with pytest.raises(EnvironmentChangedError) as caught:
        refuse_changed_env("runs/a", kept(), info(ACTIONS[1], 4))
    assert str(caught.value).startswith(
        "runs/a: A was changed since the run began (an observation had 3 numbers and has 4, and actions were 2 reals in "
        "[-1, 1] and are 2 reals in [-5, 5])"
    )


def test_choices_that_begin_at_zero_fit_a_run_that_has_no_starts():
    refuse_changed_env("runs/a", kept(ACTIONS[3]), info(replace(ACTIONS[3], starts=(0,))))


def test_a_run_that_did_not_keep_it_fits_any():
    refuse_changed_env("runs/a", {}, info())


@pytest.mark.parametrize(
    "stored", [{"obs_dim": 3}, {"obs_dim": 3, "action": {}}, {"obs_dim": None, "action": 1}]
)
def test_a_damaged_record_is_named(stored):
    with pytest.raises(RunFolderError, match=r"run\.json is damaged"):
        refuse_changed_env("runs/a", stored, info())
