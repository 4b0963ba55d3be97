"""Backend selection by `auto` on recorded machines, and errors of unavailable backends."""

from dataclasses import replace
from pathlib import Path

import pytest

from placement.backend_choice import choose_backend
from placement.errors import PlanError
from placement.inventory import load_machine
from placement.inventory.nvml import select_visible
from placement.plan import make_plan, predict_limits
from placement.types import GpuProcess, Machine, MigInstance, Node

MACHINES = Path(__file__).parents[2] / "data" / "machines"
TRAINING = ("simulator", "agent", "trainer")
SERVING = ("simulator", "agent")
GIB = 2**30


def machine(name: str) -> Machine:
    return load_machine(MACHINES / f"{name}.json")


def changed(name: str, /, *, node=None, **gpu) -> Machine:
    """The recorded machine with something about its node and all its GPUs changed."""
    found = machine(name)
    nodes = tuple(
        replace(one, gpus=tuple(replace(each, **gpu) for each in one.gpus), **(node or {}))
        for one in found.nodes
    )
    return replace(found, nodes=nodes)


@pytest.mark.parametrize(
    ("name", "roles", "per_gpu", "backend", "why"),
    [
        ("cpu2", TRAINING, 1, "cpu", "there is no GPU"),
        ("v100x1", TRAINING, 3, "mps", "mps for training"),
        ("v100x1", SERVING, 3, "mps", "mps for serving; not mig, since"),
        ("a100_40x8", TRAINING, 3, "mps", "exchange gradients freely"),
        ("a100_40x8", TRAINING, 1, "direct", "each GMI has a GPU to itself"),
        ("h100x8", TRAINING, 2, "mps", "mps for training"),
        ("rtx4090x1", SERVING, 2, "mps", "has no MIG"),
        ("a100_40x1_mig_cut", SERVING, 2, "mig", "its isolation pays"),
        ("a100_40x1_mig_cut", TRAINING, 2, "mig", "GPUs are in MIG mode; not mps, since"),
        (
            "a100_40x1_mps_taken",
            TRAINING,
            2,
            "direct",
            "not mps, since an MPS daemon that this run did not start",
        ),
    ],
)
def test_auto_follows_the_papers_where_the_machine_allows(name, roles, per_gpu, backend, why):
    chosen, reason, unused = choose_backend(machine(name), "auto", roles=roles, gmis_per_gpu=per_gpu)
    assert (chosen, unused) == (backend, ())
    assert why in reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"node": {"mps_control": False}}, "has no nvidia-cuda-mps-control on PATH"),
        ({"compute_capability": (6, 0)}, "has compute capability 6.0, and MPS shares need 7.0"),
        ({"mps_running": True}, "an MPS daemon that this run did not start is there for GPU-"),
    ],
)
def test_where_mps_cannot_be_used_training_shares_plainly_and_the_plan_says_why(changes, reason):
    plan = make_plan(changed("h100x1", **changes), num_envs=1, gmis_per_gpu=2)
    assert plan.backend == "direct"
    assert reason in plan.reason
    assert reason in plan.table()


@pytest.mark.parametrize(
    ("backend", "changes", "texts"),
    [
        ("mps", {"mps_running": True}, ("backend='mps'", "did not start", "rayagi cleanup", "echo quit")),
        ("mps", {"mig_enabled": True}, ("is in MIG mode", "nvidia-smi -i GPU-", "-mig 0")),
        ("mps", {"compute_mode": "prohibited"}, ("admits no process", "-c DEFAULT")),
        ("direct", {"mig_enabled": True}, ("is in MIG mode", "CUDA_VISIBLE_DEVICES=MIG-")),
        ("green", {"node": {"cuda_version": (12, 2)}}, ("supports CUDA 12.2", "need 12.4", "550")),
        ("green", {"sm_count": None}, ("number of SMs of GPU-", "is not known")),
    ],
)
def test_an_unavailable_backend_is_refused_with_a_hint(backend, changes, texts):
    with pytest.raises(PlanError) as caught:
        make_plan(changed("h100x1", **changes), num_envs=1, gmis_per_gpu=2, backend=backend)
    for text in texts:
        assert text in str(caught.value)


