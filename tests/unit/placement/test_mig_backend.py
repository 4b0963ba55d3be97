"""MIG partition and restore through NVIDIA's bindings, on a stateful fake driver library with injected failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.backends import get_backend
from placement.backends.base import SliceLimits
from placement.backends.mig import MigBackend
from placement.errors import PartitionError, PlanError, SliceError
from placement.inventory import load_machine
from placement.inventory.nvml import read_driver
from placement.ledger import Ledger
from placement.plan import make_plan
from placement.types import Gpu, Machine, MigInstance, Node, Share, Slice
from tests.fakes.gpus import (
    A30,
    GPU_IS_LOST,
    IN_USE,
    INSUFFICIENT_RESOURCES,
    NO_PERMISSION,
    RESET_REQUIRED,
    UNKNOWN,
    FakeGpu,
    a_free_mig_gpu,
)
from tests.fakes.nvml import FakeDriver
from tests.fakes.nvml_library import ProcessKilled

BACKEND = MigBackend()
MACHINES = Path(__file__).parents[2] / "data" / "machines"


@pytest.fixture(autouse=True)
def _no_visible_devices_setting(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def installed(driver: FakeDriver, monkeypatch) -> Gpu:
    """The driver in place of the library; returns the inventory's first GPU."""
    driver.install(monkeypatch)
    gpu = read_driver(host_memory_bytes=1).gpus[0]
    driver.begin()
    return gpu


def state(fake: FakeGpu) -> tuple:
    """Everything that a partition could change: owners and parts of the instances, and the MIG mode."""
    return tuple(fake.mig), {
        one.id: (one.profile.profile_id, one.start, sorted(part.uuid for part in one.compute.values()))
        for one in fake.instances.values()
    }


def steps_left(directory: Path) -> int:
    return sum(len(Ledger.load(path).steps()) for path in directory.glob("*.json"))


def test_shares_are_instances_with_their_own_sms_and_memory(monkeypatch, tmp_path):
    fake = a_free_mig_gpu()
    ledger = Ledger.open("a run", tmp_path)
    gpu = installed(FakeDriver(fake), monkeypatch)
    shares = BACKEND.partition(gpu, (0.5, 0.25, 0.125), ledger)
    # 1/2: 4 of 7 compute and 4 of 8 memory slices; 1/4: 2g; 1/8: 1g, which has 1/7 and 1/8
    assert [(share.sm_count, share.memory_bytes) for share in shares] == [
        (56, 20096 * 2**20),
        (28, 9984 * 2**20),
        (14, 4864 * 2**20),
    ]
    made = {part.uuid: one.start for one in fake.instances.values() for part in one.compute.values()}
    assert [made[share.mig_uuid] for share in shares] == [0, 4, 6]
    BACKEND.restore(gpu.uuid, ledger)
    assert fake.instances == {}
    assert list(tmp_path.glob("*.json")) == []
    BACKEND.restore(gpu.uuid, ledger)  # twice is once


def test_existing_instances_stay_and_new_ones_are_placed_around_them(monkeypatch, tmp_path):
    fake = a_free_mig_gpu()
    fake.make(9, 0, pids=(7,))
    fake.make(19, 6, compute=False)  # occupies, though no MIG device shows it
    before = state(fake)
    ledger = Ledger.open("a run", tmp_path)
    gpu = installed(FakeDriver(fake), monkeypatch)
    (share,) = BACKEND.partition(gpu, (0.25,), ledger)
    assert fake.layout() >= {(14, 4, 2, (2,))}
    assert share.sm_count == 28
    BACKEND.restore(gpu.uuid, ledger)
    assert state(fake) == before


SCENARIOS = {
    "A100 beside others": (lambda: _beside_others(), (0.25, 0.125)),
    "empty A30": (lambda: _a30(), (0.5,)),
}


def _beside_others() -> FakeGpu:
    fake = a_free_mig_gpu()
    fake.make(9, 0, pids=(7,))
    fake.make(19, 6)
    return fake


def _a30() -> FakeGpu:
    return a_free_mig_gpu(name="NVIDIA A30", memory=(24 * 2**30, 0), mig_profiles=A30)


