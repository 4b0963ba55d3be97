"""Fractions of GPUs from Ray to the share that a GMI enters: eight logical GPUs, and a stand-in of the MPS daemon.

No CUDA call is made: what runs in the GMIs only says what it was given.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import ray
from failing_share import Counting, Course
from ray.util.placement_group import placement_group, remove_placement_group

from actors.errors import GmiLostError
from actors.partitioners import KEEP_VISIBLE_DEVICES, Partitioners
from actors.protocols import EvaluationResult, IterationResult
from placement.backends.mps_control import MpsDaemon
from placement.errors import PartitionError, PlanError, ReservationError, SliceError, SliceLostError
from placement.inventory import cluster_machine
from placement.ledger import Ledger, all_ledgers, start_ticks
from placement.partitioner import stale_ledgers
from placement.plan import make_plan
from placement.ray_groups import left_out_held, release, reserve, scheduling
from rayagi.cli import main
from rayagi.config.spec import EnvSpec, GmiSpec, RunSpec
from rayagi.coordinator.decoupled import session_of
from rayagi.coordinator.deployment import join_and_build
from rayagi.coordinator.health_monitor import RunHealthMonitor
from rayagi.coordinator.session import Session
from rayagi.run.checkpoints import CheckpointStore
from rayagi.run.interrupt import Interrupt
from rayagi.run.limits import Limits
from rayagi.run.training_loop import Interval, LoopSettings, TrainingLoop
from tests.fakes.mps import gpu, path_with_fakes
from tests.waiting import until

pytestmark = pytest.mark.cluster

NUM_GPUS = 8
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_SM_PARTITION",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
)


@dataclass(frozen=True)
class Report:
    """Says what its process was given; misbehaves when told to."""

    raise_in_build: bool = False
    die: bool = False
    never_close: bool = False

    def __call__(self, context):
        if self.raise_in_build:
            raise LookupError("no such environment")
        return _Reporting(self, context)


class _Reporting:
    def __init__(self, program, context):
        self.program, self.context = program, context

    def iterate(self):
        if self.program.die:
            os.kill(os.getpid(), signal.SIGKILL)
        self.context.communicator.barrier()
        return IterationResult(iteration=1, metrics={})

    def evaluate(self, num_episodes, seed):
        return EvaluationResult(episode_returns=[], episode_lengths=[])

    def state_dict(self):
        given = {name: os.environ.get(name) for name in VARIABLES}
        return {"shared": {}, "local": given | {"device": str(self.context.device)}}

    def close(self):
        if self.program.never_close:
            threading.Event().wait(60)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(here.parent), str(here.parents[2])])
    with pytest.MonkeyPatch.context() as patch:
        # Of the partitioners too, which inherit them from Ray.
        patch.setenv("PATH", path_with_fakes())
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.setenv("PYTHONPATH", path)
        ray.init(
            address="local", num_cpus=40, num_gpus=NUM_GPUS, include_dashboard=False, log_to_driver=False,
            object_store_memory=100 * 2**20,
        )  # fmt: skip
        yield
        ray.shutdown()


def with_gpus(machine):
    """The GPUs that Ray only counts, with the names that a driver would give them."""
    gpus = tuple(gpu(f"GPU-{index}", index=index) for index in range(NUM_GPUS))
    (node,) = machine.nodes
    return replace(machine, nodes=(replace(node, cores=tuple(range(40)), pinnable=False, gpus=gpus),))


@pytest.fixture
def machine(cluster, monkeypatch):
    """This host as Ray has it, with the GPUs that Ray believes in."""
    found = with_gpus(cluster_machine())
    monkeypatch.setattr("rayagi.coordinator.session.cluster_machine", lambda *given: found)
    until(lambda: ray.available_resources().get("GPU") == NUM_GPUS)
    return found


def spec(**gmi):
    # A named composition: choosing one would try what the GPU can do, and there is none.
    settings = {
        "num_gmis": 2,
        "gmis_per_gpu": 2,
        "num_envs": 4,
        "threads_per_gmi": 1,
        "composition": "ip_only",
        **gmi,
    }
    return RunSpec(env=EnvSpec(id="Ant-v5"), gmi=GmiSpec(**settings))


def alone():
    """One GMI that has a whole GPU through MPS: processes are what takes time here."""
    return spec(num_gmis=1, gmis_per_gpu=1, backend="mps")


def daemons_of(session):
    return {
        gmi_slice.share.gpu_uuid: MpsDaemon.from_pipe_directory(gmi_slice.share.pipe_directory)
        for gmi_slice in session.plan.slices
    }


def nothing_is_left(daemons):
    assert not any(daemon.folder.exists() or daemon.processes() for daemon in daemons.values())
    assert all_ledgers() == ([], [])


def test_gmis_enter_shares_of_the_gpus_that_ray_gave_and_all_is_undone(machine):
    with Session(spec(num_gmis=3), factory=Report()) as session:
        assert session.plan.backend == "mps"
        assert "mps for training" in session.plan.reason
        daemons = daemons_of(session)
        assert len(daemons) == 2
        locals_ = session.state_dict()["local"]
        for gmi_slice, worker, given in zip(session.plan.slices, session.workers, locals_, strict=True):
            assert worker.gpu_ids == (gmi_slice.gpu_uuid.removeprefix("GPU-"),)
            assert given == {
                "CUDA_VISIBLE_DEVICES": gmi_slice.gpu_uuid,
                "CUDA_MPS_PIPE_DIRECTORY": str(daemons[gmi_slice.gpu_uuid].pipe),
                "CUDA_MPS_SM_PARTITION": gmi_slice.share.sm_partition,
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=40960M",
                "device": "cuda:0",
            }
        assert len({gmi_slice.share.sm_partition for gmi_slice in session.plan.slices}) == 3
        assert [health.state for health in session.health()] == ["ok"] * 3
        (ledger,), _ = all_ledgers()
        assert {step.gpu_uuid for step in ledger.steps()} == set(daemons)
        session.train(1)
    nothing_is_left(daemons)
    until(lambda: ray.available_resources().get("GPU") == NUM_GPUS)


def test_what_a_killed_run_left_on_a_cluster_is_undone_before_the_next_is_planned(
    machine, monkeypatch, tmp_path
):
    left = Ledger.open("killed")
    folder = tmp_path / "rayagi-mps-of-killed"
    folder.mkdir()
    left.record("mps", "GPU-0", "folder", {"folder": str(folder)})
    content = json.loads(left.path.read_text())
    content["owner"]["start_ticks"] -= 1  # another process of the same pid
    left.path.write_text(json.dumps(content))
    monkeypatch.setattr("rayagi.coordinator.session.cluster_machine", cluster_machine)

    def plan(machine):
        assert not folder.exists()
        assert all_ledgers() == ([], [])
        raise PlanError("a plan", "enough was seen", "Stop")

    with pytest.raises(PlanError, match="enough was seen"):
        Session(spec(), make_plan=plan).__enter__()


class Which:
    """Says which GPU Ray gave it."""

    def gpu_id(self):
        return ray.get_runtime_context().get_accelerator_ids()["GPU"][0]


@pytest.mark.parametrize(
    ("gmis_per_gpu", "left_out"),
    [(1, [0])]
    + [
        pytest.param(*each, marks=pytest.mark.slow)
        for each in [(2, [2, 5]), (1, [1]), (1, [0, 2]), (2, [0]), (2, [0, 1, 3])]
    ],
)
def test_ray_gives_the_other_gmis_the_gpus_that_they_had(machine, gmis_per_gpu, left_out):
    plan = make_plan(
        machine, backend="direct", num_gmis=3 * gmis_per_gpu, gmis_per_gpu=gmis_per_gpu, threads_per_gmi=1,
        num_envs=1, left_out=left_out,
    )  # fmt: skip
    with left_out_held(plan, 20.0):
        reservation = reserve(plan, 20.0)
    try:
        actors = [
            ray.remote(Which)
            .options(
                num_cpus=0,
                num_gpus=gmi_slice.gpu_fraction,
                scheduling_strategy=scheduling(reservation, index),
            )
            .remote()
            for index, gmi_slice in enumerate(plan.slices)
        ]
        given = ray.get([actor.gpu_id.remote() for actor in actors], timeout=60)
        assert sorted(f"GPU-{gpu_id}" for gpu_id in given) == [
            gmi_slice.gpu_uuid for gmi_slice in plan.slices
        ]
    finally:
        release(reservation)


def test_ray_gives_no_gmi_a_gpu_that_cannot_be_used(machine):
    (node,) = machine.nodes
    closed = tuple(
        replace(gpu, compute_mode="prohibited" if gpu.index in (0, 2) else "default") for gpu in node.gpus
    )
    plan = make_plan(
        replace(machine, nodes=(replace(node, gpus=closed),)),
        backend="direct",
        num_gmis=3,
        threads_per_gmi=1,
        num_envs=1,
    )
    with left_out_held(plan, 20.0):
        reservation = reserve(plan, 20.0)
    try:
        given = [
            ray.remote(Which)
            .options(num_cpus=0, num_gpus=1, scheduling_strategy=scheduling(reservation, index))
            .remote()
            for index in range(3)
        ]
        ids = ray.get([actor.gpu_id.remote() for actor in given], timeout=60)
        assert sorted(ids) == ["1", "3", "4"]
    finally:
        release(reservation)


@pytest.mark.slow
def test_what_building_raises_leaves_no_daemon(machine, monkeypatch):
    seen = {}
    session = Session(alone(), factory=Report(raise_in_build=True))

    def noting_daemons(*arguments):
        seen.update(daemons_of(session))
        join_and_build(*arguments)

    monkeypatch.setattr("rayagi.coordinator.deployment.join_and_build", noting_daemons)
    with pytest.raises(LookupError, match="no such environment"):
        session.__enter__()
    assert len(seen) == 1
    nothing_is_left(seen)


@pytest.mark.slow
def test_a_gmi_that_is_lost_with_its_daemon_says_so(machine):
    with Session(alone(), factory=Report(die=True)) as session:
        daemons = daemons_of(session)
        (daemon,) = daemons.values()
        (daemon.pipe / "behave").write_text("fault")
        with pytest.raises(
            SliceLostError, match=r"GMI 0 mps\[GPU-\d x1.00\] was lost: .* is in FAULT"
        ) as caught:
            session.train(1)
        assert isinstance(caught.value.__cause__, GmiLostError)
    nothing_is_left(daemons)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fault", "death"])
def test_a_daemon_that_fails_is_started_anew_and_the_run_goes_on(machine, tmp_path, monkeypatch, how):
    monkeypatch.setattr("actors.groups.WATCH_S", 0.5)
    monkeypatch.setattr("rayagi.coordinator.deployment.CLOSE_TIMEOUT_S", 1.0)
    factory, sessions, daemons, told, course = Counting(how, str(tmp_path / "failed")), [], [], [], Course()

    def open_session(own):
        sessions.append(Session(own, factory=factory).__enter__())
        daemons.append(daemons_of(sessions[-1]))
        return sessions[-1]

    health_monitor = RunHealthMonitor(
        spec(), open_session(spec()), reopen=open_session, log=told.append, save_spec=print
    )
    store = CheckpointStore(tmp_path / "checkpoints")
    settings = LoopSettings(limits=Limits(iterations=8), seed=0, checkpoint_every=Interval(iterations=2))
    loop = TrainingLoop(
        sessions[0], store, [course], settings, interrupt=Interrupt(), health_monitor=health_monitor
    )
    try:
        assert loop.run().position.iteration == 8
    finally:
        for session in sessions:
            session.close()
    (line,) = told
    assert line.startswith("GMI 0 mps[GPU-")
    assert ("is in FAULT" if how == "fault" else "Cannot find MPS control daemon") in line
    assert "from the last checkpoint (attempt 1 of 3)" in line
    assert course.rewound_to == [4]  # it failed in the fifth iteration, and every second is saved
    assert course.iterations == [1, 2, 3, 4, 5, 6, 7, 8]
    last = store.load().state["shared"]
    assert last["weight"].item() == last["iteration"] == 8
    before, after = ({daemon.folder for daemon in each.values()} for each in daemons)
    assert not before & after
    for each in daemons:
        nothing_is_left(each)


def test_a_gpu_that_another_run_has_cut_is_one_error_and_nothing_is_left(machine):
    other = Ledger.open("another run")
    steps = [
        other.record("mps", one.uuid, "folder", {"folder": "/tmp/none"}) for one in machine.nodes[0].gpus
    ]
    try:
        with pytest.raises(
            PartitionError, match=r"GPU-\d on .* is partitioned by run another run \(process \d+\)"
        ):
            Session(alone(), factory=Report()).__enter__()
        (ledger,), _ = all_ledgers()
        assert ledger.run == "another run"
    finally:
        for step in steps:
            other.erase(step)
    until(lambda: ray.available_resources().get("GPU") == NUM_GPUS)


def test_auto_undoes_what_mps_has_left_and_deploys_without_it(machine, monkeypatch):
    monkeypatch.setitem(KEEP_VISIBLE_DEVICES, "FAKE_MPS", "refuse")
    logged, plans = [], []
    session = session_of(spec(), log=logged.append, factory=Report(), on_plan=plans.append)
    # Without MPS the first GMI asks CUDA for its GPU, and there is none.
    with pytest.raises(SliceError, match=r"Wanted 0\.5 of a GPU; there is no CUDA device"):
        session.__enter__()
    assert [plan.backend for plan in plans] == ["mps", "direct"]
    (line,) = logged
    assert "With MPS it failed: `nvidia-cuda-mps-control -d` for GPU-" in line
    assert all_ledgers() == ([], [])
    until(lambda: ray.available_resources().get("GPU") == NUM_GPUS)


@pytest.mark.slow
def test_a_gmi_that_does_not_close_is_detached_by_the_daemon_before_it_is_killed(machine, monkeypatch):
    monkeypatch.setattr("rayagi.coordinator.deployment.CLOSE_TIMEOUT_S", 1.0)
    evicted = []
    real = Partitioners.evict

    def evict(partitioners, index):
        real(partitioners, index)
        until(lambda: start_ticks(session.workers[index].pid) is None)
        evicted.append(index)

    monkeypatch.setattr(Partitioners, "evict", evict)
    with Session(alone(), factory=Report(never_close=True)) as session:
        daemons = daemons_of(session)
        (daemon,) = daemons.values()
        (daemon.pipe / "clients").write_text(str(session.workers[0].pid))
    # The stand-in ends a client by SIGKILL: it was gone before Ray was asked to kill it.
    assert evicted == [0]
    nothing_is_left(daemons)


DRIVER = """
import signal, sys
import rayagi.coordinator.session as module
from placement.inventory import cluster_machine
from test_gpu_placement import Report, alone, with_gpus

