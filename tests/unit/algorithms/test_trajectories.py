"""Rollouts as experience: what a collector wrote is what a learner reads, ends of episodes included."""

from __future__ import annotations

import pytest
import torch

from actors.protocols import ActionSpec, EnvInfo
from collectives.experience.batcher import Batcher
from collectives.experience.dispenser import Dispenser
from rayagi.algorithms.trajectories import FINALS, channel_plan, finals_of, rollout_of, rollout_over
from rayagi.config.learning import LearningSpec

STEPS, ENVS, OBS = 5, 3, 4
CONTINUOUS = ActionSpec(kind="continuous", dim=2, low=(-1.0,) * 2, high=(1.0,) * 2)
DISCRETE = ActionSpec(kind="discrete", dim=1, num_choices=6)


@pytest.mark.parametrize("action", [CONTINUOUS, DISCRETE], ids=["continuous", "discrete"])
@pytest.mark.parametrize("ended", [[(1, [0, 2]), (4, [1])], []], ids=["with ends", "without ends"])
@pytest.mark.parametrize("state_dim", [0, 6])
def test_a_rollout_arrives_as_it_was_written(action, ended, state_dim):
    info = EnvInfo(env_id="e", engine="fake", obs_dim=OBS, action=action, max_episode_steps=9)
    plan = channel_plan(info, LearningSpec(rollout_length=STEPS, sequence_length=1), state_dim)
    assert plan.ragged == {FINALS}
    dispenser = Dispenser(plan, rows=ENVS, producer=0, slots=2, ragged_rows=ENVS * STEPS)
    batcher = Batcher(plan, rows=ENVS)
    dispenser.attach(0, batcher.endpoints)
    generator = torch.Generator().manual_seed(1)
    written = rollout_over(dispenser.open(1.0), obs=torch.empty(0), outputs=torch.empty(0))
    shapes = {
        "raw_obs": (STEPS, ENVS, OBS),
        "actions": (STEPS, ENVS) if action is DISCRETE else (STEPS, ENVS, 2),
        "log_probs": (STEPS, ENVS),
        "rewards": (STEPS, ENVS),
        "terminated": (STEPS, ENVS),
        "truncated": (STEPS, ENVS),
        "running_returns": (STEPS, ENVS),
        "last_obs": (ENVS, OBS),
        **({"states": (STEPS, ENVS, state_dim)} if state_dim else {}),
    }
    expected = {}
    for name, shape in shapes.items():
        field = getattr(written, name)
        assert tuple(field.shape) == shape
        value = torch.randint(-3, 3, shape, generator=generator)
        expected[name] = value.bool() if field.dtype == torch.bool else value.to(field.dtype)
        field.copy_(expected[name])
    for step, ids in ended:
        written.finals.append((step, torch.tensor(ids), torch.full((len(ids), OBS), float(step))))
    dispenser.send(3, finals_of(written))
    with batcher.next(5.0) as experience:
        assert experience.versions.tolist() == [3] * ENVS
        found = rollout_of(experience.tensors, experience.ragged)
        for name, value in expected.items():
            torch.testing.assert_close(getattr(found, name), value, rtol=0, atol=0)
        assert (found.num_steps, found.num_envs) == (STEPS, ENVS)
        assert torch.equal(found.obs, expected["raw_obs"])  # what the networks saw stays behind
        ends = [(step, ids.tolist(), obs.mean().item()) for step, ids, obs in found.finals]
        del found
    assert ends == [(step, ids, float(step)) for step, ids in ended]
    dispenser.close(timeout_s=0.0)
    batcher.close()
