"""Offline learning: shards of a dataset, common draws, and behaviour cloning, in one GMI and in several (threads)."""

import copy
import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from actors.errors import NonFiniteError
from actors.gmi import GmiContext
from actors.protocols import ActionSpec
from actors.replay import Subscription
from collectives.objects import all_gather_objects
from collectives.solo import SoloCommunicator
from placement.inventory import local_machine
from rayagi.algorithms.action_range import clipped, refuse_other_units
from rayagi.algorithms.bc import BCSpec
from rayagi.algorithms.factory import TrainingFactory
from rayagi.algorithms.iql import IQLSpec
from rayagi.algorithms.offline_data import OfflineData, refuse_unfit_dataset, scan, source_of
from rayagi.algorithms.td3_bc import TD3BCSpec
from rayagi.config.convert import run_spec_from_dict, run_spec_to_dict
from rayagi.config.errors import ConfigError
from rayagi.config.presets import preset
from rayagi.config.rllib_classes import CONFIGS
from rayagi.config.rules import broken_rules, checked, refuse_unfit_env
from rayagi.config.spec import DataSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import env_info, make_env_factory
from rayagi.models.policy import load_policy
from rayagi.monitoring.catalogue import merge
from rayagi.planning import plan_of
from rayagi.replay import open_source
from rayagi.replay.trajectories import TrajectoryBatch
from rayagi.serving import writer_process
from rayagi.serving.dataset import open_dataset
from rayagi.serving.errors import DatasetError
from tests.fakes.point import make_point
from tests.unit.algorithms.point_dataset import record_point, teacher
from tests.unit.algorithms.test_program import run_members

INFO = make_point(num_envs=1, first_env_index=0, seed=0, num_threads=1).info
ALL = (
    Subscription(column="obs"),
    Subscription(column="action"),
    Subscription(column="reward"),
    Subscription(column="obs", offset=1, name="next_obs"),
    Subscription(column="terminated"),
)
pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """320 steps of the teacher: episodes of up to 7 steps."""
    return record_point(tmp_path_factory.mktemp("data") / "point")


def spec_of(path, **learning):
    given = {"batch_size": 32, "num_updates": 20, "learning_rate": 3e-3, **learning}
    return RunSpec(
        algorithm="bc",
        gmi=GmiSpec(template="offline"),
        network=NetworkSpec(hidden=(16,), activation="tanh"),
        learning=BCSpec(**given),
        data=DataSpec(path=str(path)),
        seed=3,
    )


def build(spec, communicator=None, make_env=make_point):
    context = GmiContext.local("Point", communicator, roles=("replay", "agent", "trainer"))
    return TrainingFactory(spec, make_env)(context)


def parameters(program):
    return torch.cat([each.detach().reshape(-1) for each in program.policy.model.parameters()])


def test_values_of_every_member_arrive_whatever_their_size():
    found = run_members(
        3, lambda c: all_gather_objects([None, {"a": np.arange(c.rank * 5)}, b"x" * 9][c.rank], c)
    )
    for each in found:
        assert each[0] is None
        assert each[1]["a"].tolist() == [0, 1, 2, 3, 4]
        assert each[2] == b"x" * 9
    assert all_gather_objects("alone", SoloCommunicator()) == ["alone"]


@pytest.mark.parametrize("row_steps", [1, 3, 64, None])
def test_a_shard_holds_the_transitions_of_the_dataset(tmp_path, row_steps):
    dataset = record_point(tmp_path / "outwards", policy=lambda obs: obs[:, :2].sign())
    data = OfflineData(
        source_of(str(dataset), INFO), SoloCommunicator(), subscriptions=ALL, seed=0, row_steps=row_steps
    )
    transitions = set()
    for episode in open_dataset(dataset).episodes():
        for t in range(len(episode.rewards)):
            over = episode.terminated and t == len(episode.rewards) - 1
            transitions.add((
                episode.obs[t].tobytes(), episode.actions[t].tobytes(), float(episode.rewards[t]),
                episode.obs[t + 1].tobytes(), over,
            ))  # fmt: skip
    found = set()
    for draw in range(20):
        batch = {name: values.numpy() for name, values in data.batch(512, draw).items()}
        for obs, action, reward, after, over, *_ in zip(*batch.values(), strict=True):
            found.add((obs.tobytes(), action.tobytes(), float(reward), after.tobytes(), bool(over)))
    assert found == transitions  # 10,240 draws of 320: one is missed with probability 4e-12
    assert any(over for *_, over in found)
    data.close()


def test_moments_are_those_of_the_observations(dataset):
    obs = np.concatenate([episode.obs[:-1] for episode in open_dataset(dataset).episodes()]).astype(float)
    found = scan(source_of(str(dataset), INFO), INFO).observations
    assert int(found.count) == len(obs)
    torch.testing.assert_close(found.mean, torch.from_numpy(obs.mean(0)))
    torch.testing.assert_close(found.variance(), torch.from_numpy(obs.var(0)))


@pytest.mark.parametrize("num_gmis", [2, 3, 5])
def test_all_gmis_draw_the_list_of_one_and_own_its_parts(dataset, num_gmis):
    def lists(communicator):
        data = OfflineData(source_of(str(dataset), INFO), communicator, subscriptions=ALL, seed=4)
        chosen = data.select(64, 9)
        own = data.batch(64, 9)["obs"].clone()
        return chosen.keys.indices, chosen.steps, own, data.stores[0].owner(chosen.keys.indices)

    (indices, steps, whole, _) = lists(SoloCommunicator())
    several = OfflineData(
        source_of(str(dataset), INFO), SoloCommunicator(), subscriptions=ALL, seed=4, local_shards=num_gmis
    )
    assert several.select(64, 9).keys.indices.tolist() == indices.tolist()
    assert sorted(several.batch(64, 9)["obs"].tolist()) == sorted(whole.tolist())
    for rank, (theirs, their_steps, own, owners) in enumerate(run_members(num_gmis, lists)):
        assert theirs.tolist() == indices.tolist()
        assert their_steps.tolist() == steps.tolist()
        assert torch.equal(own, whole[torch.from_numpy(owners == rank)])


