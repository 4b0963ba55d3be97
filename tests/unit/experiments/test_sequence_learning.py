"""One transformer on several tasks' datasets: the sequences that it gets, and layouts that learn alike."""

import numpy as np
import pytest
import torch

from collectives.solo import SoloCommunicator
from experiments.replay.decision_transformer import TransformerSizes
from experiments.replay.sequence_learning import LearningSettings, SequenceTrainer
from rayagi.serving.dataset import open_dataset
from tests.fakes.point import make_point
from tests.unit.algorithms.point_dataset import record_point, teacher
from tests.unit.algorithms.test_program import run_members

pytestmark = pytest.mark.usefixtures("one_torch_thread")

INFO = make_point(num_envs=1, first_env_index=0, seed=0, num_threads=1).info
SETTINGS = LearningSettings(
    sizes=TransformerSizes(units=16, layers=1, heads=2, context=4, longest_episode=20),
    batch_size=24, learning_rate=3e-3, warmup=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Two tasks: the point, with a teacher, and with one that pushes outwards."""
    folder = tmp_path_factory.mktemp("data")
    inwards = record_point(folder / "inwards", num_envs=6, num_steps=30)
    outwards = record_point(
        folder / "outwards", num_envs=5, num_steps=20, policy=lambda obs: obs[:, :2].sign()
    )
    return [(str(inwards), INFO), (str(outwards), INFO)]


def test_sequences_are_windows_of_episodes_with_their_returns_to_go(datasets):
    trainer = SequenceTrainer(datasets[1:], SETTINGS, SoloCommunicator())
    episodes = list(open_dataset(datasets[1][0]).episodes())
    found = trainer._context(0)
    scale = max(abs(float(each.rewards.sum())) for each in episodes)
    seen_padding = False
    for i in range(24):
        real, steps = found.mask[i], found.steps[i]
        # What exists is at the end, and the first timestep is 0 where something is missing.
        count = int(real.sum())
        assert real.tolist() == [False] * (4 - count) + [True] * count
        assert count == 4 or steps[4 - count] == 0
        seen_padding |= count < 4
        first, last = int(steps[4 - count]), int(steps[-1])
        matching = [
            each
            for each in episodes
            if len(each.rewards) > last
            and np.allclose(each.actions[first : last + 1], found.actions[i, 4 - count :], atol=1e-6)
            and np.allclose(
                [each.rewards[t:].sum() / scale for t in range(first, last + 1)],
                found.returns[i, 4 - count :],
                atol=1e-5,
            )
        ]
        assert matching
        assert not found.obs[i, : 4 - count].any()
    assert seen_padding


@pytest.mark.parametrize("layout", ["two shards of one trainer", "two trainers", "three trainers"])
def test_shards_and_trainers_learn_as_one(datasets, layout):
    def curve(communicator, local_shards=1):
        trainer = SequenceTrainer(datasets, SETTINGS, communicator, local_shards=local_shards)
        return [trainer.step() for _ in range(6)], trainer.optimiser.flat.parameters.detach().clone()

    losses, weights = curve(SoloCommunicator())
    if layout == "two shards of one trainer":
        found = [curve(SoloCommunicator(), 2)]
    else:
        found = run_members(2 if layout == "two trainers" else 3, curve)
    for own_losses, own_weights in found:
        np.testing.assert_allclose(own_losses, losses, rtol=1e-4)
        torch.testing.assert_close(own_weights, weights, rtol=1e-2, atol=1e-4)


def test_one_network_learns_both_tasks(datasets):
    trainer = SequenceTrainer(datasets, SETTINGS, SoloCommunicator())
    first = trainer.step()
    for _ in range(200):
        last = trainer.step()
    assert max(last) < 0.1 * min(first)
    # Acting on the task of the teacher, it pushes inwards: standing still has a return of -2.6 there.
    env = make_point(num_envs=8, first_env_index=40, seed=1, num_threads=1)
    best = np.mean([_return_of(env, teacher)])
    env = make_point(num_envs=8, first_env_index=40, seed=1, num_threads=1)
    assert np.mean(trainer.evaluate(0, env, trainer.tasks[0].target_return)) > best - 0.3


def _return_of(env, policy):
    obs, total = env.reset(), 0.0
    for _ in range(7):
        step = env.step(policy(obs))
        obs, total = step.obs, total + float(step.rewards.mean())
    return total
