import math
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from actors.protocols import ActionSpec, EnvInfo
from rayagi.cli import main
from rayagi.config.action_range import warn_of_action_range
from rayagi.config.presets import PRESETS, preset
from rayagi.envs import env_info, list_envs


def warnings(low, high, algorithm="ppo", **network):
    """What is logged of a box."""
    action = ActionSpec(kind="continuous", dim=len(low), low=low, high=high)
    info = EnvInfo(env_id="A", engine="gymnasium", obs_dim=1, action=action, max_episode_steps=None)
    spec = preset("SomethingElse-v0", algorithm)
    found = []
    warn_of_action_range(replace(spec, network=replace(spec.network, **network)), info, found.append)
    return found


def test_a_box_away_from_the_first_actions_is_named_with_remedies():
    (found,) = warnings((-1.0, 10.0), (1.0, 12.0))
    assert found.startswith(
        "A: action 1 is between 10 and 12, and the first actions are N(0, 1^2), clipped to it"
    )
    assert "network.head=squashed_gaussian" in found
    assert "gymnasium.wrappers.RescaleAction" in found


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ((10.0,), (12.0,)),
        ((-1e6,), (-5.0,)),
        (
            (0.0,),
            (1000.0,),
        ),  # half of the first actions are inside, and nearly all of the box is out of reach
        ((-0.01,), (0.01,)),
    ],
)
def test_boxes_that_the_first_actions_hardly_meet(low, high):
    assert len(warnings(low, high)) == 1
    for algorithm in ("trpo", "appo", "impala", "a3c"):
        assert len(warnings(low, high, algorithm)) == 1
    for algorithm in ("sac", "td3", "bc"):  # scaled to the box, or not explored
        assert warnings(low, high, algorithm) == []
    assert warnings(low, high, head="squashed_gaussian") == []


def test_a_half_bounded_box_cannot_be_squashed():
    (found,) = warnings((5.0,), (math.inf,))
    assert "squashed_gaussian" not in found
    assert "TransformAction" in found


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ((-1.0,), (1.0,)),
        ((0.0,), (1.0,)),
        ((-math.inf,), (math.inf,)),
        ((0.0, -1.0), (0.0, 1.0)),
        ((-10.0,), (10.0,)),
    ],
)
def test_usual_boxes_are_not_named(low, high):
    assert warnings(low, high) == []
    assert warnings(low, high, initial_log_std=-1.6) == []


def test_no_task_that_is_listed_or_has_a_preset_is_named():
    found = []
    own = {*PRESETS, *(each.env_id for each in list_envs())} - {"LunarLander-v3"}  # choices, and needs Box2D
    for env_id in own:
        warn_of_action_range(preset(env_id), env_info(env_id), found.append)
    assert found == []


class Far(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Box(10, 12, (1,), np.float32)


gymnasium.register("FarBox-v0", entry_point=Far)


def test_plan_says_it_once(capsys):
    assert main(["plan", "FarBox-v0", "--gmis", "1"]) == 0
    assert capsys.readouterr().err.count("is between 10 and 12") == 1
    assert main(["plan", "FarBox-v0", "--gmis", "1", "--set", "network.head=squashed_gaussian"]) == 0
    assert capsys.readouterr().err == ""
