"""`rayagi train` whose Ray is killed: a node of two, simulated as two raylets on this host, or a local one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from actors.partitioners import Partitioners
from actors.rendezvous import start_rendezvous_actor
from actors.replay import Column, ReplaySchema, ShardLostError
from actors.replay_actor import create_shards
from rayagi.run.checkpoints import CheckpointStore
from rayagi.run.folder import open_run
from tests.cluster.two_nodes import two_nodes
from tests.programs import run_python
from tests.waiting import until

pytestmark = pytest.mark.cluster

LIMIT_S = 180.0
SMALL = ["--gmis", "2", "--num-envs", "8", "--set", "ppo.rollout_length=16", "--set", "ppo.num_minibatches=2"]


@pytest.fixture
def cluster():
    """Two nodes of one CPU each; the test kills the second."""
    with two_nodes() as (cluster, _):
        yield cluster


def rayagi(folder, address, *arguments, **variables):
    return subprocess.Popen(
        [sys.executable, "-m", "rayagi", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "RAY_ADDRESS": address} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def children_of(pid, tell):
    """What ``tell`` says of the folder in /proc of each child of a process, by process id; those that end are left out."""
    found = {}
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        with suppress(OSError):
            found[child] = tell(Path(f"/proc/{child}"))
    return found


def workers_of(raylet):
    """Ray's worker processes that a raylet has started: names by process id."""
    names = children_of(raylet, lambda process: (process / "cmdline").read_bytes().decode().strip("\0"))
    return {pid: name for pid, name in names.items() if name.startswith("ray::") and "Agent" not in name}


def state_of(pid):
    """The kernel's letter for a process; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def test_a_run_that_loses_a_node_ends_with_a_sentence_and_its_last_checkpoint_stays(cluster, tmp_path):
    options = ["--time", "10m", "--checkpoint-every", "20", "--name", "a"]
    process = rayagi(tmp_path, cluster.address, "train", "InvertedPendulum-v5", *SMALL, *options)
    checkpoints = CheckpointStore(tmp_path / "runs/a/checkpoints")
    until(lambda: checkpoints.names() or process.poll() is not None)
    (lost,) = cluster.worker_nodes
    raylet = lost.all_processes["raylet"][0].process.pid
    workers = workers_of(raylet)
    assert any(name.startswith("ray::GmiActor") for name in workers.values()), workers
    os.kill(raylet, signal.SIGKILL)
    output, error = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 1, output + error
    first, *follow_up = error.splitlines()
    assert re.match(r"rayagi: GMI \d/2 .* was lost during .+: ", first)  # iterations or a checkpoint
    last = checkpoints.load()
    assert follow_up == [
        f"The last good checkpoint is {last.name}. Continue from it with:",
        "  rayagi train --resume runs/a",
    ]
    # Nobody has waited for the killed raylet: its process id still exists, as in a container without an init.
    assert state_of(raylet) == "Z"
    until(lambda: all(state_of(pid) in (None, "Z") for pid in workers))


@pytest.mark.slow
def test_an_asynchronous_run_whose_lost_gmi_has_no_other_place_ends_with_a_sentence(cluster, tmp_path):
    options = [
        "--algorithm",
        "appo",
        "--num-envs",
        "8",
        "--time",
        "10m",
        "--checkpoint-every",
        "20",
        "--name",
        "a",
    ]
    limit = ["--set", "gmi.reserve_timeout_s=2"]
    process = rayagi(tmp_path, cluster.address, "train", "InvertedPendulum-v5", *options, *limit)
    checkpoints = CheckpointStore(tmp_path / "runs/a/checkpoints")
    until(lambda: checkpoints.names() or process.poll() is not None)
    (lost,) = cluster.worker_nodes
    os.kill(lost.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    output, error = process.communicate(timeout=LIMIT_S)

    assert process.returncode == 1, output + error
    first, *follow_up = error.splitlines()
    expected = r"rayagi: Asked: another place for GMI \d/\d .*, whose node has left the cluster\. There is: .* \(0 free\)\."
    assert re.match(expected, first)
    assert follow_up == [
        f"The last good checkpoint is {checkpoints.load().name}. Continue from it with:",
        "  rayagi train --resume runs/a",
    ]


def test_a_partitioner_and_a_replay_shard_end_with_their_node(cluster):
    """The next run can undo what the partitioner has made, and the shard's memory is free."""
    here = ray.get_runtime_context().get_node_id()
    (there,) = (node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)
    (lost,) = cluster.worker_nodes
    raylet = lost.all_processes["raylet"][0].process.pid
    table = start_rendezvous_actor(1), "t", ReplaySchema((Column(name="step", dtype="int32"),), 1), 10
    os.kill(raylet, signal.SIGSTOP)
    with pytest.raises(
        ShardLostError, match=f"shard 0 of table 't' did not start within 2 s, on Ray node {there}"
    ):
        create_shards(*table, [there], timeout_s=2.0)
    os.kill(raylet, signal.SIGCONT)

    partitioners = Partitioners("a")
    partitioners._start({"there": there}, "mps")
    shards = create_shards(*table, [there])
    actors = (*partitioners._handles.values(), *shards)
    pids = ray.get(
        [actor.__ray_call__.remote(lambda _actor: os.getpid()) for actor in actors], timeout=LIMIT_S
    )
    os.kill(raylet, signal.SIGKILL)
    until(lambda: all(state_of(pid) in (None, "Z") for pid in pids))