EXCLUSIVE = {"compute_mode": "exclusive_process", "node": {"mps_control": False}}


def test_a_gpu_in_exclusive_mode_has_one_process_unless_mps_shares_it():
    """Clusters set this mode; a second context would end with "all CUDA-capable devices are busy or unavailable"."""
    assert make_plan(changed("h100x1", **EXCLUSIVE), num_envs=1).backend == "direct"
    for backend in ("auto", "direct", "green"):
        with pytest.raises(
            PlanError, match=r"2 GMIs on GPU-.*: it admits one process without MPS .*backend='mps'"
        ):
            make_plan(changed("h100x1", **EXCLUSIVE), num_envs=1, gmis_per_gpu=2, backend=backend)
    with_mps = changed("h100x1", compute_mode="exclusive_process")
    assert make_plan(with_mps, num_envs=1, gmis_per_gpu=2).backend == "mps"
    # Within an administrator's MPS server, which then is the one process.
    theirs = changed("h100x1", **EXCLUSIVE, mps_running=True)
    assert make_plan(theirs, num_envs=1, gmis_per_gpu=2).backend == "direct"


def test_a_gpu_that_somebody_has_exclusively_is_left_alone():
    theirs = (GpuProcess(pid=41),)
    with pytest.raises(PlanError, match=r"process 41 uses GPU-.* exclusively"):
        make_plan(changed("h100x1", **EXCLUSIVE, processes=theirs), num_envs=1)
    just_ending = (GpuProcess(pid=41, of_ray=True),)
    assert make_plan(changed("h100x1", **EXCLUSIVE, processes=just_ending), num_envs=1).backend == "direct"


def test_a_model_in_mig_mode_that_is_not_in_the_table_is_used_by_its_instances_one_by_one():
    idle = MigInstance(uuid="MIG-2", profile="3g.47gb", memory_bytes=47 * GIB)
    instances = (replace(idle, uuid="MIG-1", in_use=True), idle)
    strange = changed("h100x1", name="NVIDIA H100 NVL", mig_enabled=True, mig_instances=instances)
    with pytest.raises(
        PlanError, match=r"not mig, since NVIDIA H100 NVL .* not known. Set CUDA_VISIBLE_DEVICES=MIG-2:"
    ):
        make_plan(strange, num_envs=1)
    (node,) = strange.nodes
    alone = replace(strange, nodes=(replace(node, gpus=select_visible(node.gpus, "MIG-2")),))
    assert make_plan(alone, num_envs=1).slices[0].gpu_uuid == "MIG-2"


def test_a_gpu_that_nothing_can_use_is_an_error_with_every_reason():
    with pytest.raises(
        PlanError, match=r"backend='auto': not mps, since .* not direct, since .* admits no process"
    ):
        choose_backend(changed("h100x1", compute_mode="prohibited"), "auto", roles=TRAINING, gmis_per_gpu=2)


@pytest.mark.parametrize("backend", ["mps", "green", "direct"])
def test_slices_of_every_gpu_backend_ask_ray_for_fractions(backend):
    plan = make_plan(machine("h100x8"), num_envs=1, gmis_per_gpu=3, backend=backend)
    assert {gmi_slice.backend for gmi_slice in plan.slices} == {backend}
    assert plan.bundles()[0]["GPU"] == 0.3333
    assert plan.slices[0].label() == f"{backend}[{plan.slices[0].gpu_uuid[:12]} x0.33]"


