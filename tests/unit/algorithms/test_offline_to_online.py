"""From offline to online: what a new run takes over of another one, and a replay that begins with a dataset."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.protocols import ActionSpec
from rayagi.algorithms.bc import BCSpec
from rayagi.algorithms.fast_td3 import FastTD3Spec
from rayagi.algorithms.initial_state import initial_state
from rayagi.algorithms.iql import IQLSpec
from rayagi.algorithms.iql.learner import TwinCritic
from rayagi.algorithms.offline_data import RecordedTransitions, source_of
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.sac import SACSpec
from rayagi.algorithms.td3 import TD3Spec
from rayagi.algorithms.td3_bc import TD3BCSpec
from rayagi.algorithms.transitions import TransitionLayout, TransitionRows, recorded_rows
from rayagi.config.errors import ConfigError
from rayagi.config.rules import broken_rules
from rayagi.config.spec import DataSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.models.policy import new_policy
from rayagi.serving import writer_process
from rayagi.serving.errors import DatasetError
from tests.fakes.point import make_point
from tests.unit.algorithms import test_offline
from tests.unit.algorithms.point_dataset import record_point
from tests.unit.algorithms.test_program import build, run_gmis

POINT = make_point(num_envs=1, first_env_index=0, seed=0, num_threads=1).info
WIDE = replace(
    POINT, action=ActionSpec(kind="continuous", dim=2, low=(-1.0, 0.0), high=(1.0, 4.0))
)  # another centre and scale
RELU = NetworkSpec(hidden=(16, 8), activation="relu")
SQUASHED = replace(RELU, head="squashed_gaussian")
TD3_SETTINGS = TD3Spec(
    rollout_length=8, learning_starts=200, batch_size=16, updates_per_step=0.25, normalize_obs=True
)
pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """320 steps of the teacher: episodes of up to 7 steps."""
    return record_point(tmp_path_factory.mktemp("data") / "point")


def run_of(algorithm, learning, network=RELU, **other):
    return RunSpec(algorithm=algorithm, network=network, learning=learning, **other)


def saved(algorithm, learning, network, info=WIDE, **learner):
    """A run's policy, settings and shared state, with random networks and statistics."""
    spec = run_of(algorithm, learning, network, seed=5)
    policy = new_policy(spec, info, torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    if policy.normaliser is not None:
        policy.normaliser.update(policy.normaliser.moments_of(torch.randn(50, 3, generator=generator) + 1))
    return policy, spec, {"iteration": 4, "learner": {"model": policy.model.state_dict(), **learner}}


def begun(theirs, spec, info=WIDE):
    """The new run's policy, and the state that it begins with."""
    state = initial_state("runs/old", *theirs, spec, info)
    policy = new_policy(spec, info, torch.device("cpu"))
    policy.model.load_state_dict(state["learner"]["model"])
    policy.normaliser.load_state_dict(state["obs_normaliser"])
    return policy, state


def shown(policy, obs):
    """The environment's actions of the policy's mode."""
    return policy.environment_actions(policy.mode(policy.outputs(policy.observe(obs))))


OBS = torch.randn(20, 3, generator=torch.Generator().manual_seed(7))


def test_td3_begins_with_policy_critics_targets_and_statistics_of_td3_bc():
    policy, spec, shared = saved(
        "td3_bc", TD3BCSpec(), RELU, targets={"critics": "c", "policy": "p"}, steps=9
    )
    own, state = begun((policy, spec, shared), run_of("td3", TD3_SETTINGS))
    assert torch.equal(shown(own, OBS), shown(policy, OBS))
    assert torch.equal(own.model.values(OBS), policy.model.values(OBS))
    assert state["learner"]["targets"] == {"critics": "c", "policy": "p"}
    assert (state["learner"]["steps"], state["iteration"], state["env_steps"]) == (9, 0, 0)
    assert "optimisers" not in state["learner"]


def test_td3_and_sac_begin_with_the_function_that_bc_has_learned():
    theirs = saved("bc", BCSpec(num_updates=10), SQUASHED)
    for spec in (run_of("td3", TD3_SETTINGS), run_of("sac", SACSpec(normalize_obs=True))):
        own, state = begun(theirs, spec)
        torch.testing.assert_close(shown(own, OBS), shown(theirs[0], OBS))
        assert state["learner"]["steps"] == 40  # iterations times updates
    _, log_std = own.model.head.gaussian(own.outputs(OBS))
    torch.testing.assert_close(log_std, theirs[0].model.head.log_std.detach().expand(20, -1))


def iql_critics(seed):
    critic = TwinCritic(3, WIDE.action, SQUASHED, seed)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(0.1)  # biases too
    return critic


def test_iqls_critics_of_the_environments_actions_become_critics_of_normalised_ones():
    critic, target = iql_critics(1), iql_critics(2)
    theirs = saved("iql", IQLSpec(), SQUASHED, critic=critic.state_dict(), target=target.state_dict())
    own, state = begun(theirs, run_of("td3", TD3_SETTINGS))
    actions = 2 * torch.rand(20, 2, generator=torch.Generator().manual_seed(3)) - 1
    of_environment = torch.stack((actions[:, 0], 2 + 2 * actions[:, 1]), 1)  # centre 0 and 2, scale 1 and 2
    torch.testing.assert_close(own.model.critics(OBS, actions).squeeze(-1), critic(OBS, of_environment))
    own.model.critics.load_state_dict(state["learner"]["targets"]["critics"])
    torch.testing.assert_close(own.model.critics(OBS, actions).squeeze(-1), target(OBS, of_environment))


@pytest.mark.parametrize(
    ("theirs", "spec", "said"),
    [
        (("td3_bc", TD3BCSpec(), RELU), run_of("ppo", PPOSpec()), "does not learn from a replay"),
        (
            ("td3_bc", TD3BCSpec(), replace(RELU, hidden=(4,))),
            run_of("td3", TD3_SETTINGS),
            r"network.hidden = \(4,\), and this run \(16, 8\)",
        ),
        (
            ("td3_bc", TD3BCSpec(), replace(RELU, activation="elu")),
            run_of("td3", TD3_SETTINGS),
            "network.activation = elu",
        ),
        (
            ("td3_bc", TD3BCSpec(), RELU),
            run_of("td3", replace(TD3_SETTINGS, normalize_obs=False)),
            "use --set td3.normalize_obs=true",
        ),
        (("td3_bc", TD3BCSpec(normalize_rewards=True), RELU), run_of("td3", TD3_SETTINGS), "scaled rewards"),
        (("bc", BCSpec(), RELU), run_of("td3", TD3_SETTINGS), "network.head=squashed_gaussian"),
        (
            ("ppo", PPOSpec(normalize_obs=True), replace(SQUASHED, critic_only=("0:1",))),
            run_of("td3", TD3_SETTINGS),
            "not a separate perceptron on all observations",
        ),
        (
            ("ppo", PPOSpec(normalize_obs=True), replace(SQUASHED, shared=True)),
            run_of("sac", SACSpec(normalize_obs=True)),
            "not a separate perceptron on all observations",
        ),
        (("bc", BCSpec(), SQUASHED), run_of("fast_td3", FastTD3Spec()), "not those of 'fast_td3'"),
        (("td3_bc", TD3BCSpec(), RELU), run_of("sac", SACSpec(normalize_obs=True)), "not one of 'sac'"),
        (
            ("fast_td3", FastTD3Spec(v_max=9.0), RELU),
            run_of("fast_td3", FastTD3Spec()),
            "the same num_atoms, v_min, v_max",
        ),
    ],
)
def test_networks_that_do_not_fit_are_refused_with_what_would(theirs, spec, said):
    with pytest.raises(ConfigError, match=f"^--init runs/old: .*{said}"):
        initial_state("runs/old", *saved(*theirs), spec, WIDE)


def test_a_run_of_another_box_is_refused():
    theirs = saved("td3_bc", TD3BCSpec(), RELU)
    with pytest.raises(ConfigError, match="observations or actions differ"):
        initial_state("runs/old", *theirs, run_of("td3", TD3_SETTINGS), POINT)


LAYOUT = TransitionLayout(replace(POINT, obs_dim=1), 3, 2)


def states(rows):
    """(state, later state) of each transition."""
    each = zip(rows.columns["obs"].squeeze(-1).tolist(), rows.lengths.tolist(), strict=True)
    return [(obs[t], obs[t + LAYOUT.reach]) for obs, length in each for t in range(length)]


def flat(rows, name):
    each = zip(rows.columns[name].tolist(), rows.lengths.tolist(), strict=True)
    return [value for values, length in each for value in values[:length]]


def test_recorded_trajectories_become_returns_of_n_steps_that_end_with_the_trajectory():
    obs, nowhere = torch.arange(4.0).unsqueeze(-1), torch.zeros(4, dtype=torch.bool)
    last = torch.tensor([False, False, False, True])
    rewards, actions = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.zeros(4, 2)
    rows = recorded_rows(LAYOUT, obs, obs + 1, actions, rewards, last, last, gamma=0.5, n_step=2)
    # r_t + 0.5 r_{t+1}; the last one alone. Both returns that reach the end have no value behind them
    assert flat(rows, "reward") == [2.0, 4.0, 8.0, 8.0]
    assert flat(rows, "discount") == [0.25, 0.25, 0.0, 0.0]
    assert states(rows) == [(0, 2), (1, 3), (2, 4), (3, 4)]
    assert rows.lengths.tolist() == [3, 1]
    cut = recorded_rows(LAYOUT, obs, obs + 1, actions, torch.ones(4), nowhere, last, gamma=0.5, n_step=2)
    assert flat(cut, "discount") == [0.25] * 3 + [0.5]  # a time limit bootstraps
    assert states(cut) == [(0, 2), (1, 3), (2, 4), (3, 4)]


def test_a_return_does_not_go_on_in_the_next_trajectory():
    """Of 1 step that terminates, 2 that are cut and 1 that is cut."""
    obs = torch.tensor([[0.0], [10.0], [11.0], [20.0]])
    rows = recorded_rows(
        LAYOUT, obs, obs + 1, torch.zeros(4, 2), torch.tensor([1.0, 2.0, 4.0, 8.0]),
        torch.tensor([True, False, False, False]), torch.tensor([True, False, True, True]), gamma=0.5, n_step=3,
    )  # fmt: skip
    assert flat(rows, "reward") == [1, 4, 4, 8]
    assert flat(rows, "discount") == [0, 0.25, 0.5, 0.5]
    assert states(rows) == [(0, 1), (10, 12), (11, 12), (20, 21)]
    assert rows.lengths.tolist() == [1, 2, 1]


def test_trainers_share_a_dataset_out(dataset):
    recorded = RecordedTransitions(str(dataset), POINT)
    head = new_policy(run_of("td3", TD3_SETTINGS), POINT, torch.device("cpu")).model.head
    layout = TransitionLayout(POINT, 4, 1)

    def part(rank, parts):
        """Reward and length of each row."""
        found = list(recorded.rows(head, layout, 0.9, 1, part=rank, parts=parts))
        return (
            torch.cat(each) for each in zip(*((r.columns["reward"], r.lengths) for r in found), strict=True)
        )

    rewards, lengths = part(0, 1)
    assert len(lengths) == recorded.num_rows(4)
    assert lengths.sum() == recorded.num_steps == 320
    own, sizes = zip(*(part(rank, 3) for rank in range(3)), strict=True)
    assert sorted(torch.cat(own).tolist()) == sorted(rewards.tolist())
    assert sorted(int(each.sum()) for each in sizes) == [106, 106, 108]  # rows are of 4 and 3


def test_short_and_long_pieces_of_episodes_are_shared_out_alike():
    """Of 12 steps each, in rows of 8: every second row is short."""
    lengths = torch.tensor([8, 4] * 10)
    rows = TransitionRows({"number": torch.arange(20)}, lengths)
    parts = [rows.part(rank, 2) for rank in range(2)]
    assert [int(each.lengths.sum()) for each in parts] == [60, 60]
    assert sorted(torch.cat([each.columns["number"] for each in parts]).tolist()) == list(range(20))


def with_dataset(path, **learning):
    return run_of(
        "td3",
        replace(TD3_SETTINGS, **learning),
        gmi=GmiSpec(num_envs=4),
        data=DataSpec(path=str(path)),
        seed=3,
    )


def test_a_replay_begins_with_the_dataset_and_learns_from_the_first_rollout_on(dataset):
    def work(program):
        metrics = program.iterate().metrics
        learner = program.learner
        kept = learner._recorded.rows(
            learner.policy.model.head,
            learner.layout,
            learner.spec.gamma,
            learner.spec.n_step,
            part=learner.communicator.rank,
            parts=learner.communicator.world_size,
        )
        moments = learner.policy.normaliser.moments
        return (
            metrics["gradient_steps"],
            metrics["replay_transitions"],
            sum(int(each.lengths.sum()) for each in kept),
            moments.count,
        )

    # 8 steps of 4 environments on each: 32 or 64 steps, a quarter of them gradient steps
    assert run_gmis(with_dataset(dataset), 1, work) == [(8, 320 + 32, 320, 320 + 32)]
    assert run_gmis(with_dataset(dataset), 2, work) == [(16, 160 + 32, 160, 320 + 64)] * 2


def test_a_replay_that_begins_with_a_dataset_says_once_that_actions_are_beyond_the_range(tmp_path):
    def shout(block):
        block.action[0, 0] = 5.0

    path = record_point(tmp_path / "d", edit=shout)

    def work(program):
        return [program.iterate().notes for _ in range(2)]

    (first,), then = run_gmis(with_dataset(path), 1, work)[0]
    assert first.startswith(f"{path} has actions beyond Point's range: 1 of 320, most of them in component 0")
    assert then == ()


def test_a_resumed_replay_does_not_get_the_dataset_twice(dataset, tmp_path):
    program = build(with_dataset(dataset))
    program.iterate()
    state = program.state_dict()
    assert program.save_replay(tmp_path / "replay")
    other = build(with_dataset(dataset))
    other.load_state_dict({**state, "replay": str(tmp_path / "replay")})
    assert other.iterate().metrics["replay_transitions"] == 320 + 64
    # Without its replay it begins with the dataset again
    third = build(with_dataset(dataset))
    third.load_state_dict({"shared": state["shared"]})
    assert third.iterate().metrics["replay_transitions"] == 320 + 32


def test_a_program_begins_with_an_offline_run(dataset):
    offline = test_offline.build(
        run_of(
            "td3_bc",
            TD3BCSpec(num_updates=5, batch_size=32),
            gmi=GmiSpec(template="offline"),
            data=DataSpec(path=str(dataset)),
        )
    )
    offline.iterate()
    shared = offline.state_dict()["shared"]
    spec = with_dataset(dataset, learning_starts=10_000)
    program = build(spec)
    state = initial_state("runs/old", offline.policy, offline.spec, shared, spec, POINT)
    program.load_state_dict({"shared": state})
    learner = program.learner
    assert torch.equal(learner.policy.model.policy[0].weight, offline.policy.model.policy[0].weight)
    for name, target in learner.updater.targets.items():
        for key, value in target.module.state_dict().items():
            assert torch.equal(value, shared["learner"]["targets"][name][key])
    # It acts with that policy, not at random, although learning has not started; and keeps the run's statistics
    assert program.iterate().metrics["gradient_steps"] == 0
    with torch.no_grad():
        observed = offline.policy.observe(program.rollout.raw_obs)
        errors = program.rollout.actions - offline.policy.mode(offline.policy.outputs(observed))
    assert float(errors.std()) < 0.2  # noise of 0.1
    assert learner.policy.normaliser.moments.count == 320 + 32


def test_a_dataset_of_short_episodes_has_space_in_a_replay_of_its_size(dataset):
    """320 steps in episodes of up to 7, of which one may be in a row of 6: 6 x 60 rows would be more than 330."""
    replays = []
    for capacity in (330, 2000):
        program = build(with_dataset(dataset, capacity=capacity, rollout_length=6))
        held = [program.iterate().metrics["replay_transitions"] for _ in range(2)]
        replays.append((program.learner.layout.steps, program.learner.replay.capacity, *held))
    assert replays == [(1, 330, 330, 330), (6, 334, 320 + 24, 320 + 48)]


@pytest.mark.parametrize(("capacity", "steps"), [(640, 1), (2000, 6)])
def test_unequal_trainers_hold_a_dataset_once(dataset, capacity, steps):
    """Of 6 and 2 environments. A quarter of 640 has space for 160 transitions, not for as many rows of 6 as these need."""
    spec = with_dataset(dataset, capacity=capacity, rollout_length=6)
    spec = replace(spec, gmi=replace(spec.gmi, slices=(3.0, 1.0)))

    def work(program):
        learner = program.learner
        program.iterate()
        rows = learner._recorded.rows(
            learner.policy.model.head, learner.layout, 0.9, 1,
            part=learner.communicator.rank, parts=2,
        )  # fmt: skip
        return learner.layout.steps, learner.num_envs, [
            tuple(obs[t].tolist())
            for each in rows
            for obs, length in zip(each.columns["obs"], each.lengths.tolist(), strict=True)
            for t in range(length)
        ]  # fmt: skip

    (*one, first), (*other, second) = run_gmis(spec, 2, work)
    assert (one, other) == ([steps, 6], [steps, 2])
    whole = [
        obs for batch in source_of(str(dataset), POINT).batches() for obs in batch.shifted("obs").tolist()
    ]
    assert sorted(first + second) == sorted(map(tuple, whole))


def test_a_saved_replay_of_returns_over_several_steps_is_no_dataset(tmp_path):
    program = build(run_of("td3", replace(TD3_SETTINGS, n_step=3), gmi=GmiSpec(num_envs=4)))
    program.iterate()
    assert program.save_replay(tmp_path / "replay")
    with pytest.raises(DatasetError, match="has 3 obs beyond a row's last step, where 1 is needed"):
        source_of(str(tmp_path / "replay"), POINT, imitation=True)


def test_datasets_that_do_not_fit_are_refused(dataset, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="capacity = 300: is less than the dataset's 320 steps need"):
        build(with_dataset(dataset, capacity=300))

    monkeypatch.setattr(writer_process, "_check_finite", lambda *_: None)  # of other writers

    def poisoned(block):
        block.reward[0, 0] = np.nan

    damaged = build(with_dataset(record_point(tmp_path / "nan", edit=poisoned)))
    with pytest.raises(DatasetError, match="a reward that is not finite"):
        damaged.iterate()
    errors = [str(error) for error in broken_rules(run_of("ppo", PPOSpec(), data=DataSpec(path="d")))]
    assert any("which learns from its own experience" in error and "'td3'" in error for error in errors)