FAILURES = (("error", UNKNOWN), ("lost", 0), ("killed before", 0), ("killed after", 0))


@pytest.mark.parametrize("failure", FAILURES, ids=lambda one: one[0])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_restore_undoes_partition_whatever_fails_at_whichever_call(scenario, failure, monkeypatch, tmp_path):
    """restore(partition(x)) = x: after success, and after a failure of any call of partition or restore."""
    make, sizes = SCENARIOS[scenario]
    monkeypatch.setattr(
        "placement.ledger.os.fsync", lambda descriptor: None
    )  # the disk is not what is tested
    driver = FakeDriver(make())
    gpu = installed(driver, monkeypatch)
    before = state(driver.gpus[0])
    ends = []
    for call in range(1, 1000):
        fake = make()
        driver.gpus = [fake]
        driver.begin({call: failure})
        ledger = Ledger.open("a run", tmp_path)
        try:
            BACKEND.partition(gpu, sizes, ledger)
            BACKEND.restore(gpu.uuid, ledger)
            ends.append("done")
        except (PartitionError, ProcessKilled) as error:
            ends.append(type(error).__name__)
        reached = len(driver.calls) >= call
        driver.begin()
        if ledger.path.exists():  # another process recovers what this one left
            BACKEND.restore(gpu.uuid, Ledger.load(ledger.path))
        assert state(fake) == before, f"{failure} at call {call}"
        assert steps_left(tmp_path) == 0, f"{failure} at call {call}"
        if not reached:
            break
    assert ends[-1] == "done"  # the plan came after the last call
    assert len(ends) > 50
    assert "done" not in ends[:-1]


@pytest.mark.parametrize("code", [UNKNOWN, INSUFFICIENT_RESOURCES, IN_USE, RESET_REQUIRED])
def test_a_failed_partition_rolls_back_by_itself(code, monkeypatch, tmp_path):
    """A driver that fails once, at any call of partition, leaves no stale state."""
    driver = FakeDriver(a_free_mig_gpu())
    gpu = installed(driver, monkeypatch)
    BACKEND.partition(gpu, (0.5, 0.5), Ledger.open("a run", tmp_path / "counted"))
    for call in range(1, len(driver.calls) + 1):
        driver.gpus = [a_free_mig_gpu()]
        driver.begin({call: ("error", code)})
        with pytest.raises(PartitionError):
            BACKEND.partition(gpu, (0.5, 0.5), Ledger.open("a run", tmp_path))
        assert driver.gpus[0].instances == {}, call
        assert steps_left(tmp_path) == 0, call


PLACES = [(19, start) for start in range(7)] + [(15, 0), (15, 4), (14, 0), (14, 2), (9, 0), (9, 4), (5, 0)]


@settings(max_examples=60, deadline=None)
@given(
    others=st.lists(st.tuples(st.sampled_from(PLACES), st.booleans(), st.booleans()), max_size=4),
    sizes=st.lists(st.sampled_from([0.1, 0.125, 0.14, 0.2, 0.25, 0.33, 0.5, 0.7]), min_size=1, max_size=4),
    failure=st.sampled_from(
        (
            *FAILURES,
            *(("error", code) for code in (IN_USE, INSUFFICIENT_RESOURCES, NO_PERMISSION, GPU_IS_LOST)),
        )
    ),
    call=st.integers(1, 200),
)
def test_restore_undoes_partition_on_any_gpu_in_any_state(others, sizes, failure, call):
    if sum(sizes) > 1:
        sizes = [size / sum(sizes) for size in sizes]
    fake = a_free_mig_gpu()
    taken: set[int] = set()
    for (profile_id, start), compute, busy in others:
        profile = next(one for one in fake.mig_profiles if one.profile_id == profile_id)
        wanted = set(range(start, start + profile.size))
        if not wanted & taken:
            taken |= wanted
            fake.make(profile_id, start, compute=compute, pids=(9,) if busy else ())
    with pytest.MonkeyPatch.context() as monkeypatch, TemporaryDirectory() as folder:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr("placement.ledger.os.fsync", lambda descriptor: None)
        driver = FakeDriver(fake)
        gpu = installed(driver, monkeypatch)
        before = state(fake)
        ledger = Ledger.open("a run", Path(folder))
        driver.begin({call: failure})
        try:
            shares = BACKEND.partition(gpu, sizes, ledger)
            assert len({share.mig_uuid for share in shares}) == len(sizes)
            occupied = [slot for one in fake.instances.values() for slot in one.occupied]
            assert len(set(occupied)) == len(occupied) <= 8
        except (PartitionError, ProcessKilled):
            pass
        driver.begin()
        if ledger.path.exists():
            BACKEND.restore(gpu.uuid, Ledger.load(ledger.path))
        assert state(fake) == before
        assert steps_left(Path(folder)) == 0


