"""Images of bytes stay bytes in rollouts, channels and replays: what is learned is what pixels of float32 teach."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from rayagi.algorithms.appo import AppoSpec
from rayagi.algorithms.dqn import DQNSpec
from rayagi.algorithms.offline_data import RecordedTransitions
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.program import new_rollout
from rayagi.algorithms.trajectories import channel_plan
from rayagi.algorithms.transitions import TransitionLayout
from rayagi.config.spec import EvaluationSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.coordinator.memory_need import replay_bytes, rollout_memory
from rayagi.envs import env_info, make_env_factory
from rayagi.models.policy import new_policy
from rayagi.serving.errors import DatasetError
from tests.unit.algorithms.test_collector_learner import after, run_gmis
from tests.unit.algorithms.test_program import build

BARS = "tests.fakes.echo:Bars-v0"
PPO = RunSpec(
    gmi=GmiSpec(num_envs=4, collective_timeout_s=60.0),
    network=NetworkSpec(hidden=(16,)),
    learning=PPOSpec(rollout_length=20, num_minibatches=2, num_epochs=2, learning_rate=1e-3),
    evaluation=EvaluationSpec(),
    seed=3,
)
DQN = replace(
    PPO,
    algorithm="dqn",
    learning=DQNSpec(
        rollout_length=4, capacity=64, learning_starts=16, batch_size=8, updates_per_step=0.25, n_step=3
    ),
)
APPO = replace(
    PPO, algorithm="appo", learning=AppoSpec(rollout_length=20, num_minibatches=2, num_epochs=2, max_lag=0)
)
pytestmark = pytest.mark.usefixtures("one_torch_thread")


def bars(dtype, kind="last"):
    return make_env_factory(BARS, kwargs={"kind": kind, "dtype": dtype})


def model_of(shared):
    return shared["learner"]["model"]


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():  # a step is 1e-3; sums of floats depend on where their memory begins
        torch.testing.assert_close(value, other[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["last", "first"])
@pytest.mark.parametrize(
    "spec",
    [PPO, replace(PPO, network=replace(PPO.network, core="gru", core_size=4)), DQN],
    ids=["ppo", "gru", "dqn"],
)
def test_one_gmi_learns_from_bytes_what_it_learns_from_reals(spec, kind):
    programs = [build(spec, make_env=bars(dtype, kind)) for dtype in ("uint8", "float32")]
    (_, learned), (_, expected) = (after(3)(program) for program in programs)
    assert_same(model_of(learned), model_of(expected))
    begun = new_policy(spec, env_info(BARS, kwargs={"kind": kind}), torch.device("cpu")).model.state_dict()
    assert any(not torch.equal(value, begun[name]) for name, value in model_of(learned).items())


@pytest.mark.parametrize(
    ("spec", "template"), [(PPO, "e_at"), (PPO, "ea_t"), (APPO, "decoupled"), (DQN, "decoupled")],
    ids=["steps", "rollouts", "appo", "dqn"],
)  # fmt: skip
def test_bytes_travel_between_gmis_as_reals_do(spec, template):
    spec = replace(spec, gmi=replace(spec.gmi, template=template))
    learned, expected = (
        run_gmis(spec, 1, 1, after(3), make_env=bars(dtype))[-1][1] for dtype in ("uint8", "float32")
    )
    assert_same(model_of(learned), model_of(expected))


def test_a_pixel_takes_one_byte_in_rollouts_channels_and_replays():
    info = env_info(BARS)
    assert (info.obs_dtype, info.obs_bytes) == (np.uint8, 36 * 36 * 3)
    policy = new_policy(PPO, info, torch.device("cpu"))
    rollout = new_rollout(PPO, policy, 4, torch.device("cpu"))
    held = (getattr(rollout, field.name) for field in fields(rollout))
    storage = sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
    assert rollout_memory(PPO, info, on_gpu=False).bytes_at(4) == storage
    # Two copies of 20 steps of 4 environments, the last observations; 4 logits, a choice, a reward and two flags a step.
    assert storage == (2 * 20 + 1) * 4 * info.obs_bytes + 20 * 4 * (4 * 4 + 8 + 4 + 2)
    trajectories, finals = channel_plan(info, PPO.learning).groups
    types = {field.name: field.dtype for schema in (trajectories, finals) for field in schema.fields}
    assert {types[name] for name in ("raw_obs", "last_obs", "obs")} == {torch.uint8}
    # A row has 4 transitions of returns over 3 steps: 7 observations.
    schema = TransitionLayout.of(info, DQN.learning).schema
    assert schema.row_bytes < 7 * info.obs_bytes + 4 * (2 * 4 + 8) + 16
    assert replay_bytes(DQN.learning, info, None) == 16 * (7 * info.obs_bytes + 4 * (2 * 4 + 8) + 64)


def test_an_image_beside_a_vector_is_of_reals():
    assert env_info(BARS, kwargs={"kind": "dict"}).obs_dtype == np.float32
    (rollout,) = (build(PPO, make_env=make_env_factory(BARS, kwargs={"kind": "dict"})).rollout,)
    assert rollout.raw_obs.dtype == torch.float32


def test_recorded_pixels_enter_a_replay_as_bytes_and_others_are_refused(tmp_path):
    info = env_info(BARS)
    head = new_policy(DQN, info, torch.device("cpu")).model.head
    steps = {"action": torch.tensor([0, 3]), "reward": torch.ones(2), "terminated": torch.tensor([0, 1])}
    path = str(tmp_path / "d.pt")
    torch.save({**steps, "obs": torch.full((2, info.obs_dim), 255.0)}, path)
    layout = TransitionLayout(info, 2, 1)
    (rows,) = RecordedTransitions(path, info).rows(head, layout, 0.9, 1, part=0, parts=1)
    assert rows.columns["obs"].dtype == torch.uint8
    assert rows.columns["obs"].unique().tolist() == [255]
    for pixel in (0.5, 256.0, -1.0):
        torch.save({**steps, "obs": torch.full((2, info.obs_dim), pixel)}, path)
        with pytest.raises(DatasetError, match=r"d\.pt.*pixels other than whole numbers from 0 to 255"):
            list(RecordedTransitions(path, info).rows(head, layout, 0.9, 1, part=0, parts=1))


def other_length(spec):
    return replace(spec, learning=replace(spec.learning, rollout_length=8))


@pytest.mark.parametrize(
    ("dtype", "changed"), [("float32", lambda spec: spec), ("uint8", other_length)], ids=["pixels", "rows"]
)
def test_a_saved_replay_of_other_rows_begins_anew_and_the_run_says_so(tmp_path, dtype, changed):
    former, now = build(changed(DQN), make_env=bars(dtype)), build(DQN, make_env=bars("uint8"))
    after(4)(former)
    assert former.learner.filled > 0
    assert former.save_replay(tmp_path / "replay")
    saved = former.state_dict()
    now.load_state_dict({**saved, "replay": tmp_path / "replay"})
    assert (len(now.learner.replay), now.learner.filled) == (0, 0)
    assert_same(model_of(now.state_dict()["shared"]), model_of(saved["shared"]))
    first, second = (now.iterate() for _ in range(2))
    assert first.notes == ("The saved replay has rows of another form: it begins anew",)
    assert second.notes == ()
    assert now.save_replay(tmp_path / "again")
    again = build(DQN, make_env=bars("uint8"))
    again.load_state_dict({**now.state_dict(), "replay": tmp_path / "again"})
    assert len(again.learner.replay) == len(now.learner.replay) > 0