@pytest.mark.parametrize("loss", ["log_likelihood", "mse"])
def test_several_gmis_learn_as_one(dataset, loss):
    spec = spec_of(dataset, loss=loss)

    def curve(communicator):
        program = build(spec, communicator)
        return [program.iterate().metrics for _ in range(3)], parameters(program)

    whole, weights = curve(SoloCommunicator())
    for num_gmis in (2, 3):
        for found, theirs in run_members(num_gmis, curve):
            for name in ("policy_loss", "action_error", "grad_norm"):
                assert [row[name] for row in found] == pytest.approx([row[name] for row in whole], rel=1e-4)
            torch.testing.assert_close(theirs, weights, rtol=1e-3, atol=1e-5)
    samples = [sum(rows[0]["train_samples"] for rows, _ in run_members(2, curve))]
    assert samples == [32 * 20]


def test_more_gmis_than_timesteps_in_a_batch(dataset):
    """A GMI without a timestep of the batch has the gradient zero."""
    spec = spec_of(dataset, batch_size=1)
    whole = build(spec).iterate().metrics
    for found in run_members(3, lambda c: build(spec, c).iterate().metrics):
        assert found["policy_loss"] == pytest.approx(whole["policy_loss"], rel=1e-4)


def test_cloning_finds_the_teacher(dataset):
    program = build(spec_of(dataset, num_updates=400, loss="mse", learning_rate=1e-2))
    error = program.iterate().metrics["action_error"]
    for _ in range(2):
        program.iterate()
    assert program.iterate().metrics["action_error"] < 0.02 < error
    obs = torch.tensor([[0.2, -0.3, 0.3], [0.05, 0.6, 0.6]])
    with torch.no_grad():
        found = program.policy.outputs(program.policy.observe(obs))
    torch.testing.assert_close(found.clamp(-1, 1), teacher(obs), rtol=0, atol=0.25)
    assert program.evaluate(8, seed=1).mean_return() > -1.6  # standing still has -2.6


def test_loss_by_hand(dataset):
    """-log N(a; mean, std) of each timestep, averaged."""
    spec = spec_of(dataset, num_updates=1, batch_size=16)
    program = build(spec)
    batch = {name: values.clone() for name, values in program.data.batch(16, 0).items()}
    obs = (
        batch["obs"].double() - program.statistics.observations.mean
    ) / program.statistics.observations.variance().sqrt()
    with torch.no_grad():
        means = program.policy.model.outputs(obs.float())
    expected = -torch.distributions.Normal(means, 1.0).log_prob(batch["action"]).sum(-1).mean()
    assert program.iterate().metrics["policy_loss"] == pytest.approx(float(expected), rel=1e-4)


def test_a_squashed_gaussian_clones_actions_at_its_bounds(dataset):
    spec = replace(
        spec_of(dataset, num_updates=300, learning_rate=1e-2),
        network=NetworkSpec(hidden=(16,), head="squashed_gaussian"),
    )
    program = build(spec)
    first = program.iterate().metrics
    last = program.iterate().metrics
    assert np.isfinite(list(last.values())).all()
    assert last["action_error"] < first["action_error"]


def test_a_run_is_not_resumed_on_a_dataset_that_has_grown(dataset, tmp_path):
    state = build(spec_of(dataset)).state_dict()
    larger = build(spec_of(record_point(tmp_path / "more", num_steps=41)))
    with pytest.raises(
        DatasetError, match=r"steps where this run began with \d+ of 320: restore it, or start"
    ):
        larger.load_state_dict(state)


def test_the_policy_of_a_checkpoint_acts_as_the_trained_one(dataset):
    program = build(spec_of(dataset))
    program.iterate()
    obs = torch.rand((5, 3), generator=torch.Generator().manual_seed(0))
    loaded = load_policy(program.state_dict()["shared"], spec_of(dataset), INFO)
    with torch.no_grad():
        assert torch.equal(
            loaded.outputs(loaded.observe(obs)), program.policy.outputs(program.policy.observe(obs))
        )


@pytest.mark.parametrize(
    ("name", "field", "at"),
    [
        ("an observation", "obs", (1, 2, 0)),
        ("an action", "action", (1, 2, 1)),
        ("a reward", "reward", (1, 2)),
    ],
)
def test_what_is_not_finite_is_refused_with_its_episode(tmp_path, monkeypatch, name, field, at):
    monkeypatch.setattr(writer_process, "_check_finite", lambda *_: None)  # of other writers

    def spoil(block):
        getattr(block, field)[at] = np.nan

    path = record_point(tmp_path / "d", num_envs=2, num_steps=5, edit=spoil)
    with pytest.raises(DatasetError, match=f"episode 1 has {name} that is not finite"):
        build(iql(path))


def test_a_run_that_diverges_ends_with_a_reason(dataset):
    with pytest.raises(NonFiniteError, match="policy_loss became NaN or infinite in iteration 1"):
        build(spec_of(dataset, loss="mse", learning_rate=1e30)).iterate()


def four_steps(path, actions):
    """A dataset of two trajectories of two steps."""
    steps = {"obs": torch.zeros(4, 3), "reward": torch.ones(4), "terminated": torch.tensor([0, 1, 0, 1])}
    torch.save({**steps, "action": torch.tensor(actions)}, path)
    return str(path)


