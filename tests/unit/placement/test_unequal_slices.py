"""Unequal GMIs: requested sizes, placed or rejected, and environments in proportion."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.capacity import NodeResources, plan_fits
from placement.errors import PlanError
from placement.plan import make_plan
from placement.types import Gpu, Machine, Node
from placement.unequal_slices import env_counts, pack


def node(name, num_cores, num_gpus=0):
    gpus = tuple(
        Gpu(index=i, uuid=f"GPU-{name}{i}", name="A100", memory_total_bytes=40 * 2**30)
        for i in range(num_gpus)
    )
    return Node(name=name, cores=tuple(range(num_cores)), memory_total_bytes=2**33, gpus=gpus)


def machine(*nodes):
    return Machine(nodes=nodes, origin="test")


def test_cores_are_split_as_requested_and_environments_follow():
    plan = make_plan(machine(node("a", 4)), num_envs=32, sizes=[3, 1])
    assert [gmi_slice.cores for gmi_slice in plan.slices] == [(0, 1, 2), (3,)]
    assert plan.envs == (48, 16)
    assert [bundle["CPU"] for bundle in plan.bundles()] == [3.0, 1.0]
    assert "4 cores split as requested, 3+1" in plan.table()
    assert "2 GMIs, 64 environments" in plan.table()


def test_a_slice_that_does_not_fit_goes_to_the_next_node():
    plan = make_plan(machine(node("a", 4), node("b", 2)), num_envs=8, sizes=[3, 2])
    assert [(gmi_slice.node, gmi_slice.cores) for gmi_slice in plan.slices] == [
        ("a", (0, 1, 2)),
        ("b", (0, 1)),
    ]


def test_gpus_are_filled_in_order():
    plan = make_plan(
        machine(node("a", 8, num_gpus=2)), backend="direct", num_envs=10, sizes=[0.7, 0.3, 0.5, 0.25]
    )
    assert [(gmi_slice.gpu_uuid, gmi_slice.gpu_fraction) for gmi_slice in plan.slices] == [
        ("GPU-a0", 0.7), ("GPU-a0", 0.3), ("GPU-a1", 0.5), ("GPU-a1", 0.25),
    ]  # fmt: skip
    assert [gmi_slice.num_threads for gmi_slice in plan.slices] == [2, 2, 2, 2]
    assert sum(plan.envs) == 40


@pytest.mark.parametrize(
    ("sizes", "gpus"),
    [
        ([0.6, 0.6, 0.4, 0.4], [0, 1, 0, 1]),
        ([0.4, 0.4, 0.6, 0.6], [0, 1, 0, 1]),
        ([0.3, 0.8, 0.7, 0.2], [1, 0, 1, 0]),  # the largest first: 0.8 and 0.2, 0.7 and 0.3
        # Best fit decreasing alone would put 0.4 + 0.4 together, and have no room for the last 0.3.
        ([0.3, 0.3, 0.3, 0.3, 0.4, 0.4], [0, 0, 1, 1, 0, 1]),
    ],
)
def test_sizes_that_do_not_fit_in_their_order_are_placed_in_another(sizes, gpus):
    plan = make_plan(machine(node("a", 8, num_gpus=2)), backend="direct", num_envs=10, sizes=sizes)
    assert [gmi_slice.gpu_uuid for gmi_slice in plan.slices] == [f"GPU-a{gpu}" for gpu in gpus]
    assert [gmi_slice.gpu_fraction for gmi_slice in plan.slices] == sizes
    assert plan.envs == env_counts(10, len(sizes), sizes)
    # Ray fills a used GPU before a free one: it needs those of one GPU one after the other.
    order = plan.bundle_order()
    assert sorted(order) == list(range(len(sizes)))
    assert [gpus[index] for index in order] == sorted(gpus, key=lambda gpu: gpus.index(gpu))
    assert plan_fits(plan, [NodeResources(name="a", node_id="a", total={"CPU": 8.0, "GPU": 2.0}, free={})])


def test_on_several_nodes_a_gmi_keeps_its_number_and_cores_are_its_own():
    nodes = machine(node("a", 4, num_gpus=1), node("b", 2, num_gpus=1))
    plan = make_plan(nodes, backend="direct", num_envs=10, sizes=[0.6, 0.6, 0.4, 0.4])
    assert [(gmi_slice.node, gmi_slice.cores) for gmi_slice in plan.slices] == [
        ("a", (0, 1)), ("b", (0,)), ("a", (2, 3)), ("b", (1,)),
    ]  # fmt: skip
    on_cores = make_plan(machine(node("a", 5), node("b", 5)), num_envs=10, sizes=[3, 3, 2, 2])
    assert [(gmi_slice.node, gmi_slice.cores) for gmi_slice in on_cores.slices] == [
        ("a", (0, 1, 2)), ("b", (0, 1, 2)), ("a", (3, 4)), ("b", (3, 4)),
    ]  # fmt: skip


@given(
    st.lists(st.integers(1, 10), min_size=1, max_size=7), st.lists(st.integers(1, 10), min_size=1, max_size=3)
)
def test_sizes_are_placed_exactly_when_any_way_to_place_them_exists(sizes, rooms):
    def fits(places):
        return all(
            sum(size for size, place in zip(sizes, places, strict=True) if place == room) <= have
            for room, have in enumerate(rooms)
        )

    found = pack(sizes, rooms)
    ways = itertools.product(range(len(rooms)), repeat=len(sizes))
    assert (found is not None) == any(map(fits, ways))
    assert found is None or fits(found)


def test_many_sizes_that_fit_nowhere_are_given_up_soon():
    # Thirty of 5 in twenty rooms of 9: one each fits. No end of exchanging equal ones is waited for.
    assert pack([5] * 30, [9] * 20) is None
    assert pack([5] * 20 + [4] * 20, [9] * 20) == [*range(20), *range(20)]


@pytest.mark.parametrize(
    ("sizes", "request_", "message"),
    [
        (
            [2, 3],
            {},
            r"slices=2\+3: they need 5 cores, each GMI on one node; no way to place them was found on 4 cores on a",
        ),
        ([1.5, 1], {}, "GMI 0 has 1.5 cores"),
        ([3, 1], {"num_gmis": 3}, "num_gmis=3 with slices for 2 GMIs"),
        ([3, 1], {"threads_per_gmi": 2}, "threads_per_gmi=2 with slices"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(sizes, request_, message):
    with pytest.raises(PlanError, match=message):
        make_plan(machine(node("a", 4)), num_envs=8, sizes=sizes, **request_)


def test_shares_beyond_the_gpus_are_refused():
    with pytest.raises(
        PlanError, match=r"they need 1.2 GPUs, each GMI on one GPU; no way to place them was found on 1 GPU"
    ):
        make_plan(machine(node("a", 4, 1)), backend="direct", num_envs=8, sizes=[0.6, 0.6])
    with pytest.raises(PlanError, match=r"GMI 1 has 2 of a GPU"):
        make_plan(machine(node("a", 4, 1)), backend="direct", num_envs=8, sizes=[0.6, 2])


@given(
    st.integers(1, 200),
    st.lists(st.floats(0.01, 64, allow_nan=False, allow_infinity=False), min_size=1, max_size=12),
)
def test_environments_are_shared_by_largest_remainder(num_envs, sizes):
    counts = env_counts(num_envs, len(sizes), sizes)
    assert sum(counts) == num_envs * len(sizes)
    assert min(counts) >= 1
    quotas = [num_envs * size * len(sizes) / sum(sizes) for size in sizes]
    if min(quotas) >= 1:
        assert all(abs(count - quota) < 1 + 1e-6 for count, quota in zip(counts, quotas, strict=True))
    by_size = [count for _, count in sorted(zip(sizes, counts, strict=True))]
    assert all(later >= earlier - 1 for earlier, later in itertools.pairwise(by_size))


def test_environments_by_hand():
    assert env_counts(32, 3, [12, 3, 1]) == (72, 18, 6)  # 96 x 3/4, 3/16, 1/16
    assert env_counts(3, 3, [100, 1, 1]) == (7, 1, 1)  # 8.8 and 0.09 each
    assert env_counts(5, 2, [1, 2]) == (3, 7)  # 3.33 and 6.67
    assert env_counts(1, 2, [9, 1]) == (1, 1)
    assert env_counts(32, 3, [12, 3, 1], [0]) == (18, 6)  # as many as with the first
    assert env_counts(32, 3, [], [0, 2]) == (32,)


@given(st.integers(1, 50), st.integers(1, 9), st.floats(0.1, 8))
def test_equal_sizes_get_equal_numbers(num_envs, num_gmis, size):
    assert env_counts(num_envs, num_gmis, [size] * num_gmis) == (num_envs,) * num_gmis