# One message each, with the way out, and nothing left behind.


def refusal(monkeypatch, tmp_path, driver: FakeDriver, sizes=(0.5,)) -> str:
    before = [state(fake) for fake in driver.gpus]
    gpu = installed(driver, monkeypatch)
    with pytest.raises(PartitionError) as caught:
        BACKEND.partition(gpu, sizes, Ledger.open("a run", tmp_path))
    driver.begin()
    assert [state(fake) for fake in driver.gpus] == before
    assert steps_left(tmp_path) == 0
    return str(caught.value)


UUID = "GPU-a1000000-0000-4000-8000-000000000000"


def test_without_permission_and_instances_the_exact_command_is_said(monkeypatch, tmp_path):
    driver = FakeDriver(a_free_mig_gpu(), privileged=False)
    assert refusal(monkeypatch, tmp_path, driver, (0.5, 0.5)) == (
        f"MIG on {UUID}: this user may not create instances, and the existing ones do not fit: 2 x 0.5 on GPU 0 "
        "(NVIDIA A100-SXM4-40GB): of its no MIG instances, free are none. Request these sizes, or have an "
        "administrator repartition it. Run as root, or have an administrator run "
        f"`sudo nvidia-smi mig -i {UUID} -cgi 9:0,9:4 -C`."
    )


def test_mode_off_is_never_switched_on(monkeypatch, tmp_path):
    driver = FakeDriver(a_free_mig_gpu(mig=[0, 0]))
    assert refusal(monkeypatch, tmp_path, driver) == (
        f"MIG on {UUID}: MIG mode is off. Run `sudo nvidia-smi -i {UUID} -mig 1`, then "
        f"`sudo nvidia-smi --gpu-reset -i {UUID}`, while the GPU is idle."
    )
    assert "nvmlDeviceSetMigMode" not in driver.calls


@pytest.mark.parametrize(
    ("mode", "problem", "command"),
    [
        (
            [0, 1],
            "will be on after the pending reset",
            f"Run `sudo nvidia-smi --gpu-reset -i {UUID}` while",
        ),
        (
            [1, 0],
            "on, but will be off after the pending reset",
            f"Run `sudo nvidia-smi -i {UUID} -mig 1`, which cancels",
        ),
    ],
)
def test_a_pending_reset_is_reported_with_the_commands_to_run(monkeypatch, tmp_path, mode, problem, command):
    message = refusal(monkeypatch, tmp_path, FakeDriver(a_free_mig_gpu(mig=mode)))
    assert problem in message
    assert command in message


def test_sizes_that_idle_instances_do_not_fit_are_an_error_with_the_command_for_them():
    one = MigInstance(uuid="MIG-1", profile="1g.5gb", memory_bytes=5 * 2**30, sm_count=14, start=0, size=1)
    node = Node(name="n", cores=(0,), memory_total_bytes=1, may_configure_mig=False)
    with pytest.raises(PlanError) as caught:
        BACKEND.predict_limits(node, on_paper(mig_instances=(one,)), (0.5,))
    # A 3g beside the 1g that is there: at memory slice 4.
    assert caught.value.hint.endswith(f"repartition it with `sudo nvidia-smi mig -i {UUID} -cgi 9:4 -C`")


