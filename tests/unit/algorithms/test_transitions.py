"""Transitions of rollouts: what follows each state, and returns of n steps, by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.protocols import ActionSpec, EnvInfo
from actors.replay import Gatherer, ReplayStore, Selection
from actors.rollout import Rollout
from rayagi.algorithms.transitions import TransitionAssembler, TransitionLayout, _pieces
from rayagi.envs.errors import FrameStackError

INFO = EnvInfo(
    env_id="Count", engine="", obs_dim=1, action=ActionSpec(kind="continuous", dim=1), max_episode_steps=None
)


def stacked(frames):
    return replace(INFO, obs_dim=frames, frames=frames)


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


def assembler(gamma, n, steps=4, reach=None):
    """Of rows of up to ``steps`` transitions."""
    return TransitionAssembler(TransitionLayout(INFO, steps, reach or n), gamma, n)


def columns(rows):
    """(state, later state, reward, discount) of each transition."""
    found = []
    for m, length in enumerate(rows.lengths.tolist()):
        obs, reward, discount = (rows.columns[name][m].flatten() for name in ("obs", "reward", "discount"))
        reach = len(obs) - len(reward)
        found += [
            (
                float(obs[t]),
                float(obs[t + reach]),
                pytest.approx(float(reward[t])),
                pytest.approx(float(discount[t])),
            )
            for t in range(length)
        ]
    return found


def test_a_row_ends_with_an_episode_and_has_its_final_observation():
    rows = assembler(0.5, 1).rows(rollout_of(0, [1.0, 2.0, 3.0, 4.0], terminated=[1], truncated=[2]))
    # Termination leaves nothing to bootstrap from; a time limit bootstraps from the true last state.
    assert columns(rows) == [(0, 1, 1, 0.5), (1, 102, 2, 0), (2, 103, 3, 0.5), (3, 4, 4, 0.5)]
    assert rows.lengths.tolist() == [2, 1, 1]
    assert rows.columns["obs"][0, :3].flatten().tolist() == [0, 1, 102]
    assert rows.columns["action"][0, :2].flatten().tolist() == pytest.approx([0, 0.1])


def test_a_row_of_one_transition_has_both_states():
    rows = assembler(0.5, 3, steps=1, reach=1).rows(rollout_of(0, [1.0, 2.0, 3.0, 4.0], terminated=[3]))
    assert rows.columns["obs"].squeeze(-1).tolist() == [[0, 3], [1, 104]]
    assert columns(rows) == [(0, 3, 2.75, 0.125), (1, 104, 2 + 1.5 + 1, 0)]


def test_returns_of_n_steps_continue_in_the_next_rollout():
    made = assembler(0.5, 3)
    # 1 + 2/2 + 3/4 = 2.75, then the value of state 3 by 1/8; steps 1 and 2 wait for their next rewards.
    assert columns(made.rows(rollout_of(0, [1.0, 2.0, 3.0]))) == [(0, 3, 2.75, 0.125)]
    # 2 + 3/2 + 4/4 = 4.5; 3 + 4/2 + 5/4 = 6.25; 4 + 5/2, where the episode is cut after two steps.
    rows = made.rows(rollout_of(3, [4.0, 5.0, 6.0], truncated=[1]))
    assert columns(rows) == [(1, 4, 4.5, 0.125), (2, 105, 6.25, 0.125), (3, 105, 6.5, 0.25)]
    assert rows.lengths.tolist() == [3]
    made.forget()
    assert columns(made.rows(rollout_of(9, [1.0, 1.0, 1.0]))) == [(9, 12, 1.75, 0.125)]


def test_termination_within_n_steps_ends_the_return():
    rows = assembler(0.5, 3).rows(rollout_of(0, [1.0, 2.0, 3.0, 4.0, 5.0], terminated=[1]))
    assert columns(rows) == [(0, 102, 2, 0), (1, 102, 2, 0), (2, 5, 3 + 2 + 1.25, 0.125)]


def test_a_rollout_of_fewer_than_n_steps_waits():
    made = assembler(0.5, 3)
    assert [len(made.rows(rollout_of(t, [1.0])).lengths) for t in range(4)] == [0, 0, 1, 1]


def test_returns_of_a_collector_s_rollout_end_with_it():
    rows = assembler(0.5, 3).rows(rollout_of(0, [1.0, 2.0, 3.0], remote=True))
    assert columns(rows) == [(0, 3, 2.75, 0.125), (1, 3, 3.5, 0.25), (2, 3, 3, 0.5)]


def test_longer_rollouts_than_a_row_are_cut():
    rows = assembler(0.5, 1, steps=2).rows(rollout_of(0, [1.0, 2.0, 3.0, 4.0, 5.0], truncated=[2]))
    assert rows.lengths.tolist() == [2, 1, 2]
    assert [later for _, later, *_ in columns(rows)] == [1, 2, 103, 4, 5]


def test_a_later_episode_s_termination_does_not_end_a_window_that_a_time_limit_cut():
    """Three steps from the first: its episode is cut after one, so what follows has no part in it."""
    rows = assembler(0.5, 3).rows(rollout_of(0, [1.0, 2.0, 3.0, 4.0], truncated=[0], terminated=[1]))
    assert columns(rows)[0] == (0, 101, 1, 0.5)


def test_final_observations_may_lie_in_the_rollout():
    rollout = rollout_of(0, [1.0, 2.0, 3.0, 4.0], terminated=[1], truncated=[2])
    rollout.final_obs = torch.full((4, 1, 1), -1.0)
    for t, ids, obs in rollout.finals:
        rollout.final_obs[t, ids] = obs
    rollout.finals = []
    rows = assembler(0.5, 1).rows(rollout)
    assert columns(rows) == [(0, 1, 1, 0.5), (1, 102, 2, 0), (2, 103, 3, 0.5), (3, 4, 4, 0.5)]


def random_history(seed, num_steps, num_envs, frames):
    """Observations with the one after the last step, what each step led to, rewards, and both flags; often at once.

    The first observation of an episode is a whole stack, of any frames.
    """
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randn(num_steps + 1, num_envs, frames, generator=generator)
    new = torch.randn(num_steps, num_envs, 1, generator=generator)
    terminated, truncated = torch.rand(2, num_steps, num_envs, generator=generator) < 0.2
    ended = (terminated | truncated).unsqueeze(-1)
    reached = []
    for t in range(num_steps):
        reached.append(torch.cat((obs[t, :, 1:], new[t]), -1))
        obs[t + 1] = torch.where(ended[t], obs[t + 1], reached[t])
    rewards = torch.randn(num_steps, num_envs, generator=generator)
    return obs, torch.stack(reached), rewards, terminated, truncated


def part_of(history, begin, end):
    """A rollout of the steps from ``begin`` to ``end``."""
    obs, reached, rewards, terminated, truncated = history
    rollout = Rollout.allocate(end - begin, obs.shape[1], stacked(obs.shape[2]), torch.device("cpu"))
    rollout.raw_obs.copy_(obs[begin:end])
    rollout.actions.copy_(2 * obs[begin:end, :, -1:])
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
    return *obs[t].tolist(), *reached[k].tolist(), total, discount


def gathered(layout, rows):
    """(state, later state, reward, discount, action) of each transition, through a replay, (M, 2 obs_dim + 3)."""
    store = ReplayStore.create(layout.schema, max(1, len(rows.lengths)))
    columns = {name: column.numpy() for name, column in rows.columns.items()}
    keys = store.insert(columns, rows.lengths.numpy())
    row, step = (torch.arange(layout.steps) < rows.lengths.unsqueeze(1)).numpy().nonzero()
    if not len(row):
        return torch.empty(0, 2 * layout.info.obs_dim + 3)
    ones = np.ones(len(row), np.float32)
    drawn = Selection(type(keys)(keys.indices[row], keys.generations[row]), step, ones.astype(float), ones)
    batch = layout.batch(len(row))
    values = Gatherer(store, layout.subscriptions, len(row), out=batch)(drawn).values
    store.close()
    each = (values[name].reshape(-1, 1) for name in ("reward", "discount", "action"))
    return torch.cat((*layout.observations(values), *each), 1)


@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    n=st.integers(1, 6),
    row_steps=st.integers(1, 6),
    gamma=st.sampled_from([0.5, 0.9, 1.0]),
    remote=st.booleans(),
    frames=st.integers(1, 4),
    once=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_transitions_are_those_of_the_definition_however_rollouts_and_rows_cut_the_history(
    seed, lengths, n, row_steps, gamma, remote, frames, once
):
    num_steps, num_envs = sum(lengths), 3
    history = random_history(seed, num_steps, num_envs, frames)
    once = once and row_steps > 1
    layout = TransitionLayout(stacked(frames), row_steps, n if row_steps > 1 else 1, frames if once else 1)
    made, found, begin = TransitionAssembler(layout, gamma, n), [], 0
    for length in lengths:
        rollout = part_of(history, begin, begin + length)
        rollout.log_probs = torch.zeros_like(rollout.rewards) if remote else None
        found.append(gathered(layout, made.rows(rollout)))
        begin += length
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    limits = [next(end for end in ends if end > t) if remote else num_steps for t in range(num_steps)]
    # On one trainer's own environments the last n - 1 steps still wait.
    starts = num_steps if remote else max(0, num_steps - n + 1)
    expected = torch.tensor(
        [defined(history, t, env, n, gamma, limits[t]) for t in range(starts) for env in range(num_envs)]
    ).view(-1, 2 * frames + 2)
    found, newest = torch.cat(found), frames - 1
    assert torch.equal(found[:, -1], 2 * found[:, newest])
    # States' newest frames are all different: both in their order.
    found, expected = (each[each[:, newest].argsort()] for each in (found[:, :-1], expected))
    torch.testing.assert_close(found, expected)


def stacks_of(obs, last, *, terminated=False):
    """The row of a rollout of stacks of two frames, whose last step leads to ``last`` and ends the episode."""
    info = stacked(2)
    rollout = Rollout.allocate(len(obs), 1, info, torch.device("cpu"))
    rollout.raw_obs.copy_(torch.tensor(obs).unsqueeze(1))
    for field in (rollout.last_obs, rollout.rewards, rollout.actions):
        field.zero_()
    (rollout.terminated if terminated else rollout.truncated)[-1] = True
    rollout.finals = [(len(obs) - 1, torch.tensor([0]), torch.tensor([last]))]
    rollout.log_probs = torch.zeros(len(obs), 1)
    return TransitionAssembler(TransitionLayout(info, 4, 2, 2), 0.5, 2).rows(rollout)


def test_a_row_has_each_frame_once():
    made = stacks_of([[7.0, 1.0], [1.0, 2.0], [2.0, 3.0]], [3.0, 4.0])
    assert made.columns["obs"].flatten().tolist() == [7, 1, 2, 3, 4, 0, 0]
    assert made.columns["later"][0, :3].tolist() == [2, 2, 1]


def test_frames_that_are_not_continued_are_refused_but_behind_a_termination():
    """A simulation's error terminates with the observation before it, whose value counts for nothing."""
    obs = [[7.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    made = stacks_of(obs, obs[-1], terminated=True)
    assert made.columns["obs"].flatten()[:4].tolist() == [7, 1, 2, 3]
    assert made.columns["discount"][0, :3].tolist() == [0.25, 0, 0]
    for wrong in ((obs, obs[-1]), ([obs[0], [5.0, 2.0], obs[2]], [3.0, 4.0])):
        with pytest.raises(
            FrameStackError, match="Count: an observation does not continue the stack of 2 frames"
        ):
            stacks_of(*wrong)


@given(
    cut=st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=1, max_size=12),
    steps=st.integers(1, 5),
)
@settings(deadline=None)
def test_rows_are_as_long_as_they_can_be(cut, steps):
    firsts, lengths = _pieces(torch.tensor(cut), steps)
    expected = []
    for env in range(2):
        first, length = 0, 0
        for t, each in enumerate(cut):
            length += 1
            if each[env] or length == steps or t == len(cut) - 1:
                expected.append((2 * first + env, length))
                first, length = t + 1, 0
    assert list(zip(firsts.tolist(), lengths.tolist(), strict=True)) == sorted(expected)