def notes_of(path, info):
    return scan(source_of(path, info), info).notes


UNEVEN = replace(INFO, action=ActionSpec(kind="continuous", dim=2, low=(-1.0, 0.0), high=(1.0, 4.0)))


def test_actions_beyond_the_range_count_as_at_its_limits_and_are_told(tmp_path):
    path = four_steps(tmp_path / "d.pt", [[0.5, 9.0], [-7.5, 2.0], [1.0, 4.0], [-1.0, -0.5]])
    (batch,) = clipped(source_of(path, UNEVEN), UNEVEN).batches()
    assert batch.columns["action"].tolist() == [[0.5, 4.0], [-1.0, 2.0], [1.0, 4.0], [-1.0, 0.0]]
    # Component 0 once, component 1 twice.
    text = (
        f"{path} has actions beyond Point's range: 3 of 4, most of them in component 1, which is from -0.5 to 9 where "
        "0 to 4 is possible. They count as at the limits, where the environment clips them; if the dataset has other "
        "units, convert them."
    )
    assert notes_of(path, UNEVEN) == (text,)
    inside = four_steps(
        tmp_path / "inside.pt", [[0.5, 0.0], [-1.0, 4.0], [np.nextafter(np.float32(1), 2), 1.0], [0, 2]]
    )
    assert notes_of(inside, UNEVEN) == ()
    without = replace(
        UNEVEN, action=ActionSpec(kind="continuous", dim=2, low=(-np.inf, 0.0), high=(np.inf,) * 2)
    )
    (note,) = notes_of(path, without)
    assert "-0.5 to 9 where 0 to inf is possible" in note


def test_a_component_that_is_always_beyond_its_range_is_of_another_task(tmp_path):
    path = four_steps(tmp_path / "d.pt", [[57.0, 1.0], [-90.0, 1.0], [45.0, 2.0], [30.0, 1.0]])
    source = source_of(path, UNEVEN)
    for refuse in (scan, refuse_other_units):
        with pytest.raises(
            DatasetError,
            match="component 0 of every action beyond Point's range: it is from -90 to 57 where -1 to 1 is possible",
        ):
            refuse(source, UNEVEN)


def test_units_are_checked_until_every_component_was_within_its_range(tmp_path):
    """The GMIs read all of the dataset anyway."""
    path = four_steps(tmp_path / "d.pt", [[9.0, 1.0], [9.0, 1.0], [0.5, 9.0], [0.5, 9.0]])
    source = source_of(path, UNEVEN)
    beyond, within = source.read()
    num_read = 0

    def begin():
        nonlocal num_read
        for trajectory in (beyond, within, beyond, beyond):
            num_read += 1
            yield TrajectoryBatch(trajectory, np.array([2]))

    refuse_other_units(replace(source, begin=begin), UNEVEN)
    assert num_read == 2


def test_a_run_says_once_that_actions_are_beyond_the_range(tmp_path):
    def shout(block):
        block.action[0, 0] = 5.0

    path = record_point(tmp_path / "d", edit=shout)
    expected = (f"{path} has actions beyond Point's range: 1 of 320",)
    for spec in (spec_of(path), iql(path)):
        program = build(spec)
        results = [program.iterate() for _ in range(2)]
        assert [tuple(note.partition(", most")[0] for note in each.notes) for each in results] == [
            expected,
            (),
        ]
        # Several GMIs say the same.
        assert merge([results[0], results[0]]).notes == results[0].notes


def test_a_dataset_is_refused_before_anything_starts(tmp_path):
    path = four_steps(tmp_path / "d.pt", [[57.0, 1.0], [-90.0, 1.0], [45.0, 2.0], [30.0, 1.0]])
    with pytest.raises(DatasetError, match="component 0 of every action beyond Point's range"):
        refuse_unfit_dataset(path, spec_of(path), UNEVEN)
    path = four_steps(tmp_path / "e.pt", [[57.0, 1.0], [0.5, 1.0], [45.0, 2.0], [30.0, 1.0]])
    refuse_unfit_dataset(path, spec_of(path), UNEVEN)


def test_values_beyond_float32_are_said_to_be_so(tmp_path):
    path = four_steps(tmp_path / "d.pt", [[0.5, 1.0]] * 4)
    steps = torch.load(path)
    torch.save(steps | {"obs": torch.full((4, 3), 1e300, dtype=torch.float64)}, path)
    with pytest.raises(
        DatasetError, match="episode 0 has an observation that is not finite as float32: leave it out"
    ):
        scan(source_of(path, UNEVEN), UNEVEN)


def test_choices_are_no_actions_of_a_continuous_task(tmp_path):
    one = replace(INFO, action=ActionSpec(kind="continuous", dim=1, low=(-1.0,), high=(1.0,)))
    path = four_steps(tmp_path / "d.pt", [0, 1, 1, 0])
    with pytest.raises(DatasetError, match=r"has action of int64\[\], and Point has float32\[1\]"):
        source_of(path, one, imitation=True)
    assert source_of(four_steps(tmp_path / "e.pt", [0.0, 1.0, 1.0, 0.0]), one).num_steps == 4


def test_an_infinite_action_is_not_taken_for_a_limit(tmp_path):
    path = four_steps(tmp_path / "d.pt", [[0.5, 1.0], [-np.inf, 2.0], [1.0, 4.0], [-1.0, 3.0]])
    with pytest.raises(DatasetError, match="episode 0 has an action that is not finite"):
        scan(source_of(path, UNEVEN), UNEVEN)