module.cluster_machine = lambda *given: with_gpus(cluster_machine(*given))
with module.Session(alone(), ray_address=sys.argv[1], factory=Report()):
    print("partitioned", flush=True)
    signal.pause()
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.usefixtures("default_signals")
def test_a_driver_that_is_stopped_undoes_and_one_that_is_killed_is_mended(machine, ending):
    address = ray.get_runtime_context().gcs_address
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as driver:
        assert driver.stdout.readline() == "partitioned\n"
        (ledger,), _ = all_ledgers()
        daemons = {step.gpu_uuid: MpsDaemon(Path(step.undo["folder"])) for step in ledger.steps()}
        driver.send_signal(ending)
        try:
            driver.wait(60)
        finally:
            driver.kill()  # leaving this block waits for it without a limit
    if ending == signal.SIGKILL:
        until(stale_ledgers)  # Ray ends the partitioner with its driver, and gives it no time
        assert main(["cleanup"]) == 0
    nothing_is_left(daemons)
    until(lambda: ray.available_resources().get("GPU") == NUM_GPUS)


def fractional(machine, num_gmis, fraction):
    plan = make_plan(machine, backend="mps", num_gmis=num_gmis, gmis_per_gpu=3, threads_per_gmi=1, num_envs=1)
    return replace(plan, slices=tuple(replace(gmi_slice, gpu_fraction=fraction) for gmi_slice in plan.slices))


