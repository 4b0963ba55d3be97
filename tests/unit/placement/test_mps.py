"""The MPS backend with a fake nvidia-cuda-mps-control: real processes, real sockets, no GPU."""

import contextlib
import fcntl
import os
import select
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import floor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.backends import mps, mps_control, partitioned
from placement.backends.mps import MpsBackend, sms_per_chunk
from placement.backends.mps_control import DaemonBusyError, DaemonTimeoutError, MpsDaemon, parse_partition
from placement.errors import PartitionError, SliceError
from placement.ledger import Ledger
from placement.partitioner import Partitioner
from placement.types import Gpu, Node, Share, Slice
from tests.fakes.gpus import FakeGpu
from tests.fakes.mps import NOTHING, client, gpu, surroundings
from tests.fakes.nvml import FakeDriver

VOLTA = {"capability": (7, 0), "sms": 80}


@pytest.fixture
def place(monkeypatch):
    with surroundings(monkeypatch) as found:
        yield found


@pytest.fixture
def ledger(place):
    return Ledger.open("Ant-v5", place.ledgers)


def kill(pid: int) -> None:
    """And wait until it has ended: a process that is being killed may still accept a connection."""
    with contextlib.suppress(ProcessLookupError):  # it ended with another
        descriptor = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        ended, _, _ = select.select([descriptor], [], [], 30.0)
        os.close(descriptor)
        assert ended


def slice_of(share: Share) -> Slice:
    return Slice(
        node="n",
        backend="mps",
        gpu_uuid=share.gpu_uuid,
        gpu_fraction=0.5,
        num_threads=2,
        share=share,
    )


def test_hopper_gets_static_partitions_of_whole_chunks(place, ledger):
    half, third = MpsBackend().partition(gpu(), (0.5, 0.3333), ledger)
    # 132 SMs: 66 and 43.99 are 8 and 5 chunks of 8
    assert (half.sm_count, third.sm_count) == (64, 40)
    assert half.sm_partition == "GPU-1/Dx4A0001"
    assert third.sm_partition == "GPU-1/Dx4A0002"
    assert half.memory_bytes == 40 * 2**30
    assert half.pipe_directory == third.pipe_directory == str(place.daemons()[0].pipe)
    MpsBackend().restore("GPU-1", ledger)
    assert place.left() == NOTHING


def test_the_other_printed_form_of_a_partition_is_understood(place, ledger, monkeypatch):
    monkeypatch.setenv("FAKE_MPS", "created")
    (share,) = MpsBackend().partition(gpu(), (1.0,), ledger)
    assert share.sm_partition == "GPU-1/Dx4A0001"


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ("GPU-7/Dx4AAB\n", "GPU-7/Dx4AAB"),
        ("Partition GPU-7/Dx4AAB created\n", "GPU-7/Dx4AAB"),
        ("Partition Dx4AAB created.\n", "GPU-7/Dx4AAB"),
        ("Not enough free chunks\n", None),
        ("Unknown command: sm_partition add GPU-7 4\n", None),
        ("", None),
    ],
)
def test_both_printed_forms_are_parsed_and_refusals_are_none(answer, name):
    assert parse_partition(answer, "GPU-7") == name


@pytest.mark.parametrize("behave", ["no_static", "full", "ignoring", "ignoring strict"])
def test_without_static_partitions_shares_are_caps(place, ledger, monkeypatch, behave):
    monkeypatch.setenv("FAKE_MPS", behave)
    shares = MpsBackend().partition(gpu(), (0.5, 0.25), ledger)
    assert [(share.thread_percentage, share.sm_count, share.sm_partition) for share in shares] == [
        (50.0, 66, None),
        (25.0, 33, None),
    ]
    assert len(place.daemons()) == 1


def test_volta_has_caps_only():
    assert sms_per_chunk(gpu(**VOLTA)) is None
    assert sms_per_chunk(gpu(capability=(8, 0), sms=108)) == 4
    assert sms_per_chunk(gpu()) == 8