@pytest.fixture
def head():
    """One node, which this process has not joined: Ray ends every driver of a node that is lost."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        yield cluster
    finally:
        cluster.shutdown()


@pytest.mark.slow
def test_a_run_that_loses_its_own_node_of_a_cluster_ends_with_a_sentence(head, tmp_path):
    options = ["--time", "10m", "--checkpoint-every", "20", "--name", "a"]
    process = rayagi(tmp_path, head.address, "train", "InvertedPendulum-v5", *SMALL, *options)
    checkpoints = CheckpointStore(tmp_path / "runs/a/checkpoints")
    until(lambda: checkpoints.names() or process.poll() is not None)
    raylet = head.head_node.all_processes["raylet"][0].process.pid
    os.kill(raylet, signal.SIGKILL)
    check_end_of(process, tmp_path, f"Ray's raylet on this machine (process {raylet}) has ended")


@pytest.mark.slow
def test_a_run_whose_cluster_loses_its_head_ends_with_a_sentence_before_ray_ends_it(head, tmp_path):
    options = ["--time", "10m", "--checkpoint-every", "20", "--name", "a"]
    limit = {"RAY_gcs_rpc_server_reconnect_timeout_s": "20"}
    process = rayagi(tmp_path, head.address, "train", "InvertedPendulum-v5", *SMALL, *options, **limit)
    checkpoints = CheckpointStore(tmp_path / "runs/a/checkpoints")
    until(lambda: checkpoints.names() or process.poll() is not None)
    os.kill(head.head_node.all_processes["gcs_server"][0].process.pid, signal.SIGKILL)
    check_end_of(
        process, tmp_path, f"the head of the Ray cluster at {head.address} has accepted no connection for 1"
    )


def check_end_of(process, folder, begins):
    """The run has ended with a sentence, and can continue."""
    output, error = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, output + error
    first, *follow_up = error.splitlines()
    assert first.startswith(f"rayagi: {begins}"), first
    assert " while this program " in first
    last = CheckpointStore(folder / "runs/a/checkpoints").load()
    assert follow_up == [
        f"The last good checkpoint is {last.name}. Continue from it with:",
        "  rayagi train --resume runs/a",
    ]
    record = open_run(folder / "runs/a").record
    assert (record.status, first) == ("failed", f"rayagi: {record.reason}")


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["gcs_server", "raylet"])
def test_a_local_ray_that_is_killed_ends_the_run_with_a_sentence(tmp_path, killed):
    options = ["--time", "10m", "--checkpoint-every", "20", "--name", "a"]
    process = rayagi(tmp_path, "local", "train", "InvertedPendulum-v5", *SMALL, *options)
    checkpoints = CheckpointStore(tmp_path / "runs/a/checkpoints")
    until(lambda: checkpoints.names() or process.poll() is not None)
    programs = children_of(process.pid, lambda child: os.path.basename(os.readlink(child / "exe")))
    (pid,) = (pid for pid, program in programs.items() if program == killed)
    (raylet,) = (pid for pid, program in programs.items() if program == "raylet")
    workers = workers_of(raylet)
    os.kill(pid, signal.SIGKILL)
    check_end_of(process, tmp_path, f"Ray's {killed} on this machine (process {pid}) has ended")
    until(lambda: all(state_of(pid) in (None, "Z") for pid in (*workers, *programs)))


@pytest.mark.slow
def test_a_raylet_that_ends_because_its_agent_was_killed_is_named(tmp_path):
    """Ray then gives up the node, and says of each GMI that its owner has died, which is the run itself."""
    options = ["--time", "10m", "--checkpoint-every", "20", "--name", "a"]
    process = rayagi(tmp_path, "local", "train", "InvertedPendulum-v5", *SMALL, *options)
    checkpoints = CheckpointStore(tmp_path / "runs/a/checkpoints")
    until(lambda: checkpoints.names() or process.poll() is not None)
    programs = children_of(process.pid, lambda child: os.path.basename(os.readlink(child / "exe")))
    (raylet,) = (pid for pid, program in programs.items() if program == "raylet")
    names = children_of(raylet, lambda child: (child / "cmdline").read_bytes().decode())
    (agent,) = (pid for pid, name in names.items() if name.startswith("ray::RuntimeEnvAgent"))
    os.kill(agent, signal.SIGKILL)
    check_end_of(process, tmp_path, f"Ray's raylet on this machine (process {raylet}) has ended")


@pytest.mark.slow
@pytest.mark.parametrize("stopped", ["gcs_server", "raylet"])
def test_a_run_that_gets_sigterm_while_a_process_of_its_ray_is_stopped_saves_and_ends(tmp_path, stopped):
    options = ["--time", "10m", "--checkpoint-every", "20", "--name", "a"]
    process = rayagi(tmp_path, "local", "train", "InvertedPendulum-v5", *SMALL, *options)
    checkpoints = CheckpointStore(tmp_path / "runs/a/checkpoints")
    until(lambda: checkpoints.names() or process.poll() is not None)
    programs = children_of(process.pid, lambda child: os.path.basename(os.readlink(child / "exe")))
    pids = {program: pid for pid, program in programs.items()}
    workers = workers_of(pids["raylet"])
    os.kill(pids[stopped], signal.SIGSTOP)
    process.terminate()
    output, error = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, error) == (130, "")
    record = open_run(tmp_path / "runs/a").record
    assert (record.status, record.reason) == ("interrupted", "SIGTERM")
    saved = f"Saved {checkpoints.names()[-1]}. Continue with:\n  rayagi train --resume runs/a\n"
    assert output.endswith(saved), output
    assert int(checkpoints.names()[-1].removeprefix("iteration_")) == record.counters["iteration"]
    until(lambda: all(state_of(pid) in (None, "Z") for pid in (*workers, *programs)))


LEAVES = """
import os, signal
from ray._private import worker
from rayagi.coordinator import cluster

