from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from placement.equal_slices import spread_over_nodes
from placement.errors import PlanError
from placement.inventory import load_machine
from placement.plan import make_plan
from placement.types import Gpu, GpuProcess, Machine, Node

MACHINES = Path(__file__).parents[2] / "data" / "machines"


def machine(name: str) -> Machine:
    return load_machine(MACHINES / f"{name}.json")


def test_one_gmi_per_core_is_the_default_without_a_gpu():
    plan = make_plan(machine("cpu2"), num_envs=32)
    assert plan.backend == "cpu"
    assert [gmi_slice.cores for gmi_slice in plan.slices] == [(0,), (1,)]
    assert plan.bundles() == [{"CPU": 1.0}, {"CPU": 1.0}]
    assert plan.strategy() == "STRICT_PACK"


def test_the_default_stops_at_eight_gmis_and_shares_the_cores():
    plan = make_plan(machine("cpu16"), num_envs=32)
    assert [gmi_slice.cores for gmi_slice in plan.slices] == [(2 * i, 2 * i + 1) for i in range(8)]


def test_cores_that_do_not_divide_evenly_are_left_and_said_so():
    plan = make_plan(machine("cpu16"), num_envs=32, num_gmis=3)
    assert [gmi_slice.num_threads for gmi_slice in plan.slices] == [5, 5, 5]
    assert "1 core left for Ray and the driver" in plan.reason


def test_threads_per_gmi_decides_how_many_gmis_fit_by_default():
    plan = make_plan(machine("cpu16"), num_envs=32, threads_per_gmi=5)
    assert [gmi_slice.cores for gmi_slice in plan.slices] == [
        (0, 1, 2, 3, 4),
        (5, 6, 7, 8, 9),
        (10, 11, 12, 13, 14),
    ]


def test_a_gpu_makes_auto_choose_direct_with_one_gmi_and_all_cores():
    plan = make_plan(machine("a100x1"), num_envs=2048)
    assert plan.backend == "direct"
    assert plan.reason.startswith("direct: each GMI has a GPU to itself")
    assert plan.bundles() == [{"CPU": 12.0, "GPU": 1.0}]
    assert plan.slices[0].gpu_uuid == plan.machine.nodes[0].gpus[0].uuid


def test_gmis_per_gpu_share_each_gpu_and_the_cores_evenly():
    plan = make_plan(machine("h100x8"), num_envs=2048, gmis_per_gpu=3)
    assert plan.num_gmis == 24
    # 192 cores / 24 GMIs = 8 cores; 1/3 rounded down to 1e-4
    assert plan.bundles()[0] == {"CPU": 8.0, "GPU": 0.3333}
    uuids = [gpu.uuid for gpu in plan.machine.nodes[0].gpus]
    assert [gmi_slice.gpu_uuid for gmi_slice in plan.slices] == [uuid for uuid in uuids for _ in range(3)]


@pytest.mark.parametrize(("shares", "fraction"), [(1, 1.0), (2, 0.5), (3, 0.3333), (6, 0.1666), (7, 0.1428)])
def test_fractions_are_rounded_down_to_rays_step(shares: int, fraction: float):
    plan = make_plan(machine("h100x8"), num_envs=1, gmis_per_gpu=shares)
    assert plan.slices[0].gpu_fraction == fraction
    assert shares * plan.slices[0].gpu_fraction <= 1.0


def test_fewer_gmis_than_shares_fill_gpus_in_order():
    plan = make_plan(machine("h100x8"), num_envs=1, gmis_per_gpu=2, num_gmis=3)
    uuids = [gpu.uuid for gpu in plan.machine.nodes[0].gpus]
    assert [gmi_slice.gpu_uuid for gmi_slice in plan.slices] == [uuids[0], uuids[0], uuids[1]]
    assert "2 GMIs per GPU on 2 of 8 GPUs" in plan.reason


def test_gmis_of_two_nodes_are_ordered_by_node():
    plan = make_plan(machine("two_nodes_h100x8"), num_envs=1)
    assert [gmi_slice.node for gmi_slice in plan.slices] == ["h100-1"] * 8 + ["h100-2"] * 8
    assert plan.strategy() == "PACK"
    assert len({gmi_slice.gpu_uuid for gmi_slice in plan.slices}) == 16


def test_cpu_gmis_go_where_the_poorest_of_them_gets_most_cores():
    # 6 and 2 cores, 4 GMIs: 3 + 1 gives everyone 2 cores; 2 + 2 would give two of them 1
    nodes = (
        Node(name="large", cores=tuple(range(6)), memory_total_bytes=8),
        Node(name="small", cores=(0, 1), memory_total_bytes=8),
    )
    plan = make_plan(Machine(nodes=nodes, origin="test"), num_envs=1, num_gmis=4)
    assert [gmi_slice.node for gmi_slice in plan.slices] == ["large", "large", "large", "small"]
    assert [gmi_slice.num_threads for gmi_slice in plan.slices] == [2, 2, 2, 2]


