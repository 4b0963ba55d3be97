"""What off-policy learners share."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from actors.protocols import ActionSpec
from actors.replay import gather, select
from collectives.solo import SoloCommunicator
from rayagi.algorithms.dqn import DQNSpec
from rayagi.algorithms.dqn.learner import DQNUpdater, QModel
from rayagi.algorithms.fast_sac import FastSACSpec
from rayagi.algorithms.fast_sac import learner as fast_sac
from rayagi.algorithms.fast_td3 import FastTD3Spec
from rayagi.algorithms.fast_td3.learner import FastTD3Model, FastTD3Updater
from rayagi.algorithms.off_policy import OffPolicyLearner
from rayagi.algorithms.sac import SACSpec
from rayagi.algorithms.sac import learner as sac
from rayagi.algorithms.td3 import TD3Spec
from rayagi.algorithms.td3 import learner as td3
from rayagi.algorithms.transitions import NEXT_OBS, OBS, Transitions
from tests.fakes.point import make_point
from tests.unit.algorithms.test_program import build, run_gmis, run_members
from tests.unit.algorithms.test_sac import INFO, NETWORK, SETTINGS, SPEC


@pytest.mark.parametrize(("rank", "num_envs", "rows", "weight"), [(0, 6, 6, 1.2), (1, 3, 4, 0.8)])
def test_trainers_divide_a_batch_by_their_environments_and_weigh_their_means_by_its_rows(
    rank, num_envs, rows, weight
):
    """10 rows for 6 and 3 environments: 6 and 4. A mean over all ranks counts a rank's mean rows / (10 / 2) times."""
    group = SimpleNamespace(rank=rank, world_size=2)
    learner = SimpleNamespace(
        communicator=group, num_envs=num_envs, _env_counts=[6, 3], spec=SimpleNamespace(batch_size=10)
    )
    assert OffPolicyLearner._share_of_batch(learner) == (rows, pytest.approx(weight))


STILL = 1e-12
"""A learning rate with which a network's step does not show in the gradients of the next."""
SUPPORT = {"v_min": -5.0, "v_max": 5.0, "num_atoms": 11}
CASES = {
    "sac": (sac.SACUpdater, sac.make_model, SACSpec(learning_rate=STILL)),
    "td3": (td3.TD3Updater, td3.make_model, TD3Spec(learning_rate=STILL, policy_delay=1)),
    "td3 with cloning": (
        td3.TD3Updater,
        td3.make_model,
        TD3Spec(learning_rate=STILL, policy_delay=1, cloning=0.4),
    ),
    "fast_td3": (
        FastTD3Updater,
        FastTD3Model,
        FastTD3Spec(learning_rate=STILL, policy_delay=1, target_noise=0.0, **SUPPORT),
    ),
    "fast_sac": (
        fast_sac.FastSACUpdater,
        fast_sac.make_model,
        FastSACSpec(learning_rate=STILL, policy_delay=1, **SUPPORT),
    ),
    "dqn": (DQNUpdater, QModel, DQNSpec(learning_rate=STILL)),
    "dqn of distributions": (DQNUpdater, QModel, DQNSpec(learning_rate=STILL, **SUPPORT)),
}


def gradients(name, communicator, rows, weight):
    """Reduced gradients of each network, from these rows of a batch of 32."""
    made_by, make_model, spec = CASES[name]
    action = ActionSpec(kind="discrete", dim=1, num_choices=3) if name.startswith("dqn") else INFO.action
    info = replace(INFO, action=action)
    updater = made_by(make_model(info, NETWORK, spec, 1), spec, communicator, info, weight=weight)
    calls = count()

    def normal(seed, *shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))[rows]

    updater.noise = lambda _: normal(100 + next(calls), 32, 2)
    actions = (3 * torch.rand(32, generator=torch.Generator().manual_seed(0))).long()[rows]
    actions = actions if action.is_discrete else normal(3, 32, 2).clamp(-1, 1)
    discounts, weights = 0.9 * (normal(5, 32) > 0), normal(6, 32).sigmoid() if action.is_discrete else None
    updater.step(Transitions(normal(1, 32, 5), normal(2, 32, 5), actions, normal(4, 32), discounts, weights))
    return {group: each.flat.gradients.clone() for group, each in updater.groups.items()}