def test_a_dataset_of_another_schema_is_refused(dataset):
    for info, text in (
        (replace(INFO, obs_dim=4), r"obs of float32\[3\], and Point has float32\[4\]"),
        (
            replace(INFO, action=ActionSpec(kind="discrete", dim=1, num_choices=3)),
            r"action of float32\[2\], and Point has int64\[\]",
        ),
    ):
        with pytest.raises(DatasetError, match=text):
            source_of(str(dataset), info)


def test_a_choice_that_the_environment_does_not_have_is_refused(tmp_path):
    """Such as of choices that count from 1: all would be another one."""
    steps = {"obs": torch.zeros(4, 3), "reward": torch.ones(4), "terminated": torch.tensor([0, 1, 0, 1])}
    one = replace(INFO, action=ActionSpec(kind="discrete", dim=1, num_choices=3))
    two = replace(INFO, action=ActionSpec(kind="multi_discrete", dim=2, choices=(2, 3)))
    for number, (info, action, text) in enumerate(
        (
            (one, [1, 2, 3, 1], "has the choice 3, and Point has 3 choices, counted from 0"),
            (one, [0, 1, -1, 1], "has the choice -1, and Point has 3"),
            (two, [[1, 2], [0, 0], [2, 0], [1, 1]], "has the choice 2, and Point has 2 x 3"),
        )
    ):
        path = tmp_path / f"{number}.pt"
        torch.save({**steps, "action": torch.tensor(action)}, path)
        with pytest.raises(DatasetError, match=text):
            scan(source_of(str(path), info), info)
    torch.save({**steps, "action": torch.tensor([[1, 2], [0, 0], [1, 0], [1, 1]])}, path)
    assert len(scan(source_of(str(path), two), two).returns) == 2


def test_a_dataset_without_steps_is_refused(tmp_path):
    path = record_point(tmp_path / "empty", num_envs=1, num_steps=1)
    for file in (path / "data").iterdir():
        file.unlink()
    with pytest.raises(DatasetError, match="has no trajectory"):
        build(spec_of(path))


def test_a_dataset_of_one_step_is_learned_from_by_several(tmp_path):
    path = record_point(tmp_path / "one", num_envs=1, num_steps=1)
    whole = build(spec_of(path)).iterate().metrics["policy_loss"]
    for found in run_members(2, lambda c: build(spec_of(path), c).iterate().metrics["policy_loss"]):
        assert found == pytest.approx(whole, rel=1e-4)


def test_rules():
    spec = preset("Ant-v5", "bc")
    assert [error.path for error in broken_rules(spec)] == ["data.path"]
    spec = checked(replace(spec, data=DataSpec(path="data/ant")))
    assert spec.gmi.template == "offline"
    assert run_spec_from_dict(run_spec_to_dict(spec)) == spec
    for changed, path in (
        (replace(spec, total_env_steps=100), "total_env_steps"),
        (replace(spec, network=replace(spec.network, core="gru")), "network.core"),
        (replace(spec, learning=replace(spec.learning, batch_size=0)), "bc.batch_size"),
        (replace(spec, learning=replace(spec.learning, gae_lambda=0.5)), "bc.gae_lambda"),
        (replace(spec, gmi=replace(spec.gmi, template="dp_only")), "gmi.template"),
        (replace(preset("Ant-v5"), data=DataSpec(path="data/ant")), "data.path"),
        (replace(preset("Ant-v5"), data=DataSpec(obs_keys=("a",))), "data.obs_keys"),
    ):
        assert [error.path for error in broken_rules(changed)] == [path]


def test_rllibs_faces():
    for name, given in (("bc", {"loss": "mse"}), ("iql", {"beta": 5.0, "expectile": 0.9, "tau": 0.01})):
        config = CONFIGS[name]().environment("Hopper-v5").offline_data(input_="data/hopper")
        spec = config.training(lr=1e-3, train_batch_size=64, num_updates=10, **given).to_run_spec()
        assert (spec.data.path, spec.gmi.template) == ("data/hopper", "offline")
        assert (spec.learning.batch_size, spec.learning.num_updates, spec.learning.learning_rate) == (
            64,
            10,
            1e-3,
        )
    assert (spec.learning.inverse_temperature, spec.learning.expectile) == (5.0, 0.9)
    with pytest.raises(ConfigError, match=r"training\(lr=\)"):
        CONFIGS["iql"]().environment("Hopper-v5").training(actor_lr=1e-4).to_run_spec()
    with pytest.raises(ConfigError, match=r"training\(num_updates=\)"):
        config.offline_data(dataset_num_iters_per_learner=7).to_run_spec()
    with pytest.raises(ConfigError, match=r"offline_data\(input_=\)"):
        CONFIGS["bc"]().environment("Hopper-v5").to_run_spec()
    with pytest.raises(ConfigError, match="offline algorithm"):
        CONFIGS["ppo"]().environment("Hopper-v5").offline_data(input_="data/hopper").to_run_spec()


def test_rllibs_config_names_parts_and_a_path_that_trials_find_from_their_own_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.pt").touch()
    config = CONFIGS["bc"]().environment("Hopper-v5").offline_data(input_="d.pt", obs_keys=["b", "a"])
    data = config.to_run_spec().data
    assert (data.path, data.obs_keys) == (str(tmp_path / "d.pt"), ("b", "a"))
    assert config.obs_keys == ["b", "a"]
    with pytest.raises(ConfigError, match=r"obs_keys = .*PPOConfig has no such setting"):
        CONFIGS["ppo"]().environment("Hopper-v5").offline_data(obs_keys=["a"]).to_run_spec()


def test_the_plan_has_no_environments():
    plan = plan_of(
        replace(preset("Ant-v5", "bc"), gmi=GmiSpec(template="offline", num_gmis=1)), local_machine()
    )
    assert plan.worker_types == (("replay", "agent", "trainer"),)
    assert plan.envs == (0,)
    assert "environments" not in plan.table()