def test_ray_grants_limit_the_cores_that_are_planned():
    node = Node(name="n", cores=(4, 5, 6, 7), memory_total_bytes=8, ray_cpus=2.0)
    plan = make_plan(Machine(nodes=(node,), origin="ray"), num_envs=1)
    assert [gmi_slice.cores for gmi_slice in plan.slices] == [(4,), (5,)]


def test_cores_that_only_count_give_threads_without_pinning():
    node = Node(name="n", cores=(0, 1, 2, 3), memory_total_bytes=8, pinnable=False)
    plan = make_plan(Machine(nodes=(node,), origin="local"), num_envs=1, num_gmis=2)
    assert [(gmi_slice.cores, gmi_slice.num_threads) for gmi_slice in plan.slices] == [((), 2), ((), 2)]
    assert plan.slices[0].label() == "cpu[2 threads]"


def test_the_environment_of_a_cpu_slice_holds_every_thread_pool_and_hides_gpus():
    plan = make_plan(machine("a100x1"), num_envs=1, backend="cpu", num_gmis=4)
    assert plan.slices[0].environment == {
        "OMP_NUM_THREADS": "3",
        "MKL_NUM_THREADS": "3",
        "OPENBLAS_NUM_THREADS": "3",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "2000",
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_the_table_is_aligned_and_ends_with_the_reason():
    table = make_plan(machine("cpu16"), num_envs=64, num_gmis=2, threads_per_gmi=4).table()
    assert table.splitlines() == [
        "GMI  node         slice     roles                    envs  threads  memory",
        "0    workstation  cpu[0-3]  simulator+agent+trainer  64    4        32.0 GiB",
        "1    workstation  cpu[4-7]  simulator+agent+trainer  64    4        32.0 GiB",
        "dp_only on cpu: 2 GMIs, 128 environments. cpu since there is no GPU; as many GMIs as asked, "
        "8 cores shared evenly, 8 cores left for Ray and the driver.",
    ]


def test_memory_of_a_gpu_slice_is_its_fraction_of_what_is_free_on_the_gpu():
    plan = make_plan(machine("a100x1"), num_envs=1, gmis_per_gpu=2)
    assert plan.memory_bytes(0) == 20180 * 2**20  # of 40960 MiB, 40360 are free


def test_what_is_in_use_by_others_leaves_less_for_the_shares_together():
    # 100 bytes: 40 are free, Ray's workers have 30, others 30.
    used = (
        GpuProcess(pid=1, memory_used_bytes=30, of_ray=True),
        GpuProcess(pid=2, memory_used_bytes=30),
        GpuProcess(pid=3, of_ray=True),
    )
    gpu = Gpu(
        index=0, uuid="GPU-0", name="fake", memory_total_bytes=100, memory_free_bytes=40, processes=used
    )
    assert gpu.available_bytes == 70
    # Half of the GPU is 50 and alone has them; two halves have 70 together.
    assert (gpu.share_bytes(0.5, 0.5), gpu.share_bytes(0.5, 1.0), gpu.share_bytes(1.0, 1.0)) == (50, 35, 70)
    assert replace(gpu, mig_enabled=True).available_bytes == 100  # its instances say what they have
    assert replace(gpu, memory_free_bytes=None).available_bytes == 100
    assert replace(gpu, memory_free_bytes=99).available_bytes == 100


def test_a_plan_becomes_json():
    plan = make_plan(machine("a100x1"), num_envs=16, gmis_per_gpu=2)
    content = json.loads(json.dumps(plan.to_dict()))
    assert content["bundles"] == [{"CPU": 6.0, "GPU": 0.5}] * 2
    assert content["worker_types"] == [["simulator", "agent", "trainer"]] * 2
    assert content["slices"][1]["cores"] == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("name", "asked", "texts"),
    [
        ("cpu2", {"num_gmis": 3}, ("num_gmis=3", "2 cores", "Set num_gmis to 2 or less")),
        ("cpu2", {"num_gmis": 0}, ("num_gmis=0", "at least 1", "Set num_gmis to 1 or more")),
        ("cpu2", {"num_gmis": -4}, ("num_gmis=-4", "at least 1")),
        ("cpu2", {"num_envs": 0}, ("num_envs=0", "at least 1")),
        ("cpu2", {"threads_per_gmi": 0}, ("threads_per_gmi=0", "at least 1")),
        (
            "cpu2",
            {"threads_per_gmi": 3},
            ("threads_per_gmi=3", "2 cores", "Set threads_per_gmi to 2 or less"),
        ),
        ("cpu16", {"num_gmis": 4, "threads_per_gmi": 5}, ("num_gmis=4 with threads_per_gmi=5", "3 GMIs")),
        ("cpu2", {"gmis_per_gpu": 2}, ("gmis_per_gpu=2", "no GPUs", "Use num_gmis instead")),
        ("cpu2", {"backend": "direct"}, ("backend='direct'", "no GPU", "Use backend='cpu'")),
        ("cpu2", {"backend": "vgpu"}, ("backend='vgpu'", "cpu, direct")),
        ("cpu2", {"template": "dp_np"}, ("template='dp_np'", "dp_only")),
        ("a100x1", {"num_gmis": 2}, ("num_gmis=2", "1 GPU ", "num_gmis=1 or gmis_per_gpu=2")),
        ("h100x8", {"num_gmis": 17, "gmis_per_gpu": 2}, ("num_gmis=17", "16", "gmis_per_gpu=3")),
        ("a100x1", {"gmis_per_gpu": 13}, ("13 GMIs", "12 cores", "at most 12 GMIs")),
        ("a100x1", {"threads_per_gmi": 24}, ("24 cores", "12 cores", "Set threads_per_gmi to 12 or less")),
    ],
)
def test_what_does_not_fit_is_refused_with_value_limit_and_hint(name, asked, texts):
    with pytest.raises(PlanError) as caught:
        make_plan(machine(name), **{"num_envs": 1} | asked)
    for text in texts:
        assert text in str(caught.value)