@pytest.mark.parametrize("name", CASES)
def test_two_trainers_of_unequal_parts_have_the_gradients_of_the_whole_batch(name):
    whole = gradients(name, SoloCommunicator(), slice(0, 32), 1.0)

    def part(communicator):
        rows, weight = ((slice(0, 20), 20 / 16), (slice(20, 32), 12 / 16))[communicator.rank]
        return gradients(name, communicator, rows, weight)

    for parts in run_members(2, part):
        for group, gradient in whole.items():
            assert gradient.abs().max() > 1e-6
            torch.testing.assert_close(
                parts[group], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())
            )


@pytest.mark.parametrize("name", CASES)
def test_waiting_for_another_trainer_is_not_a_trainers_own_work(name, watched):
    def names(communicator):
        found = []
        gradients(name, watched(communicator, found), slice(0, 32), 1.0)
        return found

    for found in run_members(2, names):
        assert set(found) == {"reduce"}


def test_every_trainer_and_iteration_has_random_numbers_of_its_own():
    """Of the draws from the replay, and of the updater's noise."""

    def seeds(program):
        learner, found = program.learner, []
        begin, step = learner.updater.begin, learner._step
        learner.updater.begin = lambda **given: found.append(given["seed"]) or begin(**given)
        learner._step = lambda seed, draw: found.append(seed) or step(seed, draw)
        for _ in range(3):
            program.iterate()
        return [*dict.fromkeys(found)]  # an iteration's draws have one seed

    found = run_gmis(SPEC, 2, seeds)
    assert [len(each) for each in found] == [6, 6]
    assert len({*found[0], *found[1]}) == 12
    assert seeds(build(SPEC)) == found[0]  # and they are repeated


def test_a_batch_is_normalised_by_the_statistics_of_all_rollouts_before():
    program = build(replace(SPEC, learning=replace(SETTINGS, normalize_obs=True)))
    seen = []
    for _ in range(2):
        program.iterate()
        seen.append(program.rollout.raw_obs.flatten(0, 1).double())
    learner, seen = program.learner, torch.cat(seen)
    chosen = select(learner.replay, learner.selector, 32, seed=1, draw=0)
    batch = learner.batch(chosen)
    raw = gather(learner.replay, chosen, learner.layout.subscriptions).values
    for name, found in ((OBS, batch.obs), (NEXT_OBS, batch.next_obs)):
        expected = (torch.from_numpy(raw[name]).double() - seen.mean(0)) / (
            seen.var(0, correction=0) + 1e-8
        ).sqrt()
        torch.testing.assert_close(found.double(), expected.clamp(-10, 10), rtol=1e-4, atol=1e-5)


def test_the_linear_schedule_is_that_of_each_network():
    rates = {"learning_rate": 1e-3, "critic_learning_rate": 2e-3, "alpha_learning_rate": 5e-4}
    learning = replace(SETTINGS, lr_schedule="linear", **rates)
    program = build(replace(SPEC, learning=learning, total_env_steps=320))
    for _ in range(3):
        metrics = program.iterate().metrics
    # The third rollout's steps begin after 64 of 320 environment steps: 0.8 of each.
    found = {name: group.adam.learning_rate for name, group in program.learner.updater.groups.items()}
    assert found == pytest.approx({"policy": 8e-4, "critics": 1.6e-3, "alpha": 4e-4})
    assert metrics["learning_rate"] == pytest.approx(8e-4)


@pytest.mark.parametrize(
    ("settings", "total", "limit", "steps", "rows"),
    [
        ({}, None, 7, 7, 143),  # 1000 transitions in rows of an episode's 7 steps
        ({}, None, None, 8, 125),
        ({"n_step": 3}, None, None, 8, 125),
        ({"n_step": 8}, None, None, 1, 1000),  # a row of 8 would have 16 observations
        ({"rollout_length": 1}, None, None, 1, 1000),
        ({"capacity": 1}, None, None, 8, 1),
        ({}, 160, None, 8, 40),  # each row of the run, and one for each that an episode's end cuts
        ({"rollout_length": 1}, 160, None, 1, 160),
        ({"learning_starts": 400}, 160, None, 8, 50),
    ],
)
def test_the_rows_of_a_replay(settings, total, limit, steps, rows):
    learning = replace(SETTINGS, **{"learning_starts": 1, **settings})

    def unlimited(**given):
        env = make_point(**given)
        env.info = replace(env.info, max_episode_steps=limit)
        return env

    learner = build(replace(SPEC, learning=learning, total_env_steps=total), make_env=unlimited).learner
    assert (learner.layout.steps, learner.replay.capacity) == (steps, rows)