@pytest.mark.parametrize(
    ("request_", "backend", "memory_gib"),
    [
        ({}, "direct", [80, 78]),
        ({"gmis_per_gpu": 2}, "mps", [40, 40, 39, 39]),
        ({"backend": "mps"}, "mps", [80, 78]),
    ],
)
def test_gpus_that_cannot_be_used_are_left_out_with_a_line_for_each(request_, backend, memory_gib):
    plan = make_plan(machine("a100_80x4_in_use"), num_envs=1, **request_)
    assert plan.backend == backend
    # Of 80 GiB each: 80, 78 and 1 are free, and the last admits nobody.
    assert [plan.memory_bytes(index) / GIB for index in range(plan.num_gmis)] == memory_gib
    limits = predict_limits(plan.machine, plan.slices)
    assert backend == "direct" or [limit.memory_bytes / GIB for limit in limits] == memory_gib
    full, closed = plan.table().splitlines()[-2:]
    assert full == (
        "Without GPU 2 of in-use: others use its memory (process 5002), 1.0 of 80.0 GiB are free. "
        "Wait until they have ended."
    )
    assert closed.startswith("Without GPU 3 of in-use: GPU-000c0003")
    assert "admits no process" in closed
    assert {gpu.index for gpu in plan.unused} == {2, 3}


def mixed(**first) -> Machine:
    """Eight GPUs, the first of which is different."""
    found = machine("h100x8")
    (node,) = found.nodes
    return replace(found, nodes=(replace(node, gpus=(replace(node.gpus[0], **first), *node.gpus[1:])),))


def test_where_others_have_all_gpus_there_are_still_the_cores():
    """As a workstation's only GPU, whose memory a server of language models has."""
    taken = changed("rtx4090x1", memory_free_bytes=GIB, processes=(GpuProcess(pid=41),))
    with pytest.raises(PlanError, match=r"process 41.* Wait until they have ended, or use backend='cpu'\.$"):
        make_plan(taken, num_envs=1)
    with pytest.raises(PlanError, match=r"Wait until they have ended\.$"):
        make_plan(taken, num_envs=1, backend="direct")
    assert make_plan(taken, num_envs=1, backend="cpu").backend == "cpu"


def test_auto_leaves_out_a_gpu_that_would_keep_the_others_waiting():
    """As the small one for the display of a workstation; a backend that was asked for takes it too."""
    plan = make_plan(mixed(sm_count=6), num_envs=1)
    assert (plan.backend, plan.num_gmis) == ("direct", 7)
    assert [(gpu.index, gpu.reason) for gpu in plan.unused] == [
        (0, "it has 6 SMs, another one 132, and GMIs wait for the slowest")
    ]
    assert make_plan(mixed(sm_count=6), num_envs=1, backend="direct").num_gmis == 8
    assert make_plan(mixed(sm_count=66), num_envs=1).num_gmis == 8
    assert make_plan(mixed(sm_count=None), num_envs=1).num_gmis == 8
    # Another one that cannot be used changes nothing.
    (node,) = mixed(sm_count=6).nodes
    busy = replace(node.gpus[1], compute_mode="prohibited")
    others = replace(mixed(), nodes=(replace(node, gpus=(node.gpus[0], busy, *node.gpus[2:])),))
    plan = make_plan(others, num_envs=1)
    assert ([gpu.index for gpu in plan.unused], plan.num_gmis) == ([1, 0], 6)
    # It is better than none.
    large = replace(node.gpus[1], compute_mode="prohibited")
    plan = make_plan(replace(mixed(), nodes=(replace(node, gpus=(node.gpus[0], large)),)), num_envs=1)
    assert [gpu_slice.gpu_uuid for gpu_slice in plan.slices] == [node.gpus[0].uuid]


def test_the_backend_that_the_most_gpus_allow_is_taken():
    # Direct could use all eight: nothing is left out for MPS.
    plan = make_plan(mixed(mps_running=True), num_envs=1, gmis_per_gpu=2)
    assert (plan.backend, plan.num_gmis, plan.unused) == ("direct", 16, ())
    # Only its instances could use the first one, and MPS seven.
    plan = make_plan(mixed(mig_enabled=True), num_envs=1, gmis_per_gpu=2)
    assert (plan.backend, plan.num_gmis) == ("mps", 14)
    assert [(gpu.index, "is in MIG mode" in gpu.reason) for gpu in plan.unused] == [(0, True)]
    assert len({gmi_slice.gpu_uuid for gmi_slice in plan.slices}) == 7
    # A backend that was asked for takes what allows it; sizes and numbers are of the others.
    plan = make_plan(mixed(compute_mode="prohibited"), num_envs=1, backend="direct", sizes=[0.6, 0.4] * 7)
    assert [gpu.index for gpu in plan.unused] == [0]
    with pytest.raises(PlanError, match="7 GPUs with gmis_per_gpu=1 gives 7 GMIs"):
        make_plan(mixed(compute_mode="prohibited"), num_envs=1, num_gmis=8)