def test_two_gpus_have_a_daemon_each_and_are_undone_alone(place, ledger):
    backend = MpsBackend()
    (one,) = backend.partition(gpu("GPU-1", **VOLTA), (0.5,), ledger)
    (two,) = backend.partition(gpu("GPU-2", **VOLTA), (0.5,), ledger)
    assert one.pipe_directory != two.pipe_directory
    backend.restore("GPU-1", ledger)
    assert [str(daemon.pipe) for daemon in place.daemons()] == [two.pipe_directory]
    assert MpsDaemon.from_pipe_directory(two.pipe_directory).servers()
    backend.restore("GPU-2", ledger)
    backend.restore("GPU-2", ledger)
    assert place.left() == NOTHING


def test_the_variables_of_a_cap_and_of_a_partition(place, ledger):
    (cap,) = MpsBackend().partition(gpu(**VOLTA), (0.25,), ledger)
    variables = MpsBackend().environment(slice_of(cap))
    assert variables["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert variables["CUDA_MPS_PIPE_DIRECTORY"] == cap.pipe_directory
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20480M"
    assert variables["OMP_NUM_THREADS"] == "2"
    partition = Share(kind="mps", gpu_uuid="G", memory_bytes=2**30, pipe_directory="/p", sm_partition="G/D")
    variables = MpsBackend().environment(slice_of(partition))
    assert variables["CUDA_MPS_SM_PARTITION"] == "G/D"
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in variables


def test_a_slice_cannot_be_entered_before_it_is_partitioned():
    gmi_slice = Slice(node="n", backend="mps", gpu_uuid="GPU-1", gpu_fraction=0.5)
    with pytest.raises(SliceError, match="a share of GPU-1; there is a slice without a partition"):
        MpsBackend().enter(gmi_slice)


def test_entering_sets_the_share_and_drops_what_another_mps_had_set(monkeypatch):
    monkeypatch.setattr(
        os, "environ", {"CUDA_MPS_SM_PARTITION": "theirs", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/"}
    )
    monkeypatch.setattr(partitioned, "limit_torch_threads", lambda num_threads: None)
    share = Share(
        kind="mps",
        gpu_uuid="G",
        memory_bytes=2**30,
        pipe_directory="/p",
        thread_percentage=50.0,
    )
    MpsBackend().enter(slice_of(share))
    found = {name: value for name, value in os.environ.items() if name.startswith(("CUDA", "HOME"))}
    assert found == {
        "CUDA_VISIBLE_DEVICES": "G",
        "CUDA_MPS_PIPE_DIRECTORY": "/p",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=1024M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50",
        "HOME": "/",
    }


def test_a_process_that_did_not_attach_is_found_out(place, ledger):
    (share,) = MpsBackend().partition(gpu(**VOLTA), (0.5,), ledger)
    with pytest.raises(SliceError, match=rf"process {os.getpid()} attached .* clients none"):
        MpsBackend().verify(slice_of(share))


@pytest.mark.parametrize(("visible_sms", "inside"), [(40, True), (44, True), (80, False)])
def test_an_attached_process_must_have_no_more_sms_than_its_share(
    place, ledger, monkeypatch, visible_sms, inside
):
    (share,) = MpsBackend().partition(gpu(**VOLTA), (0.5,), ledger)
    (place.daemons()[0].pipe / "clients").write_text(str(os.getpid()))
    properties = SimpleNamespace(multi_processor_count=visible_sms)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    if inside:
        MpsBackend().verify(slice_of(share))
    else:
        with pytest.raises(SliceError, match=r"at most 40 SMs in process .*; there is 80"):
            MpsBackend().verify(slice_of(share))
    (place.daemons()[0].pipe / "clients").write_text("")


@pytest.mark.parametrize(
    ("behave", "text"),
    [
        ("refuse", "ended with exit code 1: Failed to start: permission denied"),
        # on a busy machine the program itself takes as long
        pytest.param("hang", "did not (start within|return)", marks=pytest.mark.slow),
        ("busy", "did not have an active server within"),
        ("fault", "is in FAULT"),
    ],
)
def test_a_daemon_that_does_not_come_up_is_an_error_and_leaves_nothing(
    place, ledger, monkeypatch, behave, text
):
    monkeypatch.setenv("FAKE_MPS", behave)
    monkeypatch.setattr(mps_control, "ANSWER_LIMIT_S", 1.0 if behave == "hang" else 5.0)
    monkeypatch.setattr(mps_control, "START_LIMIT_S", {"hang": 2.0, "busy": 5.0}.get(behave, 10.0))
    monkeypatch.setattr(mps_control, "END_LIMIT_S", 1.0)
    with pytest.raises(PartitionError, match=rf"{text}.*\. backend='direct' needs no MPS\.$"):
        MpsBackend().partition(gpu(**VOLTA), (0.5,), ledger)
    assert place.left() == NOTHING


def test_without_the_program_the_error_says_what_to_install(place, ledger, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(PartitionError, match=r"nvidia-cuda-mps-control: is not on PATH. Install"):
        MpsBackend().partition(gpu(), (0.5,), ledger)
    assert place.left() == NOTHING


def test_a_pipe_directory_that_is_too_long_for_a_socket_is_refused(place, ledger, monkeypatch):
    monkeypatch.setattr(mps, "FOLDERS", place.folders / ("x" * 80))
    with pytest.raises(PartitionError, match="is too long for a socket"):
        MpsBackend().partition(gpu(), (0.5,), ledger)
    assert place.left() == NOTHING


def test_a_stale_pipe_is_a_daemon_that_is_gone(place):
    daemon = MpsDaemon(place.folders / "stale")
    daemon.make_folder()
    (daemon.pipe / "control").touch()
    with pytest.raises(DaemonTimeoutError, match="Cannot find MPS control daemon process"):
        daemon.servers()
    assert daemon.processes() == []


def test_a_daemon_at_another_s_path_is_never_touched(place, ledger):
    theirs = MpsDaemon(place.folders / "theirs")
    theirs.make_folder()
    theirs.start("GPU-1", static=False)
    theirs.start_server()
    before = theirs.servers(), theirs.processes()
    backend = MpsBackend()
    backend.partition(gpu(**VOLTA), (0.5,), ledger)
    backend.restore("GPU-1", ledger)
    assert (theirs.servers(), theirs.processes()) == before


def test_a_gpu_that_another_run_has_partitioned_is_refused(place, ledger):
    MpsBackend().partition(gpu(**VOLTA), (0.5,), ledger)
    other = Ledger.open("Humanoid-v5", place.ledgers)
    with pytest.raises(
        PartitionError, match=rf"GPU-1 on .* is partitioned by run Ant-v5 \(process {os.getpid()}\). Wait for"
    ):
        MpsBackend().partition(gpu(**VOLTA), (0.5,), other)
    assert place.daemons()[0].servers()
    assert other.steps() == ()


def test_fault_and_death_of_the_daemon_are_detected(place, ledger):
    backend = MpsBackend()
    (share,) = backend.partition(gpu(**VOLTA), (0.5,), ledger)
    assert backend.health(slice_of(share)).state == "ok"
    place.behave("busy")
    assert backend.health(slice_of(share)).state == "degraded"
    place.behave("fault")
    fault = backend.health(slice_of(share))
    assert fault.state == "lost"
    assert "is in FAULT" in fault.text
    place.behave("")
    (server,) = place.daemons()[0].servers()
    kill(server)
    ended = backend.health(slice_of(share))  # the daemon would start another, but clients were of this one
    assert (ended.state, ended.text) == ("lost", "the MPS server on GPU-1 and its clients have ended")
    for pid in place.daemons()[0].processes():
        kill(pid)
    gone = backend.health(slice_of(share))
    assert gone.state == "lost"
    assert "Cannot find MPS control daemon" in gone.text
    # Recovered: undone, and partitioned again.
    backend.restore("GPU-1", ledger)
    assert place.left() == NOTHING
    (again,) = backend.partition(gpu(**VOLTA), (0.5,), ledger)
    assert backend.health(slice_of(again)).state == "ok"


def test_the_daemon_serves_one_control_program_at_a_time_and_the_others_wait(place, ledger):
    (share, _) = MpsBackend().partition(gpu(), (0.5, 0.5), ledger)
    daemon = MpsDaemon.from_pipe_directory(share.pipe_directory)
    place.behave("slow")
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(daemon.servers) for _ in range(8)]
    assert [future.result() for future in asked] == [daemon.servers()] * 8


def test_a_daemon_that_another_control_program_keeps_for_itself_is_not_lost(place, ledger, monkeypatch):
    (share, _) = MpsBackend().partition(gpu(), (0.5, 0.5), ledger)
    daemon = MpsDaemon.from_pipe_directory(share.pipe_directory)
    monkeypatch.setattr(mps_control, "ANSWER_LIMIT_S", 0.3)
    with (daemon.pipe / "turn").open() as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        with pytest.raises(DaemonBusyError, match="`get_server_list` had no turn"):
            daemon.servers()
        assert MpsBackend().health(slice_of(share)).state == "degraded"
    assert MpsBackend().health(slice_of(share)).state == "ok"


def test_a_partitioner_reports_health_and_memory_of_its_slices(place, monkeypatch):
    FakeDriver(FakeGpu(uuid="GPU-1", mps_pids=[41, 42], mps_bytes={41: 3 * 2**30})).install(monkeypatch)
    partitioner = Partitioner("mps", "Ant-v5", place.ledgers)
    (shares,) = partitioner.partition([(gpu(**VOLTA), (0.5, 0.5))])
    asked = [(slice_of(share), pid) for share, pid in zip(shares, (41, 42), strict=True)]
    found = partitioner.health(asked)
    assert [health.state for health in found] == ["ok", "ok"]
    assert [health.memory_bytes for health in found] == [3 * 2**30, None]  # of 42 the driver tells nothing
    place.behave("fault")
    assert [health.state for health in partitioner.health(asked)] == ["lost", "lost"]
    partitioner.restore()


def test_clients_that_do_not_leave_are_ended_by_the_server_before_the_daemon(place, ledger):
    MpsBackend().partition(gpu(**VOLTA), (0.5,), ledger)
    (daemon,) = place.daemons()
    with client(daemon) as process:
        MpsBackend().restore("GPU-1", ledger)
        assert process.wait(5) == -signal.SIGKILL
    assert place.left() == NOTHING


def test_a_client_that_does_not_answer_is_detached_through_the_server(place, ledger):
    (share,) = MpsBackend().partition(gpu(**VOLTA), (0.5,), ledger)
    (daemon,) = place.daemons()
    with client(daemon) as process:
        MpsBackend().evict(slice_of(share), process.pid)
        assert process.wait(5) == -signal.SIGKILL
    MpsBackend().evict(slice_of(share), process.pid)  # gone already


@pytest.mark.parametrize("behave", ["deaf", pytest.param("hang", marks=pytest.mark.slow)])
def test_a_daemon_that_does_not_obey_is_ended_by_signals(place, ledger, monkeypatch, behave):
    MpsBackend().partition(gpu(**VOLTA), (0.5,), ledger)
    place.behave(behave)
    monkeypatch.setattr(mps_control, "ANSWER_LIMIT_S", 1.0 if behave == "hang" else 5.0)
    monkeypatch.setattr(mps_control, "END_LIMIT_S", 1.0)
    MpsBackend().restore("GPU-1", ledger)
    assert place.left() == NOTHING


@pytest.mark.parametrize("capability", [(7, 0), (9, 0)])
@pytest.mark.parametrize("failing", range(9))
def test_a_failure_at_any_step_leaves_what_was_there_before(place, ledger, capability, failing):
    """The steps are the writes of the ledger and the calls of the program; Ctrl-C stands for every failure."""
    steps = iter(range(100))

    def counted(step):
        def call(*arguments, **options):
            if next(steps) == failing:
                raise KeyboardInterrupt
            return step(*arguments, **options)

        return call

    backend = MpsBackend()
    with pytest.MonkeyPatch.context() as failures:
        failures.setattr(Ledger, "_write", counted(Ledger._write))
        failures.setattr(mps_control, "_run", counted(mps_control._run))
        try:
            backend.partition(gpu(capability=capability), (0.5, 0.25), ledger)
        except KeyboardInterrupt:
            assert place.left() == NOTHING
        else:
            assert failing >= 6, "partitioning takes at least six steps"
    backend.restore("GPU-1", ledger)
    assert place.left() == NOTHING
    assert ledger.steps() == ()


sizes = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12).filter(lambda found: sum(found) <= 1.0)


@given(sizes, st.integers(8, 200), st.sampled_from([(7, 0), (8, 0), (9, 0)]), st.integers(2**30, 2**38))
def test_shares_together_never_exceed_the_gpu(found, sms, capability, memory):
    whole = Gpu(
        index=0, uuid="G", name="fake", sm_count=sms, compute_capability=capability, memory_total_bytes=2**38,
        memory_free_bytes=memory,
    )  # fmt: skip
    daemon = SimpleNamespace(pipe="/p", add_partition=lambda uuid, chunks: f"{uuid}/{chunks}")
    chunk = sms_per_chunk(whole)
    shares = [mps._share(whole, size, found, daemon, None) for size in found]
    assert sum(share.memory_bytes for share in shares) <= memory
    assert sum(share.thread_percentage for share in shares) <= 100 + 0.005 * len(shares)
    if chunk is not None:
        shares = [mps._share(whole, size, found, daemon, chunk) for size in found]
        assert sum(share.sm_count for share in shares) <= sms
        assert all(share.sm_count % chunk == 0 for share in shares)


@pytest.mark.parametrize("wanted", [(), (0.6, 0.6), (0.0,), (-0.1, 0.5), (1.1,), (float("nan"),)])
def test_shares_that_are_no_shares_of_one_gpu_are_refused(place, ledger, wanted):
    with pytest.raises(PartitionError, match=r"each must be in \(0, 1\]"):
        MpsBackend().partition(gpu(), wanted, ledger)
    assert place.left() == NOTHING


def test_a_plan_predicts_the_limits_of_its_partition(place, ledger):
    node = Node(name="n", cores=(0,), memory_total_bytes=1, cuda_version=(13, 1))
    backend, wanted = MpsBackend(), (0.5, 0.3333)
    partitioned = backend.partition(gpu(), wanted, ledger)
    assert backend.predict_limits(node, gpu(), wanted) == tuple(
        backend.limits(slice_of(share)) for share in partitioned
    )
    older = backend.predict_limits(replace(node, cuda_version=(12, 8)), gpu(), wanted)
    assert [limits.sm_count for limits in older] == [66, 43]


def test_an_attached_process_may_be_unknown_to_nvml_as_inside_of_a_container(place, ledger, monkeypatch):
    (share,) = MpsBackend().partition(gpu(**VOLTA), (0.5,), ledger)
    (place.daemons()[0].pipe / "clients").write_text(str(os.getpid()))
    FakeDriver(FakeGpu(uuid="GPU-1")).install(monkeypatch)
    properties = SimpleNamespace(multi_processor_count=40)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    MpsBackend().verify(slice_of(share))
    (place.daemons()[0].pipe / "clients").write_text("")


@pytest.mark.parametrize(
    ("sms", "capability", "shares", "granted"),
    [
        (108, (8, 0), 3, 36), (108, (8, 0), 9, 12), (56, (8, 0), 7, 8), (84, (8, 6), 3, 28), (72, (8, 6), 3, 24),
        (132, (9, 0), 2, 64), (132, (9, 0), 3, 40),
    ],
)  # fmt: skip
def test_equal_shares_get_all_whole_chunks_though_ray_cuts_fractions_off(sms, capability, shares, granted):
    device = gpu(capability=capability, sms=sms)
    fraction = floor(1e4 / shares) / 1e4
    assert mps.sms_of(device, fraction, sms_per_chunk(device)) == granted


@given(
    st.integers(16, 160),
    st.sampled_from([(8, 0), (9, 0)]),
    st.lists(st.integers(1, 5000), min_size=1, max_size=20),
)
def test_shares_of_any_sizes_are_together_no_more_than_the_gpu(sms, capability, weights):
    device = gpu(capability=capability, sms=sms)
    sizes = [floor(1e4 * each / sum(weights)) / 1e4 for each in weights]
    assert sum(mps.sms_of(device, size, sms_per_chunk(device)) for size in sizes) <= sms