def iql(path, **learning):
    given = {"batch_size": 32, "num_updates": 20, "learning_rate": 3e-3, **learning}
    return replace(spec_of(path), algorithm="iql", learning=IQLSpec(**given))


def test_iql_losses_by_hand(dataset):
    spec = iql(dataset, expectile=0.8, inverse_temperature=2.0, max_weight=1.5, gamma=0.9)
    program = build(spec)
    model, updater = program.policy.model, program.learner.updater
    with torch.no_grad():
        for each in updater.target.parameters():
            each.mul_(1.1)  # target and critic differ
    batch = program._prepared(program.data.batch(16, 0))
    batch["terminated"] = torch.arange(16) % 4 == 0
    _, metrics = program.learner.losses(batch)
    with torch.no_grad():
        for i in range(16):
            s, a, after = (batch[name][i : i + 1] for name in ("obs", "action", "next_obs"))
            v, q = float(model.values(s)), float(min(updater.target(s, a)))
            u = q - v
            y = float(batch["reward"][i]) + 0.9 * (0.0 if i % 4 == 0 else float(model.values(after)))
            weight = min(np.exp(2.0 * u), 1.5)
            log_prob = float(torch.distributions.Normal(model.outputs(s), 1.0).log_prob(a).sum())
            expected = [
                -weight * log_prob,
                (0.8 if u > 0 else 0.2) * u**2,
                sum((y - float(each)) ** 2 for each in updater.critic(s, a)),
                q,
                weight,
            ]
            assert metrics[i].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_iql_refuses_images_which_its_critics_would_see_as_they_are(dataset):
    reason = "learns from vectors, and .*Bars-v0 shows images; use algorithm 'ppo', or 'bc' with a dataset"
    with pytest.raises(ConfigError, match=reason):
        refuse_unfit_env(iql(dataset), env_info("tests.fakes.echo:Bars-v0"))
    refuse_unfit_env(iql(dataset), INFO)


def test_iql_steps_each_network_along_its_own_loss(dataset):
    """The policy's gradient is that of L_pi alone, the value network's of L_V, the critics' of L_Q; targets follow."""
    program = build(iql(dataset, tau=0.25))
    updater = program.learner.updater
    batch = program._prepared(program.data.batch(32, 0))
    before = [each.clone() for each in updater.target.parameters()]
    program.learner.step(batch)
    for target, old, source in zip(
        updater.target.parameters(), before, updater.critic.parameters(), strict=True
    ):
        torch.testing.assert_close(target, 0.75 * old + 0.25 * source)
        assert not torch.equal(source, old)
    assert not any(name.startswith("target") for name in updater.state_dict()["model"])


def assert_two_gmis_learn_as_one(spec, names):
    def curve(communicator):
        program = build(spec, communicator)
        return [program.iterate().metrics for _ in range(2)], parameters(program)

    whole, weights = curve(SoloCommunicator())
    for found, theirs in run_members(2, curve):
        for name in names:
            assert [row[name] for row in found] == pytest.approx([row[name] for row in whole], rel=1e-3)
        torch.testing.assert_close(theirs, weights, rtol=1e-2, atol=1e-4)


def test_several_gmis_learn_iql_as_one(dataset):
    names = ("policy_loss", "value_loss", "q_loss", "target_q", "grad_norm")
    assert_two_gmis_learn_as_one(iql(dataset), names)


def recorded_both_ways(folder):
    """Half of the actions push outwards."""

    def mixed(obs):
        side = torch.where(torch.rand(len(obs), 1, generator=noise) < 0.5, 1.0, -1.0)
        return side * teacher(obs)

    noise = torch.Generator().manual_seed(1)
    return record_point(folder / "mixed", num_envs=16, num_steps=60, policy=mixed)


def test_iql_is_better_than_what_it_was_shown(tmp_path):
    """Half of the recorded actions push outwards. Cloning averages them; IQL prefers those that push inwards."""
    path = recorded_both_ways(tmp_path)
    settings = {"num_updates": 300, "batch_size": 64, "learning_rate": 3e-3, "gamma": 0.9}
    found = {}
    for spec in (
        iql(path, **settings, inverse_temperature=10.0, tau=0.05, expectile=0.8),
        spec_of(path, **settings),
    ):
        program = build(spec)
        for _ in range(3):
            program.iterate()
        obs = torch.tensor([[0.5, 0.0, 0.3], [0.0, -0.5, 0.3]])
        with torch.no_grad():
            found[spec.algorithm] = program.policy.outputs(program.policy.observe(obs)).diagonal()
    inwards = torch.tensor([-1.0, 1.0])
    assert (found["iql"] * inwards).min() > 0.5
    assert (found["bc"] * inwards).max() < 0.5


def test_tensors_in_double_precision_are_learned_from(dataset, tmp_path):
    episodes = list(open_dataset(dataset).episodes(whole_only=True))
    last = [np.arange(len(each.rewards)) == len(each.rewards) - 1 for each in episodes]
    columns = {
        "observations": [each.obs[:-1].astype(np.float64) for each in episodes],
        "next_observations": [each.obs[1:].astype(np.float64) for each in episodes],
        "actions": [each.actions.astype(np.float64) for each in episodes],
        "rewards": [each.rewards for each in episodes],
        "terminals": [ends & each.terminated for each, ends in zip(episodes, last, strict=True)],
        "timeouts": [ends & each.truncated for each, ends in zip(episodes, last, strict=True)],
    }
    torch.save(
        {name: torch.from_numpy(np.concatenate(parts)) for name, parts in columns.items()}, tmp_path / "p.pt"
    )
    program = build(iql(tmp_path / "p.pt"))
    returns = [float(each.rewards.sum(dtype=np.float64)) for each in episodes]
    assert program.statistics.returns == pytest.approx(returns)
    assert np.isfinite(program.iterate().metrics["q_loss"])


