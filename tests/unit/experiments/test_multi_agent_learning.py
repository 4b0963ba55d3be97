"""A team that learns on line through replay shards: what is stored, advantages, and layouts that learn alike."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.errors import NonFiniteError
from actors.protocols import StepResult
from actors.roles import evaluate
from collectives.solo import SoloCommunicator
from experiments.replay.multi_agent_learning import HALF_CHEETAH, Team, TeamSettings, TeamTrainer, cut
from tests.fakes.point import make_point, make_poisoned_point
from tests.unit.algorithms.test_program import run_members

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TEAM = Team(obs=((0, 2), (1, 2)), actions=((0,), (1,)))
"""One agent pushes the point along x, the other along y; both see the time."""
SETTINGS = TeamSettings(
    num_envs=6, rollout_length=10, num_epochs=2, num_minibatches=3, units=16, max_grad_norm=0.0, seed=3
)


def test_half_cheetahs_legs_have_every_joint_once():
    obs, actions = torch.arange(17.0), torch.arange(6.0)
    back, front = HALF_CHEETAH.observe(obs).int().tolist()
    # Gymnasium's columns: z, angle, three joints of each leg; then the velocities of x, z, angle and the joints.
    assert sorted({*back} & {*front}) == [0, 1, 8, 9, 10]
    assert sorted({*back} | {*front}) == list(range(17))
    assert [column - 3 for column in front[5:]] == back[5:]
    assert torch.equal(HALF_CHEETAH.join(HALF_CHEETAH.split(actions)), actions)


def test_joined_actions_are_in_the_environments_order():
    team = Team(obs=((0,), (1,)), actions=((2, 0), (1, 3)))
    given = torch.randn((5, 4), generator=torch.Generator().manual_seed(0))
    assert team.split(given[0]).tolist() == given[0, torch.tensor([[2, 0], [1, 3]])].tolist()
    assert torch.equal(team.join(team.split(given)), given)


def test_rollouts_are_cut_where_episodes_end():
    """Two environments, three steps; the second one's episode ends with its second step, in the observation 99."""
    steps = []
    for t in range(3):
        ended = [1] if t == 1 else []
        result = StepResult(
            obs=torch.tensor([[t + 1.0], [t + 11.0]]), rewards=torch.tensor([t + 0.1, t + 0.2]),
            terminated=torch.tensor([False, t == 1]), truncated=torch.zeros(2, dtype=torch.bool),
            final_ids=torch.tensor(ended, dtype=torch.int64), final_obs=torch.full((len(ended), 1), 99.0),
        )  # fmt: skip
        obs = torch.tensor([[t + 0.0], [t + 10.0]])
        steps.append((obs, torch.full((2, 1), float(t)), torch.zeros((2, 1)), result))
    rows, lengths, places = cut(steps, torch.tensor([[3.0], [13.0]]))
    assert lengths == [3, 2, 1]
    assert places == [(0, 0), (1, 0), (1, 2)]
    assert rows["obs"][..., 0].tolist() == [[0, 1, 2, 3], [10, 11, 99, 0], [12, 13, 0, 0]]
    assert rows["action"][..., 0].tolist() == [[0, 1, 2], [0, 1, 0], [2, 0, 0]]
    np.testing.assert_allclose(rows["reward"], [[0.1, 1.1, 2.1], [0.2, 1.2, 0], [2.2, 0, 0]], rtol=1e-6)
    assert rows["terminated"].tolist() == [[False] * 3, [False, True, False], [False] * 3]


def test_every_trajectory_is_sampled_once_and_then_removed():
    trainer = TeamTrainer(make_point, TEAM, SETTINGS, SoloCommunicator(), local_shards=2)
    for _ in range(3):
        trainer.update()
    for store in trainer.stores:
        counters = store.counters()
        assert counters["count"] == counters["evicted"] == 0
        # 30 steps of each of three environments, whose episodes have at most 7
        assert counters["inserted"] == counters["selected"] >= 3 * 3 * 2
    trainer.close()