def test_a_driver_without_mig_is_too_old(monkeypatch, tmp_path):
    driver = FakeDriver(a_free_mig_gpu(), missing=("nvmlDeviceGetMigMode",))
    message = refusal(monkeypatch, tmp_path, driver)
    assert "Function Not Found. The driver is too old for MIG: update it to 450 or newer" in message


def test_a_gpu_without_mig_is_said(monkeypatch, tmp_path):
    driver = FakeDriver(FakeGpu(name="Tesla V100-SXM2-16GB", mig_profiles=()))
    assert "Tesla V100-SXM2-16GB has no MIG. Use backend='mps'" in refusal(monkeypatch, tmp_path, driver)


def test_a_lost_gpu_stays_in_the_ledger_until_it_is_back(monkeypatch, tmp_path):
    fake = a_free_mig_gpu()
    driver = FakeDriver(fake)
    gpu = installed(driver, monkeypatch)
    ledger = Ledger.open("a run", tmp_path)
    BACKEND.partition(gpu, (0.5,), ledger)
    fake.lost = True
    with pytest.raises(
        PartitionError, match=r"GPU is lost. See `nvidia-smi -L`; a GPU that is lost needs a reset"
    ):
        BACKEND.restore(gpu.uuid, ledger)
    assert steps_left(tmp_path) == 1
    fake.lost = False
    BACKEND.restore(gpu.uuid, ledger)
    assert fake.instances == {}


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        # slices 4, 5, 6 can begin an instance; the poorest gets one slice whatever the others get
        (
            (0.25,) * 4,
            "it holds at most 3 MIG instances with memory slices 0-3 taken. "
            "3 x 0.25 would fit as 3 x 1g.5gb.",
        ),
        # 2g at 4 leaves two memory slices and one compute slice, 1/7 < 0.3 / 2
        (
            (0.3,) * 2,
            "no legal placement on its 8 memory slices with memory slices 0-3 taken; alone would fit any of 1g.5gb, "
            "1g.10gb, 2g.10gb, 3g.20gb. 1 x 0.3 would fit as 1 x 3g.20gb.",
        ),
    ],
)
def test_sizes_that_do_not_fit_say_what_would(sizes, text, monkeypatch, tmp_path):
    fake = a_free_mig_gpu()
    fake.make(9, 0, pids=(7,))
    assert text in refusal(monkeypatch, tmp_path, FakeDriver(fake), sizes)


def test_an_instance_in_use_is_not_pulled_away(monkeypatch, tmp_path):
    fake = a_free_mig_gpu()
    gpu = installed(FakeDriver(fake), monkeypatch)
    ledger = Ledger.open("a run", tmp_path)
    BACKEND.partition(gpu, (0.5,), ledger)
    (instance,) = fake.instances.values()
    (part,) = instance.compute.values()
    part.pids = [4711]
    with pytest.raises(
        PartitionError, match=r"still used by process 4711. End that process, then run `rayagi clean"
    ):
        BACKEND.restore(gpu.uuid, ledger)
    assert list(instance.compute) == [part.id]
    part.pids = []
    BACKEND.restore(gpu.uuid, ledger)
    assert fake.instances == {}


def test_a_reused_id_elsewhere_is_not_ours(monkeypatch, tmp_path):
    fake = a_free_mig_gpu()
    gpu = installed(FakeDriver(fake), monkeypatch)
    ledger = Ledger.open("a run", tmp_path)
    BACKEND.partition(gpu, (0.5,), ledger)
    fake.instances.clear()  # an administrator cleared the GPU, and somebody else got the same id
    fake.make(19, 2)
    BACKEND.restore(gpu.uuid, ledger)
    assert fake.layout() == {(19, 2, 1, (1,))}
    assert steps_left(tmp_path) == 0


class Overtaken(FakeDriver):
    """Somebody else creates the same instance in the same place just before us."""

    def _nvmlDeviceCreateGpuInstanceWithPlacement(self, device, profile_id, placement, instance):
        self.gpus[0].make(profile_id, placement._obj.start)
        return super()._nvmlDeviceCreateGpuInstanceWithPlacement(device, profile_id, placement, instance)


