"""Transitions of rollouts: what follows each state, and returns of n steps, by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.protocols import ActionSpec, EnvInfo
from actors.replay import ReplayStore
from actors.rollout import Rollout
from rayagi.algorithms.transitions import TransitionAssembler, transition_schema

INFO = EnvInfo(
    env_id="Count", engine="", obs_dim=1, action=ActionSpec(kind="continuous", dim=1), max_episode_steps=None
)


def rollout_of(first, rewards, *, terminated=(), truncated=(), remote=False):
    """One environment that counts its steps from ``first``; rewards (T,). An episode that ends shows 100 + its last count.

    The next episode goes on counting, so that a reset is recognised by the missing 100.
    """
    steps = len(rewards)
    rollout = Rollout.allocate(steps, 1, INFO, torch.device("cpu"))
    counts = torch.arange(first, first + steps + 1, dtype=torch.float32)
    rollout.raw_obs.copy_(counts[:-1].view(-1, 1, 1))
    rollout.last_obs.copy_(counts[-1:].view(1, 1))
    rollout.rewards.copy_(torch.tensor(rewards).view(-1, 1))
    rollout.actions.copy_(rollout.raw_obs / 10)
    for flags, at in ((rollout.terminated, terminated), (rollout.truncated, truncated)):
        flags[list(at)] = True
    rollout.finals = [
        (t, torch.tensor([0]), torch.tensor([[100.0 + first + t + 1]]))
        for t in sorted({*terminated, *truncated})
    ]
    if remote:
        rollout.log_probs = torch.zeros(steps, 1)
    return rollout


def columns(rows):
    """(state, later state, reward, discount) of each row."""
    return [
        (*obs.flatten().tolist(), pytest.approx(reward), pytest.approx(discount))
        for obs, reward, discount in zip(
            rows["obs"], rows["reward"].tolist(), rows["discount"].tolist(), strict=True
        )
    ]


def test_the_state_after_an_episode_s_end_is_its_final_one():
    rows = TransitionAssembler(0.5, 1).rows(
        rollout_of(0, [1.0, 2.0, 3.0, 4.0], terminated=[1], truncated=[2])
    )
    # Termination leaves nothing to bootstrap from; a time limit bootstraps from the true last state.
    assert columns(rows) == [(0, 1, 1, 0.5), (1, 102, 2, 0), (2, 103, 3, 0.5), (3, 4, 4, 0.5)]
    assert rows["action"].flatten().tolist() == pytest.approx([0, 0.1, 0.2, 0.3])


def test_returns_of_n_steps_continue_in_the_next_rollout():
    assembler = TransitionAssembler(0.5, 3)
    # 1 + 2/2 + 3/4 = 2.75, then the value of state 3 by 1/8; steps 1 and 2 wait for their next rewards.
    assert columns(assembler.rows(rollout_of(0, [1.0, 2.0, 3.0]))) == [(0, 3, 2.75, 0.125)]
    # 2 + 3/2 + 4/4 = 4.5; 3 + 4/2 + 5/4 = 6.25; 4 + 5/2, where the episode is cut after two steps.
    assert columns(assembler.rows(rollout_of(3, [4.0, 5.0, 6.0], truncated=[1]))) == [
        (1, 4, 4.5, 0.125),
        (2, 105, 6.25, 0.125),
        (3, 105, 6.5, 0.25),
    ]
    assembler.forget()
    assert columns(assembler.rows(rollout_of(9, [1.0, 1.0, 1.0]))) == [(9, 12, 1.75, 0.125)]


def test_termination_within_n_steps_ends_the_return():
    rows = TransitionAssembler(0.5, 3).rows(rollout_of(0, [1.0, 2.0, 3.0, 4.0, 5.0], terminated=[1]))
    assert columns(rows) == [(0, 102, 2, 0), (1, 102, 2, 0), (2, 5, 3 + 2 + 1.25, 0.125)]


def test_a_rollout_of_fewer_than_n_steps_waits():
    assembler = TransitionAssembler(0.5, 3)
    assert [len(assembler.rows(rollout_of(t, [1.0]))["reward"]) for t in range(4)] == [0, 0, 1, 1]


def test_returns_of_a_collector_s_rollout_end_with_it():
    rows = TransitionAssembler(0.5, 3).rows(rollout_of(0, [1.0, 2.0, 3.0], remote=True))
    assert columns(rows) == [(0, 3, 2.75, 0.125), (1, 3, 3.5, 0.25), (2, 3, 3, 0.5)]


@pytest.mark.parametrize("capacity", [1, 3, 100])
def test_rows_fit_the_replay(capacity):
    rows = TransitionAssembler(0.5, 1).rows(rollout_of(0, [1.0, 2.0, 3.0]))
    store = ReplayStore.create(transition_schema(INFO), capacity)
    store.insert({name: column[-capacity:].numpy() for name, column in rows.items()})
    assert len(store) == min(3, capacity)


def test_a_later_episode_s_termination_does_not_end_a_window_that_a_time_limit_cut():
    """Three steps from the first: its episode is cut after one, so what follows has no part in it."""
    rows = TransitionAssembler(0.5, 3).rows(
        rollout_of(0, [1.0, 2.0, 3.0, 4.0], truncated=[0], terminated=[1])
    )
    assert columns(rows)[0] == (0, 101, 1, 0.5)


def test_final_observations_may_lie_in_the_rollout():
    rollout = rollout_of(0, [1.0, 2.0, 3.0, 4.0], terminated=[1], truncated=[2])
    rollout.final_obs = torch.full((4, 1, 1), -1.0)
    for t, ids, obs in rollout.finals:
        rollout.final_obs[t, ids] = obs
    rollout.finals = []
    rows = TransitionAssembler(0.5, 1).rows(rollout)
    assert columns(rows) == [(0, 1, 1, 0.5), (1, 102, 2, 0), (2, 103, 3, 0.5), (3, 4, 4, 0.5)]


def random_history(seed, num_steps, num_envs):
    """Observations with the one after the last step, what each step led to, rewards, and both flags; often at once."""
    generator = torch.Generator().manual_seed(seed)
    obs, reached = torch.randn(2, num_steps + 1, num_envs, 1, generator=generator)
    terminated, truncated = torch.rand(2, num_steps, num_envs, generator=generator) < 0.2
    ended = (terminated | truncated).unsqueeze(-1)
    reached = torch.where(ended, reached[:-1], obs[1:])
    return obs, reached, torch.randn(num_steps, num_envs, generator=generator), terminated, truncated


def part_of(history, begin, end):
    """A rollout of the steps from ``begin`` to ``end``."""
    obs, reached, rewards, terminated, truncated = history
    rollout = Rollout.allocate(end - begin, obs.shape[1], INFO, torch.device("cpu"))
    rollout.raw_obs.copy_(obs[begin:end])
    rollout.actions.copy_(2 * obs[begin:end])
    rollout.last_obs.copy_(obs[end])
    rollout.rewards.copy_(rewards[begin:end])
    rollout.terminated.copy_(terminated[begin:end])
    rollout.truncated.copy_(truncated[begin:end])
    rollout.gather_finals(reached[begin:end])
    return rollout


def defined(history, t, env, n, gamma, limit):
    """The transition of step t, step by step in plain numbers; nothing is known from step ``limit`` on."""
    obs, reached, rewards, terminated, truncated = (each[:, env] for each in history)
    total, k = 0.0, t
    while True:
        total += gamma ** (k - t) * float(rewards[k])
        if terminated[k] or truncated[k] or k == t + n - 1 or k == limit - 1:
            break
        k += 1
    discount = 0.0 if terminated[k] else gamma ** (k + 1 - t)
    return float(obs[t]), float(reached[k]), total, discount


@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    n=st.integers(1, 6),
    gamma=st.sampled_from([0.5, 0.9, 1.0]),
    remote=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_rows_are_those_of_the_definition_however_rollouts_cut_the_history(seed, lengths, n, gamma, remote):
    num_steps, num_envs = sum(lengths), 3
    history, assembler = random_history(seed, num_steps, num_envs), TransitionAssembler(gamma, n)
    found, begin = [], 0
    for length in lengths:
        rollout = part_of(history, begin, begin + length)
        rollout.log_probs = torch.zeros_like(rollout.rewards) if remote else None
        rows = assembler.rows(rollout)
        found.append(
            torch.cat((rows["obs"].squeeze(-1), rows["reward"][:, None], rows["discount"][:, None]), 1)
        )
        assert torch.equal(rows["action"], 2 * rows["obs"][:, 0])
        begin += length
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    limits = [next(end for end in ends if end > t) if remote else num_steps for t in range(num_steps)]
    # On one trainer's own environments the last n - 1 steps still wait.
    starts = num_steps if remote else max(0, num_steps - n + 1)
    expected = [
        defined(history, t, env, n, gamma, limits[t]) for t in range(starts) for env in range(num_envs)
    ]
    torch.testing.assert_close(torch.cat(found), torch.tensor(expected).view(-1, 4))