def test_memory_in_use_counts_only_outside_of_mig_mode_and_from_a_tenth_on():
    tenth = machine("h100x8").nodes[0].gpus[0].memory_total_bytes // 10
    assert make_plan(mixed(memory_free_bytes=tenth + 1), num_envs=1).unused == ()
    assert [gpu.index for gpu in make_plan(mixed(memory_free_bytes=tenth - 1), num_envs=1).unused] == [0]
    alone = changed("h100x1", memory_free_bytes=0)
    with pytest.raises(PlanError, match=r"backend='auto': not direct, since others use its memory, 0.0 of"):
        make_plan(alone, num_envs=1)


def test_idle_instances_of_a_gpu_that_is_cut_already_are_used():
    cut = machine("a100_40x1_mig_cut")
    plan = make_plan(cut, num_envs=8)
    # 2g has 2/7 of the SMs and 2/8 of the memory, 1g 1/7 and 1/8.
    assert [gmi_slice.gpu_fraction for gmi_slice in plan.slices] == [0.25, 0.125]
    assert [plan.memory_bytes(index) / GIB for index in range(2)] == [10, 5]
    assert plan.envs == (8, 8)
    assert "gmi.slices = [0.25, 0.125] would share the environments in proportion" in plan.reason
    assert [make_plan(cut, num_envs=8, gmis_per_gpu=count).num_gmis for count in (1, 2)] == [1, 2]
    with pytest.raises(PlanError, match=r"of its 3 MIG instances, free are 1 x 2g.10gb \+ 1 x 1g.5gb"):
        make_plan(cut, num_envs=8, gmis_per_gpu=3)
    # With the permission too, where no even share fits next to the instances.
    allowed = changed("a100_40x1_mig_cut", node={"may_configure_mig": True})
    assert [gmi_slice.gpu_fraction for gmi_slice in make_plan(allowed, num_envs=8).slices] == [0.25, 0.125]


def test_a_gpu_whose_instances_are_all_in_use_is_left_out():
    gpus = changed("a100_40x1_mig_cut", node={"may_configure_mig": True}).nodes[0].gpus
    busy = tuple(replace(one, in_use=True) for one in gpus[0].mig_instances[:2])
    whole = MigInstance(uuid="MIG-9", profile="7g.40gb", start=0, size=8, memory_bytes=40 * GIB, in_use=True)
    empty = replace(gpus[0], uuid="GPU-empty", index=1, mig_instances=())
    full = replace(gpus[0], uuid="GPU-full", index=2, mig_instances=(whole,))
    node = Node(
        name="n", cores=tuple(range(8)), memory_total_bytes=2**34, may_configure_mig=True,
        gpus=(replace(gpus[0], mig_instances=busy), empty, full),
    )  # fmt: skip
    plan = make_plan(Machine(nodes=(node,), origin="test"), num_envs=1, gmis_per_gpu=2, backend="mig")
    assert {gmi_slice.gpu_uuid for gmi_slice in plan.slices} == {"GPU-empty"}
    # Two GMIs of a template would have a GPU each; where one has no room for a whole share, they share the other.
    taken = replace(gpus[0], mig_instances=busy)
    apart = make_plan(
        Machine(nodes=(replace(node, gpus=(taken, empty)),), origin="test"),
        num_envs=1, template="ea_t", backend="mig",
    )  # fmt: skip
    assert [gmi_slice.gpu_uuid for gmi_slice in apart.slices] == ["GPU-empty", "GPU-empty"]
    # Beside 3g and 2g one 1g fits; beside 7g nothing.
    assert {gpu.index: gpu.reason for gpu in plan.unused} == {
        0: "it holds at most 1 MIG instance with memory slices 0-5 taken",
        2: "the MIG instances on GPU-full are in use, and leave no room for another",
    }