@pytest.mark.parametrize("algorithm", ["bc", "iql"])
def test_choices_are_learned_too(tmp_path, algorithm):
    """CartPole, pushed to where the pole leans: all of it is in two observations."""

    def pushed(obs):
        return (obs[:, 2] + 0.3 * obs[:, 3] > 0).long()

    make_env = make_env_factory("CartPole-v1", engine="gymnasium")
    path = record_point(tmp_path / "cart", num_envs=4, num_steps=60, policy=pushed, make_env=make_env)
    settings = {"num_updates": 150, "learning_rate": 1e-2}
    program = build(
        spec_of(path, **settings) if algorithm == "bc" else iql(path, **settings), make_env=make_env
    )
    for _ in range(2):
        metrics = program.iterate().metrics
    assert np.isfinite(list(metrics.values())).all()
    obs = torch.tensor([[0.0, 0.0, 0.1, 0.2], [0.0, 0.0, -0.1, -0.2]])
    with torch.no_grad():
        found = program.policy.mode(program.policy.outputs(program.policy.observe(obs)))
    assert found.tolist() == [1, 0]
    if algorithm == "bc":
        assert metrics["action_error"] < 0.1  # share of other choices
        with pytest.raises(ConfigError, match="is for a box of actions, and this task has choices"):
            build(spec_of(path, loss="mse"), make_env=make_env)


def td3_bc(path, **learning):
    given = {"batch_size": 32, "num_updates": 20, "learning_rate": 3e-3, **learning}
    return replace(
        spec_of(path),
        algorithm="td3_bc",
        learning=TD3BCSpec(**given),
        network=NetworkSpec(hidden=(16,), activation="relu", head="auto"),
    )


def q_of(critics, obs, actions):
    """Each critic's values, by autograd."""
    hidden = torch.cat((obs, actions), -1)
    for layer, (weight, bias) in enumerate(zip(critics.weights, critics.biases, strict=True)):
        hidden = hidden @ weight + bias
        hidden = hidden if layer == len(critics.weights) - 1 else hidden.relu()
    return hidden.squeeze(-1)