def test_who_overtakes_us_keeps_the_instance(monkeypatch, tmp_path):
    fake = a_free_mig_gpu()
    gpu = installed(Overtaken(fake), monkeypatch)
    with pytest.raises(PartitionError, match=r"Another user may have partitioned the GPU in the meantime"):
        BACKEND.partition(gpu, (0.4,), Ledger.open("a run", tmp_path))
    assert fake.layout() == {(9, 0, 4, (3,))}
    assert steps_left(tmp_path) == 0


# Instances that exist.


def test_without_permission_idle_instances_are_used_and_left(monkeypatch, tmp_path):
    fake = a_free_mig_gpu()
    busy, small, large = fake.make(14, 0, pids=(7,)), fake.make(19, 2), fake.make(9, 4)
    before = state(fake)
    gpu = installed(FakeDriver(fake, privileged=False), monkeypatch)
    ledger = Ledger.open("a run", tmp_path)
    shares = BACKEND.partition(gpu, (0.1, 0.4), ledger)
    assert [share.mig_uuid for share in shares] == [small, large]
    assert busy not in [share.mig_uuid for share in shares]
    second = Ledger.open("another run", tmp_path)
    with pytest.raises(PartitionError, match="free are none"):
        BACKEND.partition(gpu, (0.1,), second)  # what a living run has is not given twice
    BACKEND.restore(gpu.uuid, ledger)
    assert state(fake) == before
    (again,) = BACKEND.partition(gpu, (0.1,), second)
    assert again.mig_uuid == small


def test_what_a_living_run_made_is_not_idle_for_another(monkeypatch, tmp_path):
    gpu = installed(FakeDriver(a_free_mig_gpu()), monkeypatch)
    BACKEND.partition(gpu, (1.0,), Ledger.open("a run", tmp_path))
    with pytest.raises(PartitionError, match=r"no instance fits with memory slices 0-7 taken"):
        BACKEND.partition(gpu, (0.5,), Ledger.open("another run", tmp_path))


# Plans before anything is partitioned.


def cut_machine(**changes) -> Machine:
    node = load_machine(MACHINES / "a100_40x1.json").nodes[0]
    gpu = replace(node.gpus[0], mig_enabled=True, mig_pending=True, **changes)
    return Machine(nodes=(replace(node, gpus=(gpu,)),), origin="test")


@pytest.mark.parametrize(("count", "gib"), [(1, 40), (2, 20), (3, 10), (4, 10), (7, 5)])
def test_a_plan_shows_the_memory_that_instances_will_have(count, gib):
    plan = make_plan(cut_machine(), backend="mig", gmis_per_gpu=count, num_envs=8)
    assert [plan.memory_bytes(i) for i in range(count)] == [gib * 2**30] * count


def test_a_plan_that_mig_cannot_partition_is_refused_before_anything_starts():
    with pytest.raises(PlanError, match=r"at most 7 MIG instances. 7 x 0.125 would fit as 7 x 1g.5gb"):
        make_plan(cut_machine(), backend="mig", gmis_per_gpu=8, num_envs=8)
    already_cut = load_machine(MACHINES / "a100_40x1_mig_cut.json")
    with pytest.raises(PlanError, match=r"of its 3 MIG instances, free are 1 x 2g.10gb \+ 1 x 1g.5gb"):
        make_plan(already_cut, backend="mig", gmis_per_gpu=3, num_envs=8)


def test_a_plan_uses_what_exists_where_it_may_not_create():
    machine = load_machine(MACHINES / "a100_40x1_mig_cut.json")
    (only,) = make_plan(machine, backend="mig", gmis_per_gpu=3, num_gmis=1, num_envs=8).slices
    limits = BACKEND.predict_limits(machine.nodes[0], machine.nodes[0].gpus[0], [only.gpu_fraction])
    assert limits == (SliceLimits(sm_count=28, memory_bytes=10 * 2**30),)


def test_a_partitioned_slice_has_the_memory_of_its_share():
    plan = make_plan(cut_machine(), backend="mig", gmis_per_gpu=2, num_envs=8)
    partitioned = replace(plan, slices=tuple(replace(one, share=SHARE) for one in plan.slices))
    assert partitioned.memory_bytes(1) == SHARE.memory_bytes


