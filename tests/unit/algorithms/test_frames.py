"""Observations that stack frames: a replay has each frame once, and what is learned is the same."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import (
    FrameStackObservation,
    TimeLimit,
    TransformAction,
    TransformObservation,
    TransformReward,
)

from rayagi.algorithms.dqn import DQNSpec
from rayagi.algorithms.offline_data import RecordedTransitions
from rayagi.algorithms.transitions import TransitionLayout
from rayagi.coordinator.memory_need import replay_bytes
from rayagi.envs import env_info, make_env_factory
from rayagi.envs.errors import FrameStackError
from rayagi.envs.gymnasium_adapter import _frames
from tests.unit.algorithms.test_byte_images import DQN, assert_same, model_of
from tests.unit.algorithms.test_collector_learner import after, run_gmis
from tests.unit.algorithms.test_program import build

STACKED = "tests.fakes.echo:Stacked-v0"
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def factory(**kwargs):
    return make_env_factory(STACKED, kwargs={"kind": "gray", **kwargs})


def info(**kwargs):
    return env_info(STACKED, kwargs={"kind": "gray", **kwargs})


@pytest.mark.parametrize("prioritized", [False, True], ids=["uniform", "prioritized"])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("template", ["dp_only", "decoupled"])
def test_what_is_learned_is_the_same(prioritized, n_step, template):
    learning = replace(DQN.learning, rollout_length=6, prioritized=prioritized, n_step=n_step)
    spec = replace(DQN, gmi=replace(DQN.gmi, template=template), learning=learning)
    found = []
    for hidden in (False, True):
        make_env = factory(hidden=hidden)
        if template == "decoupled":
            found.append(run_gmis(spec, 1, 1, after(9), make_env=make_env)[-1][1])
        else:
            program = build(spec, make_env=make_env)
            assert program.learner.layout.frames == (1 if hidden else 4)
            found.append(after(9)(program)[1])
    assert_same(*map(model_of, found))


def test_a_transition_takes_little_more_than_a_frame():
    own, hidden = info(), info(hidden=True)
    assert (own.frames, hidden.frames, own.obs_bytes) == (4, 1, 4 * 36 * 36)
    learning = DQNSpec(rollout_length=16, n_step=5, prioritized=True)
    frame, rest = 36 * 36, 2 * 4 + 8
    # 16 transitions and the 5 observations behind them are 21 frames, and 3 before the newest of the first.
    schema = TransitionLayout.of(own, learning).schema
    assert 24 * frame + 16 * (rest + 4) <= schema.row_bytes < 24 * frame + 16 * (rest + 4) + 16
    one = replace(learning, capacity=16)
    assert replay_bytes(one, own, None) == 24 * frame + 16 * (rest + 4) + 64
    assert replay_bytes(one, hidden, None) == 21 * 4 * frame + 16 * rest + 64
    # Returns over a whole rollout: rows of one transition, with both observations.
    assert TransitionLayout.of(own, replace(learning, n_step=16)) == TransitionLayout(own, 1, 1)


def test_a_dataset_may_have_left_frames_out(tmp_path):
    own = info()
    steps = {"action": torch.tensor([0, 3]), "reward": torch.ones(2), "terminated": torch.tensor([0, 1])}
    path = tmp_path / "d.pt"
    torch.save({**steps, "obs": torch.stack([torch.full((own.obs_dim,), v) for v in (1.0, 9.0)])}, path)
    program = build(DQN, make_env=factory())
    learner = type(program.learner)(
        policy=program.learner.policy, spec=DQN.learning, communicator=program.learner.communicator, num_envs=4,
        first_env_index=0, total_envs=4, seed=0, total_env_steps=None, recorded=RecordedTransitions(str(path), own),
    )  # fmt: skip
    assert (learner.layout.frames, program.learner.layout.frames) == (1, 4)
    learner._insert_recorded(learner._recorded)
    assert len(learner.replay) == 1
    assert learner._held() == 2


class Boxes(gymnasium.Env):
    """Shows its step in one array, which it changes."""

    observation_space, action_space = spaces.Box(0.0, 99.0, (2,), np.float32), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self._shown = np.zeros(2, np.float32)
        return self._shown, {}

    def step(self, action):
        self._shown += 1
        return self._shown, 0.0, False, False, {}


class Repeat(gymnasium.ActionWrapper):
    """Makes each action twice, so that a stack goes on by two frames."""

    def action(self, action):
        return action

    def step(self, action):
        self.env.step(action)
        return self.env.step(action)


class Mine(TimeLimit):
    pass


class Pairs(Boxes):
    observation_space = spaces.Dict({"a": Boxes.observation_space})


def test_stacks_are_known_where_nothing_changes_them():
    stack = FrameStackObservation(Boxes(), 3)
    assert _frames(stack) == 3
    assert _frames(TransformReward(TimeLimit(stack, 9), abs)) == 3
    assert _frames(FrameStackObservation(stack, 2)) == 2
    assert _frames(TransformObservation(stack, abs, None)) == 1
    assert _frames(TransformAction(stack, abs, None)) == 3
    assert _frames(TimeLimit(Repeat(stack), 9)) == 1
    assert _frames(Mine(stack, 9)) == 1
    assert _frames(TimeLimit(Boxes(), 9)) == 1
    assert _frames(FrameStackObservation(Pairs(), 3)) == 1  # flat, the frames of its members alternate
    assert env_info("tests.fakes.echo:Echo-v0").frames == 1


def test_an_environment_that_changes_what_it_has_returned_is_named():
    gymnasium.register("Changing-v0", lambda: FrameStackObservation(TimeLimit(Boxes(), 40), 2))
    spec = replace(DQN, learning=replace(DQN.learning, learning_starts=64))
    with pytest.raises(
        FrameStackError, match=r"Changing-v0: an observation does not continue the stack of 2 .*copies"
    ):
        after(8)(build(spec, make_env=make_env_factory("Changing-v0")))