def test_a_logical_ray_machine_is_named_as_such():
    node = Node(name="n", cores=(0, 1), memory_total_bytes=8, ray_cpus=8.0)
    with pytest.raises(PlanError, match="Ray was started with 8 CPUs, more than the cores that exist"):
        make_plan(Machine(nodes=(node,), origin="ray"), num_envs=1, num_gmis=8)


def test_gmis_are_left_out_by_index_and_the_plan_says_so():
    whole = make_plan(machine("cpu16"), num_envs=32, num_gmis=4)
    plan = make_plan(machine("cpu16"), num_envs=32, num_gmis=4, left_out=[3, 1])
    assert plan.slices == (whole.slices[0], whole.slices[2])
    assert (plan.num_gmis, plan.envs, plan.worker_types) == (2, (32, 32), whole.worker_types[:2])
    assert plan.left_out == (whole.slices[1], whole.slices[3])
    assert plan.reason.endswith("; of its 4 GMIs without 1 (cpu[4-7]), 3 (cpu[12-15])")


@pytest.mark.parametrize(
    ("left_out", "request_", "message"),
    [
        (
            [4],
            {},
            r"left_out=\[4\]: the plan has 4 GMIs, and at least one has to be left\. Give indices from 0 to 3",
        ),
        ([-1], {}, "Give indices from 0 to 3"),
        ([0, 1, 2, 3], {}, "at least one has to be left"),
        ([0], {"template": "ea_t"}, "it is for dp_only, whose GMIs are alike, not for ea_t"),
    ],
)
def test_what_cannot_be_left_out_is_refused(left_out, request_, message):
    with pytest.raises(PlanError, match=message):
        make_plan(machine("cpu16"), num_envs=32, num_gmis=4, left_out=left_out, **request_)


@pytest.mark.parametrize("backend", ["auto", "mps"])
def test_more_gmis_per_gpu_than_ray_has_fractions_are_refused(backend):
    with pytest.raises(PlanError, match="smallest fraction of a GPU"):
        make_plan(machine("h100x8"), num_envs=32, gmis_per_gpu=10_001, backend=backend)


@pytest.mark.parametrize("template", ["decoupled", "ea_t"])
def test_more_collectors_than_a_trainer_can_have_are_refused(template):
    node = Node(name="n", cores=tuple(range(300)), memory_total_bytes=2**40)
    big = Machine(nodes=(node,), origin="test")
    assert make_plan(big, num_envs=1, num_gmis=257, template=template, num_learners=1).num_gmis == 257
    with pytest.raises(PlanError, match=r"257 GMIs that collect .*: a trainer takes rollouts of at most 256"):
        make_plan(big, num_envs=1, num_gmis=258, template=template, num_learners=1)
    assert make_plan(big, num_envs=1, num_gmis=258).num_gmis == 258


@pytest.mark.parametrize(
    ("template", "options", "others"),
    [
        ("e_at", {"num_learners": 1}, 1),
        ("e_at", {"num_learners": 2}, 2),
        ("dp_mp", {"num_agents": 1, "num_learners": 1}, 2),
        ("mp_dp", {"num_agents": 2, "serving": True}, 2),
    ],
)
def test_more_simulators_than_an_agent_can_step_are_refused(template, options, others):
    node = Node(name="n", cores=tuple(range(600)), memory_total_bytes=2**40)
    big = Machine(nodes=(node,), origin="test")
    agents = options.get("num_agents", options.get("num_learners"))
    most = 256 * agents + others
    assert make_plan(big, num_envs=1, num_gmis=most, template=template, **options).num_gmis == most
    with pytest.raises(
        PlanError, match=rf"{256 * agents + 1} simulators with {agents} agents?.* at most 256"
    ):
        make_plan(big, num_envs=1, num_gmis=most + 1, template=template, **options)


def test_equal_nodes_get_the_remainder_from_the_first_on():
    assert spread_over_nodes([4, 4], 3, 1) == [2, 1]
