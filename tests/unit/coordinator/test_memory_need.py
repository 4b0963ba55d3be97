"""Plans with too small memory shares are rejected: arithmetic on recorded machines."""

import os
from dataclasses import fields, replace

import pytest
import torch

from actors.protocols import ActionSpec, EnvInfo
from actors.replay import ReplayStore
from placement.errors import PlanError
from placement.inventory import load_machine
from placement.search import TrialMeasurement
from rayagi.algorithms.program import new_rollout
from rayagi.algorithms.transitions import TransitionLayout
from rayagi.cli import main
from rayagi.config.presets import preset
from rayagi.config.spec import DataSpec, NetworkSpec
from rayagi.coordinator.memory_need import (
    network_bytes,
    reject_insufficient_memory,
    replay_bytes,
    rollout_memory,
)
from rayagi.coordinator.search_store import SearchStore
from rayagi.envs import env_info
from rayagi.models.networks import make_model
from rayagi.models.policy import new_policy
from rayagi.planning import plan_of

GIB = 2**30
ANT = preset("Ant-v5")
A100, CORES = "tests/data/machines/a100_40x1.json", "tests/data/machines/cpu2.json"


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch, tmp_path):
    """Searches are cached in the test's own folder."""
    monkeypatch.setattr("rayagi.coordinator.search_store.default_folder", lambda: tmp_path)


def planned(machine, **gmi):
    spec = replace(ANT, gmi=replace(ANT.gmi, **gmi))
    return spec, plan_of(spec, load_machine(machine))


@pytest.mark.parametrize(
    "action",
    [
        ActionSpec(kind="continuous", dim=3, low=(-1.0,) * 3, high=(1.0,) * 3),
        ActionSpec(kind="discrete", dim=1, num_choices=4),
    ],
)
@pytest.mark.parametrize("network", [{}, {"core": "lstm"}, {"core": "gru", "core_size": 6, "shared": True}])
def test_rollouts_need_what_their_storage_holds(action, network):
    info = EnvInfo(env_id="a task", engine="auto", obs_dim=5, action=action, max_episode_steps=None)
    learning = replace(ANT.learning, rollout_length=16, sequence_length=4)
    spec = replace(ANT, learning=learning, network=replace(ANT.network, **network))
    storage = new_rollout(spec, new_policy(spec, info, torch.device("cpu")), 7, torch.device("cpu"))
    held = [getattr(storage, field.name) for field in fields(storage)]
    on_host = sum(one.nbytes for one in held if isinstance(one, torch.Tensor))
    assert rollout_memory(spec, info, on_gpu=False).bytes_at(7) == on_host
    read = (storage.obs, storage.outputs, storage.actions, storage.states)
    on_gpu = sum(one.nbytes for one in read if one is not None)
    assert rollout_memory(spec, info, on_gpu=True).bytes_at(7) == on_gpu


def test_a_tenth_of_a_gpu_is_refused_where_the_rollouts_alone_exceed_it(tmp_path):
    spec, plan = planned(
        A100, num_gmis=None, gmis_per_gpu=10, num_envs=200_000, backend="mps", threads_per_gmi=1
    )
    # 4 x (105 + 8 + 8) bytes a step of Ant's 64: 200,000 environments need 5.77 GiB of the 4 GiB that the daemon grants.
    assert spec.learning.rollout_length == 64
    with pytest.raises(PlanError) as caught:
        reject_insufficient_memory(spec, plan)
    assert caught.value.what.startswith("200,000 environments in GMI 0 mps[")
    assert caught.value.problem == (
        "they need 5.77 GiB (its rollouts of 64 steps alone hold that), and its share has 4.00 GiB"
    )
    assert caught.value.hint == "Set num_envs to 138654 or less, or use fewer GMIs"
    reject_insufficient_memory(*planned(A100, num_gmis=1, num_envs=200_000))


def test_a_replay_that_its_host_cannot_hold_is_refused(tmp_path):
    spec = preset("Ant-v5", "sac")
    info = env_info("Ant-v5")
    store = ReplayStore.create(TransitionLayout.of(info, spec.learning).schema, 125)
    held = sum(os.fstat(descriptor).st_size for descriptor in store._descriptors)
    store.close()
    # 8 transitions a row: 9 x 105 observations, 8 actions, reward and discount of each, and a status of 64 bytes; trees and
    # pages are left out.
    need = replay_bytes(replace(spec.learning, capacity=1000), info, None)
    assert need == 125 * (4 * (9 * 105 + 8 * (8 + 2)) + 64)
    assert need <= held < 1.05 * need
    spec = replace(spec, learning=replace(spec.learning, capacity=10**9), gmi=replace(spec.gmi, num_gmis=2))
    plan = plan_of(spec, load_machine(CORES))
    with pytest.raises(
        PlanError, match=r"the replay of 1,000,000,000 transitions on .*: it needs 484\.75 GiB.*sac\.capacity"
    ):
        reject_insufficient_memory(spec, plan)
    reject_insufficient_memory(replace(spec, total_env_steps=10**6), plan)