cluster.SHUT_DOWN_LIMIT_S = 1.0
cluster.continue_stopped = lambda: None  # as if it did not answer then either
with cluster.connected():
    node = worker.global_worker.node
    processes = [info.process for infos in node.all_processes.values() for info in infos]
    (raylet,) = node.all_processes["raylet"]
    os.kill(raylet.process.pid, signal.SIGSTOP)
assert len(processes) > 1
assert all(process.poll() is not None for process in processes)
"""


def test_a_local_ray_whose_raylet_does_not_answer_is_killed_at_the_end():
    run_python(LEAVES)


@pytest.mark.slow
def test_a_run_whose_own_node_of_a_cluster_does_not_answer_ends_with_a_sentence(head, tmp_path):
    options = ["--time", "10m", "--checkpoint-every", "20", "--name", "a"]
    process = rayagi(tmp_path, head.address, "train", "InvertedPendulum-v5", *SMALL, *options)
    checkpoints = CheckpointStore(tmp_path / "runs/a/checkpoints")
    until(lambda: checkpoints.names() or process.poll() is not None)
    raylet = head.head_node.all_processes["raylet"][0].process
    raylet.send_signal(signal.SIGSTOP)
    process.terminate()
    check_end_of(process, tmp_path, "Ray's raylet on this machine (")
    raylet.send_signal(signal.SIGCONT)


FROM_PYTHON = """
import os, signal, sys
import ray
from ray._private import worker
from rayagi import PPOConfig
from rayagi.coordinator.lost_ray import RayLostError

def new():
    config = PPOConfig().environment("InvertedPendulum-v5").gmi(num_gmis=1, num_envs=4, threads_per_gmi=1)
    return config.training(rollout_length=16, num_minibatches=2).build_algo()

started, killed = sys.argv[1:]
if started == "by the user":
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
algo = new()
algo.train()
pid = worker.global_worker.node.all_processes[killed][0].process.pid
os.kill(pid, signal.SIGKILL)
try:
    while True:
        algo.train()
except RayLostError as error:
    print(str(error).replace(str(pid), "PID"), flush=True)
algo.stop()
assert not ray.is_initialized()
algo = new()
print(algo.train()["training_iteration"])
algo.stop()
"""


@pytest.mark.parametrize(
    ("started", "killed"),
    [
        ("by rayagi", "raylet"),
        pytest.param("by rayagi", "gcs_server", marks=pytest.mark.slow),
        pytest.param("by the user", "raylet", marks=pytest.mark.slow),
        pytest.param("by the user", "gcs_server", marks=pytest.mark.slow),
    ],
)
def test_a_program_whose_ray_is_killed_gets_the_sentence_and_can_go_on(tmp_path, started, killed):
    """As a notebook, whose process must not end."""
    process = subprocess.run(
        [sys.executable, "-c", FROM_PYTHON, started, killed],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    lines = process.stdout.splitlines()  # where the user has started it, Ray says something too
    sentence = f"Ray's {killed} on this machine (process PID) has ended while this program used it: "
    assert [line.startswith(sentence) for line in lines].count(True) == 1, lines
    assert lines[-1].startswith("InvertedPendulum-v5: ")  # the summary of the second algorithm
    assert "1" in lines
    assert "Traceback" not in process.stderr
