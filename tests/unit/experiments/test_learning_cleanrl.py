"""CleanRL's loop of PPO, that is what rayagi is compared with."""

import numpy as np
import torch

from experiments.learning import cleanrl
from rayagi.algorithms.returns import gae


def loop_with(monkeypatch, steps: int) -> cleanrl.Ppo:
    monkeypatch.setattr(cleanrl, "STEPS", steps)
    torch.manual_seed(0)
    return cleanrl.Ppo("InvertedPendulum-v5")


def test_its_advantages_are_those_of_the_paper_where_every_end_is_a_termination(monkeypatch):
    loop = loop_with(monkeypatch, 12)
    loop.rewards.uniform_(-1, 1)
    loop.values.uniform_(-1, 1)
    loop.ended[[0, 5]] = 1.0  # of the observation before the step: the fifth step ended an episode
    last = torch.zeros(4)
    found = loop.advantages(last, ended=True)
    done = torch.zeros(12, 1, dtype=torch.bool)
    done[[4, 11]] = True
    expected, _ = gae(
        rewards=loop.rewards[:, None],
        values=loop.values[:, None],
        next_values=torch.cat([loop.values[1:], torch.zeros(1)])[:, None],
        terminated=done,
        done=done,
        gamma=0.99,
        gae_lambda=0.95,
    )
    torch.testing.assert_close(found, expected[:, 0])


def test_an_update_follows_the_clipped_gradient_and_the_step_size_falls_to_zero(monkeypatch):
    monkeypatch.setattr(cleanrl, "MINIBATCHES", 4)
    loop = loop_with(monkeypatch, 64)
    obs, ended = torch.as_tensor(loop.env.reset(seed=0)[0], dtype=torch.float32), True
    for t in range(64):
        obs, ended = loop.step(t, obs, ended)
    advantages = torch.where(loop.actions[:, 0] > 0, 1.0, -1.0)  # more of what is positive
    before = loop.act(np.zeros((1, 4)))[0, 0]
    loop.update(advantages, steps=0)
    assert loop.act(np.zeros((1, 4)))[0, 0] > before
    held = [each.clone() for each in loop.parameters]
    loop.update(advantages, steps=cleanrl.TOTAL)
    assert all(torch.equal(*each) for each in zip(held, loop.parameters, strict=True))