# What a slice gives to a process.

SHARE = Share(kind="mig", gpu_uuid=UUID, sm_count=42, memory_bytes=20 * 2**30, mig_uuid="MIG-1")


def gmi_slice(share: Share | None) -> Slice:
    return Slice(node="n", backend="mig", num_threads=2, gpu_uuid=UUID, gpu_fraction=0.5, share=share)


def test_a_process_sees_its_instance_only():
    assert get_backend("mig").environment(gmi_slice(SHARE))["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    assert "CUDA_VISIBLE_DEVICES" not in BACKEND.environment(gmi_slice(None))
    limits = BACKEND.limits(gmi_slice(SHARE))
    assert (limits.sm_count, limits.memory_bytes) == (42, 20 * 2**30)
    assert BACKEND.device(gmi_slice(SHARE)) == "cuda:0"


@pytest.mark.parametrize(
    ("sms", "bytes_", "inside"),
    [
        (42, 20 * 2**30, True),
        (42, 20 * 2**30 + 2**19, True),
        (42, 40 * 2**30, False),
        (56, 20 * 2**30, False),
    ],
)
def test_a_process_must_have_no_more_than_its_instance(monkeypatch, sms, bytes_, inside):
    """NVML states an instance's memory in whole MiB; CUDA may count a part of one more."""
    properties = SimpleNamespace(multi_processor_count=sms, total_memory=bytes_)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    if inside:
        BACKEND.verify(gmi_slice(SHARE))
    else:
        with pytest.raises(SliceError, match=rf"there is {sms} SMs and {bytes_} bytes as CUDA reports"):
            BACKEND.verify(gmi_slice(SHARE))


def test_an_unpartitioned_slice_cannot_be_entered():
    with pytest.raises(SliceError, match="a slice without a partition"):
        BACKEND.enter(gmi_slice(None))


def test_health_follows_the_instance(monkeypatch, tmp_path):
    fake = a_free_mig_gpu()
    gpu = installed(FakeDriver(fake), monkeypatch)
    (share,) = BACKEND.partition(gpu, (0.5,), Ledger.open("a run", tmp_path))
    assert BACKEND.health(gmi_slice(share)).state == "ok"
    fake.instances.clear()
    assert BACKEND.health(gmi_slice(share)).state == "lost"
    fake.lost = True
    assert "GPU is lost" in BACKEND.health(gmi_slice(share)).text


# Availability, from the inventory alone.


def on_paper(**changes) -> Gpu:
    return Gpu(
        **{
            "index": 0,
            "uuid": UUID,
            "name": "NVIDIA A100-SXM4-40GB",
            "memory_total_bytes": 40 * 2**30,
            "compute_capability": (8, 0),
            "mig_enabled": True,
            "mig_pending": True,
        }
        | changes
    )


IDLE = MigInstance(uuid="MIG-1", profile="3g.20gb", memory_bytes=20 * 2**30)


@pytest.mark.parametrize(
    ("gpu", "may", "usable", "text"),
    [
        (on_paper(), True, True, "instances can be created"),
        (on_paper(), False, False, "-cgi 9:0,9:4 -C"),
        (on_paper(mig_instances=(IDLE,)), False, True, "idle instances exist: 3g.20gb"),
        (on_paper(mig_enabled=False, mig_pending=False), True, False, "--gpu-reset"),
        (on_paper(mig_enabled=False, mig_pending=False, compute_capability=(9, 0)), True, False, "-mig 1`"),
        (on_paper(name="NVIDIA GeForce RTX 4090"), True, False, "has no MIG"),
        (None, True, False, "there is no GPU"),
    ],
)
def test_availability_says_why_and_what_to_run(gpu, may, usable, text):
    node = Node(name="n", cores=(0,), memory_total_bytes=1, may_configure_mig=may)
    answer = BACKEND.availability(node, gpu)
    assert answer.usable is usable
    assert text in f"{answer.reason} {answer.hint}"
    if gpu is not None and gpu.compute_capability == (9, 0):
        assert "reset" not in answer.hint  # Hopper needs none