def test_td3_bc_by_hand(dataset):
    spec = td3_bc(dataset, gamma=0.9, target_noise=0.0, alpha=2.0, policy_delay=1)
    program = build(spec)
    learner, model = program.learner, program.policy.model
    batch = program._prepared(program.data.batch(32, 0))
    batch["terminated"] = torch.arange(32) % 4 == 0
    targets = learner.updater.targets
    with torch.no_grad():
        after = targets["policy"].module(batch["next_obs"]).tanh()
        q = targets["critics"].module(batch["next_obs"], after).squeeze(-1).amin(0)
        y = batch["reward"] + 0.9 * torch.where(batch["terminated"], 0.0, q)
    torch.testing.assert_close(learner._targets(batch), y)
    critics = [copy.deepcopy(model.critics) for _ in range(2)]
    expected = sum((each - y).square().mean() for each in q_of(critics[0], batch["obs"], batch["action"]))
    expected.backward()
    value_loss, _ = learner._step_critics(batch)
    torch.testing.assert_close(value_loss, expected.detach())
    for found, theirs in zip(model.critics.parameters(), critics[0].parameters(), strict=True):
        torch.testing.assert_close(found.grad, theirs.grad)
    policy = copy.deepcopy(model.policy)
    actions = policy(batch["obs"]).tanh()
    q = q_of(model.critics, batch["obs"], actions)[0]
    ((actions - batch["action"]).square().mean() - 2.0 / q.abs().mean().detach() * q.mean()).backward()
    before = model.policy[0].weight.clone()
    loss, cloning, q_mean = learner._step_policy(batch)
    for found, theirs in zip(model.policy.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(found.grad, theirs.grad)
    # lambda |Q| averages to alpha: -lambda mean Q is alpha times the mean of Q over that of |Q|.
    assert abs(float(loss - cloning)) <= 2.0 + 1e-5
    assert float(loss - cloning) * float(q_mean) <= 0
    assert not torch.equal(model.policy[0].weight, before)


def test_several_gmis_learn_td3_bc_as_one(dataset):
    assert_two_gmis_learn_as_one(
        td3_bc(dataset), ("policy_loss", "value_loss", "cloning_loss", "q_of_policy")
    )


def test_waiting_for_another_trainer_is_not_a_trainers_own_work(dataset, watched):
    def names(communicator):
        program, found = build(td3_bc(dataset), communicator), []
        watched(communicator, found)
        program.iterate()
        return found

    for found in run_members(2, names):
        assert set(found) == {"reduce"}


def test_td3_bc_is_better_than_what_it_was_shown(tmp_path):
    """As of IQL: half of the recorded actions push outwards."""
    path = recorded_both_ways(tmp_path)
    program = build(td3_bc(path, num_updates=300, batch_size=64, gamma=0.9, alpha=10.0, tau=0.05))
    for _ in range(3):
        program.iterate()
    obs = torch.tensor([[0.5, 0.0, 0.3], [0.0, -0.5, 0.3]])
    with torch.no_grad():
        policy = program.policy
        found = policy.environment_actions(policy.mode(policy.outputs(policy.observe(obs)))).diagonal()
    assert (found * torch.tensor([-1.0, 1.0])).min() > 0.5


@pytest.mark.parametrize(
    ("make", "loss"), [(spec_of, "policy_loss"), (iql, "q_loss"), (td3_bc, "value_loss")]
)
def test_a_resumed_run_draws_and_learns_as_the_uninterrupted_one(dataset, make, loss):
    spec = make(dataset, num_updates=7)
    program = build(spec)
    program.iterate()
    buffer = io.BytesIO()
    torch.save(program.state_dict(), buffer)
    wanted = [program.iterate().metrics[loss] for _ in range(2)]
    resumed = build(spec)
    resumed.load_state_dict(torch.load(io.BytesIO(buffer.getvalue()), weights_only=False))
    assert [resumed.iterate().metrics[loss] for _ in range(2)] == wanted
    assert torch.equal(parameters(resumed), parameters(program))
    load_policy(program.state_dict()["shared"], spec, INFO)


def test_iql_s_value_gradient_is_that_of_the_expectile_loss_alone(dataset):
    learner = (program := build(iql(dataset, expectile=0.7))).learner
    batch = program._prepared(program.data.batch(32, 0))
    model = program.policy.model
    value = [each for name, each in model.named_parameters() if name.startswith("value.")]
    found = torch.autograd.grad(learner.losses(batch)[0].sum(), value)
    # L(u) = |tau - (u < 0)| u^2 with u = min Q'(s, a) - V(s); the policy's weights exp(beta u) are constants.
    shown = model.head.environment_actions(batch["action"])
    u = learner.updater.target(batch["obs"], shown).amin(0) - model.values(batch["obs"])
    expected = torch.autograd.grad((torch.where(u < 0, 0.3, 0.7) * u.square()).sum(), value)
    torch.testing.assert_close(found, expected)


def target_actions(learner, batch):
    """What TD3+BC's target critics are asked about."""
    seen, critic = [], learner.updater.target_critics.module

    class Recorded(torch.nn.Module):
        def forward(self, obs, actions):
            seen.append(actions)
            return critic(obs, actions)

    learner.updater.target_critics.module = Recorded()
    learner._targets(batch)
    return seen[0]


def test_td3_bc_s_target_noise_is_clipped(dataset):
    learner = (program := build(td3_bc(dataset, target_noise=0.5, target_noise_clip=0.2))).learner
    batch = program._prepared(program.data.batch(32, 0))
    with torch.no_grad():
        modes = learner.updater.target_policy.module(batch["next_obs"]).tanh()
    noise = 0.5 * learner._noise(batch)
    assert noise.abs().max() > 0.3
    torch.testing.assert_close(target_actions(learner, batch), (modes + noise.clamp(-0.2, 0.2)).clamp(-1, 1))


def test_td3_bc_s_target_actions_stay_within_the_bounds(dataset):
    learner = (program := build(td3_bc(dataset, target_noise=0.5))).learner
    with torch.no_grad():
        learner.updater.target_policy.flat.parameters.mul_(1000.0)
    batch = program._prepared(program.data.batch(32, 0))
    assert float(target_actions(learner, batch).abs().max()) == 1.0


def test_td3_bc_steps_policy_and_targets_with_every_third_step(dataset):
    learner = (program := build(td3_bc(dataset, policy_delay=3))).learner
    followed, moved = (learner.updater.policy, learner.updater.target_critics), []
    for draw in range(6):
        before = [each.flat.parameters.clone() for each in followed]
        learner.step(program._prepared(program.data.batch(32, draw)))
        pairs = zip(before, followed, strict=True)
        moved.append(tuple(not torch.equal(old, each.flat.parameters) for old, each in pairs))
    assert moved == [(False, False), (False, False), (True, True)] * 2


def test_cloning_needs_no_rewards(tmp_path):
    """As recordings of a robot's operator have none."""
    steps = torch.rand((6, 3), generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([0, 0, 0, 1, 1, 1])
    torch.save({"obs": steps, "action": teacher(steps), "trajectory_number": numbers}, tmp_path / "d.pt")
    program = build(spec_of(tmp_path / "d.pt", normalize_rewards=True))
    assert np.isfinite(program.iterate().metrics["policy_loss"])
    # Without the observation after them, the last steps are left out.
    assert program.source.lengths.tolist() == [2, 2]
    assert set(program.data.batch(8, 0)) == {"obs", "action", "step", "position"}
    with pytest.raises(DatasetError, match="has no column reward: it has obs, action, terminated, truncated"):
        build(iql(tmp_path / "d.pt"))


def test_parts_of_an_observation_are_joined_as_the_environment_joins_them(tmp_path):
    """As of Minari's mazes and hands: Gymnasium sorts the keys."""
    info = replace(INFO, obs_members=(("goal", 1), ("state", 2)))
    state, goal = torch.arange(8.0).reshape(4, 2), torch.tensor([10.0, 20.0, 30.0, 40.0])
    steps = {"obs.state": state, "obs.goal": goal, "action": torch.zeros(4, 2), "reward": torch.ones(4)}
    torch.save({**steps, "terminated": torch.tensor([0, 0, 0, 1])}, tmp_path / "d.pt")
    (batch,) = source_of(str(tmp_path / "d.pt"), info).batches()
    assert batch.columns["obs"].tolist() == [[10, 0, 1], [20, 2, 3], [30, 4, 5], [40, 6, 7], [40, 6, 7]]
    with pytest.raises(DatasetError, match=r"has obs of float32\[3\], and Point has float32\[4\]"):
        source_of(str(tmp_path / "d.pt"), replace(info, obs_dim=4))
    with pytest.raises(
        DatasetError, match=r"parts state\[2\], goal\[1\]: say which of them are Point.s, in order"
    ):
        source_of(str(tmp_path / "d.pt"), INFO)


def test_the_keys_say_which_parts_make_up_an_observation_and_in_which_order(tmp_path):
    """As of robomimic, whose environments have a vector of the keys that a configuration names."""
    robot, thing = torch.arange(8.0).reshape(4, 2), torch.tensor([10.0, 20.0, 30.0, 40.0])
    steps = {"obs.robot": robot, "obs.thing": thing, "obs.image": torch.zeros(4, 8, 8, 3, dtype=torch.uint8)}
    steps |= {"action": torch.zeros(4, 2), "reward": torch.ones(4), "terminated": torch.tensor([0, 0, 0, 1])}
    path = str(tmp_path / "d.pt")
    torch.save(steps, path)
    for keys, first in ((("thing", "robot"), [10, 0, 1]), (("robot", "thing"), [0, 1, 10])):
        source = source_of(path, INFO, obs_keys=keys)
        assert next(source.read())["obs"][0].tolist() == first
    with pytest.raises(
        DatasetError,
        match=r"parts robot\[2\], thing\[1\], image\[192\]: say which of them are Point's, in order, with --obs-keys A,B",
    ):
        source_of(path, INFO)
    with pytest.raises(DatasetError, match=r"has obs of float32\[2\], and Point has float32\[3\]"):
        source_of(path, INFO, obs_keys=("robot",))
    with pytest.raises(DatasetError, match=r"has no column 'obs\.camera'"):
        source_of(path, INFO, obs_keys=("robot", "camera"))
    # A dictionary's parts may have other names in the dataset, and have to be in the environment's order.
    members = replace(INFO, obs_members=(("goal", 1), ("state", 2)))
    assert next(source_of(path, members, obs_keys=("thing", "robot")).read())["obs"][0].tolist() == [10, 0, 1]
    with pytest.raises(
        DatasetError, match=r"robot\[2\], thing\[1\] of obs_keys where Point has goal\[1\], state\[2\]"
    ):
        source_of(path, members, obs_keys=("robot", "thing"))
    with pytest.raises(DatasetError, match="say which of them are Point's, for its goal, state, with"):
        source_of(path, members)


def test_a_single_part_is_the_observation(tmp_path):
    steps = {"obs.policy": torch.ones(2, 3), "action": torch.zeros(2, 2), "reward": torch.ones(2)}
    torch.save({**steps, "terminated": torch.tensor([0, 1])}, tmp_path / "d.pt")
    (batch,) = source_of(str(tmp_path / "d.pt"), INFO).batches()
    assert batch.columns["obs"].shape == (3, 3)


def test_parts_that_are_not_needed_are_not_read(tmp_path, monkeypatch):
    """Such as a camera's images beside what the environment observes."""
    steps = {"obs.thing": torch.ones(2, 3), "obs.image": torch.zeros(2, 64), "action": torch.zeros(2, 2)}
    torch.save({**steps, "reward": torch.ones(2), "terminated": torch.tensor([0, 1])}, tmp_path / "d.pt")
    path = str(tmp_path / "d.pt")
    opened = []

    def opening(*given, **more):
        opened.append(open_source(*given, **more))
        return opened[-1]

    monkeypatch.setattr("rayagi.algorithms.offline_data.open_source", opening)
    source_of(path, INFO, obs_keys=("thing",))
    source_of(path, replace(INFO, obs_members=(("thing", 3),)))
    for source in (opened[0], opened[-1]):
        assert "obs.image" not in [column.name for column in source.schema.columns]


def test_runs_learn_from_the_parts_that_are_named(tmp_path):
    def parts(path):
        obs = np.concatenate([each["obs"][:-1] for each in open_source(path).read()])
        after = np.concatenate([each["obs"][1:] for each in open_source(path).read()])
        flat = {
            name: torch.from_numpy(np.concatenate([each[name] for each in open_source(path).read()]))
            for name in ("action", "reward", "terminated", "truncated")
        }
        split = {}
        for prefix, values in (("", obs), ("next_", after)):
            split |= {
                f"{prefix}obs.{key}": torch.from_numpy(values[:, part].copy())
                for key, part in (("rest", slice(1, 3)), ("first", slice(0, 1)))
            }
        torch.save({**split, **flat}, tmp_path / "parts.pt")
        return tmp_path / "parts.pt"

    whole = record_point(tmp_path / "d")
    for make in (spec_of, iql):
        apart = make(parts(whole))
        with pytest.raises(DatasetError, match="say which of them are Point's"):
            build(apart)
        named = replace(apart, data=replace(apart.data, obs_keys=("first", "rest")))
        expected, found = (build(spec).iterate().metrics["policy_loss"] for spec in (make(whole), named))
        assert found == expected


def test_single_actions_with_and_without_an_axis(tmp_path):
    steps = {"obs": torch.zeros(2, 3), "reward": torch.ones(2), "terminated": torch.tensor([0, 1])}
    choice = replace(INFO, action=ActionSpec(kind="discrete", dim=1, num_choices=3))
    force = replace(INFO, action=ActionSpec(kind="continuous", dim=1, low=(-1.0,), high=(1.0,)))
    for number, (info, action, wanted) in enumerate(
        (
            (choice, torch.tensor([[2], [0]]), [2, 0]),
            (choice, torch.tensor([2, 0], dtype=torch.int8), [2, 0]),
            (force, torch.tensor([0.5, -1.0]), [[0.5], [-1.0]]),
            (force, torch.tensor([[0.5], [-1.0]]), [[0.5], [-1.0]]),
        )
    ):
        path = str(tmp_path / f"{number}.pt")
        torch.save({**steps, "action": action}, path)
        (batch,) = source_of(path, info).batches()
        assert batch.columns["action"].tolist() == wanted
        assert notes_of(path, info) == ()
