"""Rollout.finals: final observations of the episodes that ended in a rollout."""

import torch

from actors.protocols import ActionSpec, EnvInfo
from actors.rollout import Rollout

INFO = EnvInfo(
    env_id="Any-v0",
    engine="any",
    obs_dim=2,
    action=ActionSpec(kind="continuous", dim=1, low=(-1.0,), high=(1.0,)),
    max_episode_steps=9,
)


def rollout():
    return Rollout.allocate(3, 4, INFO, torch.device("cpu"))


def test_finals_are_ordered_by_step_then_environment():
    ended, final_obs = rollout(), torch.arange(24.0).view(3, 4, 2)
    ended.terminated[2, 3] = ended.truncated[2, 0] = ended.terminated[0, 1] = True
    steps, ids = ended.gather_finals(final_obs)
    assert steps.tolist() == [0, 2, 2]
    assert ids.tolist() == [1, 0, 3]
    ended_at = [(step, envs.tolist(), obs.tolist()) for step, envs, obs in ended.finals]
    assert ended_at == [(0, [1], [[2.0, 3.0]]), (2, [0, 3], [[16.0, 17.0], [22.0, 23.0]])]


def test_without_episode_ends_finals_are_cleared():
    ended = rollout()
    ended.finals.append((0, torch.tensor([1]), torch.zeros(1, 2)))
    steps, ids = ended.gather_finals(torch.zeros(3, 4, 2))
    assert len(steps) == len(ids) == len(ended.finals) == 0