def test_a_replay_that_begins_with_a_dataset_needs_space_for_whole_observations():
    base = preset("tests.fakes.echo:Stacked-v0", "dqn")
    spec = replace(
        base,
        env=replace(base.env, kwargs={"kind": "gray"}),
        learning=replace(base.learning, capacity=10**9),
        gmi=replace(base.gmi, num_gmis=1),
    )
    plan, needed = plan_of(spec, load_machine(CORES)), []
    for path in (None, "recorded"):
        with pytest.raises(PlanError, match=r"the replay of 1,000,000,000 transitions") as caught:
            reject_insufficient_memory(replace(spec, data=DataSpec(path=path)), plan)
        needed.append(float(caught.value.problem.split()[2]))
    # Rows of 16 transitions of returns over 5 steps: 24 frames, or 21 stacks of 4.
    assert needed[1] / needed[0] == pytest.approx(21 * 4 / 24, rel=0.02)


def kept(spec, machine, folder, gmis, **memory):
    store = SearchStore(spec, load_machine(machine), folder)
    for envs, held in memory.items():
        store.save_outcome(
            gmis, int(envs[1:]), TrialMeasurement(steps_per_s=1.0, memory_bytes=int(held * GIB))
        )


def test_what_a_search_measured_is_projected_by_eq_4(tmp_path):
    spec, plan = planned(A100, num_gmis=None, gmis_per_gpu=4, num_envs=8192, backend="mps", threads_per_gmi=1)
    kept(spec, A100, tmp_path, 4, _1024=2, _2048=3, _4096=5)
    kept(spec, A100, tmp_path, 2, _4096=30)  # of other GMIs
    # On the line through 3 and 5 GiB, 8192 need 9 of the 10 that a quarter has.
    reject_insufficient_memory(spec, plan)
    spec, plan = planned(
        A100, num_gmis=None, gmis_per_gpu=4, num_envs=16384, backend="mps", threads_per_gmi=1
    )
    with pytest.raises(PlanError) as caught:
        reject_insufficient_memory(spec, plan)
    assert "need 17.00 GiB (by eq. 4, from a search's measurements with 2048 and 4096" in caught.value.problem
    assert "its share has 10.00 GiB" in caught.value.problem
    assert caught.value.hint == "Set num_envs to 9216 or less, or use fewer GMIs"  # (10 - 1) / 1 x 1024


def test_a_hosts_memory_is_divided_by_environments(tmp_path):
    spec, plan = planned(CORES, num_gmis=2, num_envs=128)
    (node,) = plan.machine.nodes
    half = node.memory_total_bytes / 2 / GIB
    kept(spec, CORES, tmp_path, 2, _16=0.25 * half, _32=0.5 * half)
    with pytest.raises(PlanError, match=r"128 environments in GMI 0 cpu\[0\]: .*Set num_envs to 64 or less"):
        reject_insufficient_memory(spec, plan)  # two halves, three quarters of it for sure


def test_one_environment_that_does_not_fit_asks_for_a_larger_share(tmp_path):
    spec, plan = planned(CORES, num_gmis=2, num_envs=64)
    kept(spec, CORES, tmp_path, 2, _16=500, _32=501)
    with pytest.raises(PlanError, match="Not even one fits: use fewer GMIs"):
        reject_insufficient_memory(spec, plan)


@pytest.mark.parametrize("changes", [{}, {"core": "lstm"}, {"core": "gru", "shared": True}])
def test_the_networks_need_at_least_the_weights_between_their_layers(changes):
    action = ActionSpec(kind="continuous", dim=2, low=(-1.0,) * 2, high=(1.0,) * 2)
    info = EnvInfo(env_id="a task", engine="auto", obs_dim=5, action=action, max_episode_steps=None)
    network = NetworkSpec(hidden=(32, 16), core_size=8, **changes)
    held = sum(each.nbytes for each in make_model(info, network).parameters() if each.ndim == 2)
    # The last layers, from 16 or the core's 8 to two actions and a value, are not counted.
    last = 4 * 3 * (16 if not changes else 8)
    assert network_bytes(network, info, trains=False) == held - last
    assert network_bytes(network, info, trains=True) == 2 * (held - last)


@pytest.mark.parametrize("machine", [A100, CORES])
def test_networks_larger_than_the_memory_are_refused(machine, capsys):
    options = ["--machine", machine, "--gmis", "1", "--set", "network.hidden=[1000000,1000000]"]
    assert main(["plan", "Ant-v5", *options]) == 2
    stderr = capsys.readouterr().err
    # (105 x 10^6 + 10^6 x 10^6) weights of 4 bytes and their gradients, of two networks
    assert "parameters and gradients alone need 14902.73 GiB" in stderr
    assert "Give network.hidden and network.core_size smaller sizes" in stderr
    assert "Traceback" not in stderr


def test_the_command_refuses_it_before_anything_starts(capsys):
    options = ["--machine", A100, "--num-envs", "200000", "--backend", "mps", "--set", "gmi.gmis_per_gpu=10"]
    assert main(["plan", "Ant-v5", *options, "--set", "gmi.threads_per_gmi=1"]) == 2
    stderr = capsys.readouterr().err
    assert "its share has 4.00 GiB" in stderr
    assert "Traceback" not in stderr