def test_fractions_that_do_not_pack_are_refused_at_once_with_what_would_fit(machine):
    started = time.monotonic()
    # Two of 0.4 fit on a GPU, so 16 on eight, though 17 x 0.4 is less than 8.
    with pytest.raises(ReservationError, match="16 GMIs of this size would fit: set num_gmis=16") as caught:
        reserve(fractional(machine, 17, 0.4), 10.0)
    assert time.monotonic() - started < 10.0
    assert caught.value.asked == "17 x {1 CPU, 0.4 GPU}"


def test_small_fractions_before_large_ones_are_reserved(machine):
    # In the GMIs' order Ray would give two of 0.4 each of the first four GPUs, and have none for half of those of 0.6.
    sizes = [0.4] * NUM_GPUS + [0.6] * NUM_GPUS
    plan = make_plan(machine, backend="direct", threads_per_gmi=1, num_envs=1, sizes=sizes)
    release(reserve(plan, 10.0))
    until(lambda: ray.available_resources().get("GPU") == NUM_GPUS)


def test_fractions_that_do_not_pack_beside_others_are_refused_within_the_limit(machine):
    others = placement_group([{"GPU": 7}])
    try:
        assert others.wait(10)
        with pytest.raises(ReservationError, match="2 GMIs of this size would fit now") as caught:
            reserve(fractional(machine, 3, 0.4), 2.0)
        assert caught.value.waited_s < 10.0
    finally:
        remove_placement_group(others)