def test_advantages_are_those_of_the_sum_of_discounted_errors():
    settings = replace(SETTINGS, gamma=0.9, gae_lambda=0.8)
    trainer = TeamTrainer(make_point, TEAM, settings, SoloCommunicator())
    rows, lengths, timestamps = trainer.collect()
    for row in range(0, len(lengths), 2):  # the point seldom ends its task by itself
        rows["terminated"][row, lengths[row] - 1] = True
    trainer._insert(rows, lengths, timestamps)
    chosen = trainer._select()
    batch = trainer._prepare(trainer._own_rows(chosen), chosen)
    advantages, targets = [], []
    for row, length in enumerate(lengths):
        obs = torch.from_numpy(rows["obs"][row, : length + 1])
        with torch.no_grad():
            values = trainer.network.encode(TEAM.observe(obs))[1].mean(1).tolist()
        reward = trainer._scaler(torch.from_numpy(rows["reward"][row])).tolist()
        # delta_t = r_t + gamma V_t+1 - V_t, without the bootstrap where the task ended; A_t = sum (gamma lambda)^k delta_t+k
        deltas = [
            reward[t] + 0.9 * values[t + 1] * (not rows["terminated"][row, t]) - values[t]
            for t in range(length)
        ]
        for t in range(length):
            advantages.append(sum(0.72 ** (k - t) * deltas[k] for k in range(t, length)))
            targets.append(advantages[-1] + values[t])
    advantages = (np.array(advantages) - np.mean(advantages)) / np.std(advantages)
    assert batch.number.tolist() == list(range(60))
    np.testing.assert_allclose(batch.targets, targets, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch.advantages, advantages, rtol=1e-3, atol=1e-4)
    # What was stored when acting is what the network says now.
    means, _ = trainer.network(batch.obs, batch.actions)
    now = trainer.network.head.log_prob(means, batch.actions)
    torch.testing.assert_close(now, batch.log_probs, rtol=1e-4, atol=1e-4)
    trainer.close()


LAYOUTS = ["two shards of one trainer", "two trainers", "three trainers"]


def on_layout(layout, work):
    """Results of ``work(communicator, local_shards)``, of every trainer."""
    if layout == "two shards of one trainer":
        return [work(SoloCommunicator(), 2)]
    return run_members(2 if layout == "two trainers" else 3, lambda communicator: work(communicator, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_and_trainers_have_the_gradient_of_one(layout):
    """Of the whole rollout in one step, before any rounding is amplified by training."""
    settings = replace(SETTINGS, num_epochs=1, num_minibatches=1)

    def gradient(communicator, local_shards):
        trainer = TeamTrainer(make_point, TEAM, settings, communicator, local_shards=local_shards)
        losses = trainer.update()
        trainer.close()
        return losses, trainer.optimiser.flat.gradients.clone()

    losses, expected = gradient(SoloCommunicator(), 1)
    assert float(expected.norm()) > 0.01
    for own_losses, own in on_layout(layout, gradient):
        np.testing.assert_allclose(own_losses, losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_and_trainers_learn_as_one(layout):
    def learned(communicator, local_shards):
        trainer = TeamTrainer(make_point, TEAM, SETTINGS, communicator, local_shards=local_shards)
        losses = [step for _ in range(3) for step in trainer.update()]
        trainer.close()
        return losses, trainer.optimiser.flat.parameters.detach().clone()

    losses, weights = learned(SoloCommunicator(), 1)
    assert np.shape(losses) == (3 * 2 * 3, 4)
    for own_losses, own_weights in on_layout(layout, learned):
        np.testing.assert_allclose(own_losses, losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own_weights, weights, rtol=1e-3, atol=1e-5)


def test_a_team_learns_to_push_the_point_inwards():
    settings = TeamSettings(
        num_envs=16, rollout_length=14, num_epochs=6, num_minibatches=2, units=16, learning_rate=3e-3
    )
    trainer = TeamTrainer(make_point, TEAM, settings, SoloCommunicator())

    def mean_return():
        env = make_point(num_envs=16, first_env_index=100, seed=1, num_threads=1)
        return evaluate(env, trainer, 16).mean_return()

    before = mean_return()
    for _ in range(15):
        trainer.update()
    assert mean_return() > before + 0.3
    trainer.close()


def test_a_reward_that_is_not_a_number_is_reported():
    trainer = TeamTrainer(make_poisoned_point, TEAM, SETTINGS, SoloCommunicator())
    trainer.update()
    with pytest.raises(NonFiniteError, match="2"):
        trainer.update()
    trainer.close()


@pytest.mark.parametrize(
    ("settings", "shards", "said"),
    [
        (SETTINGS, 4, "must divide environments"),
        (replace(SETTINGS, num_minibatches=61), 1, "at least one timestep"),
    ],
)
def test_what_cannot_be_divided_is_refused(settings, shards, said):
    with pytest.raises(ValueError, match=said):
        TeamTrainer(make_point, TEAM, settings, SoloCommunicator(), local_shards=shards)
