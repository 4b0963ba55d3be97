from collections import Counter

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from collectives.compositions import (
    compose,
    composition_names,
    device_ip,
    device_rp,
    har,
    hybrid,
    ip_only,
    is_composition_name,
    mpr,
    mrr,
    rp_only,
    select_preprint,
)
from collectives.errors import CompositionError
from collectives.layout import Layout
from tests.unit.collectives.schedule_reference import execute

layouts = st.lists(st.lists(st.integers(1, 10), min_size=1, max_size=8), min_size=1, max_size=4).map(
    Layout.from_counts
)


@st.composite
def placed_layouts(draw):
    """Members numbered in any order over nodes and devices."""
    layout = draw(layouts.filter(lambda drawn: drawn.world_size <= 24))
    order = draw(st.permutations(range(layout.world_size)))
    return Layout(tuple(tuple(tuple(order[r] for r in device) for device in node) for node in layout.nodes))


def steps(schedule):
    return [(step.op, step.primitive, step.groups) for step in schedule.steps]


def applying(layout):
    for name in (*composition_names(layout), "mpr", "mrr", "hybrid(0)"):
        try:
            yield compose(name, layout)
        except CompositionError:
            continue


def assert_reduces(schedule, numel=5):
    """Against float64 sums, and bitwise equal on all ranks."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(schedule.layout.world_size, numel, generator=generator)
    tensors = list(inputs.clone())
    execute(schedule, tensors)
    torch.testing.assert_close(tensors[0], inputs.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)


@settings(max_examples=60, deadline=None)
@given(layouts)
def test_every_composition_that_applies_is_right(layout):
    schedules = list(applying(layout))
    assert {"ip_only", "har", "mpr", "hybrid(0)"} <= {schedule.composition for schedule in schedules}
    for schedule in schedules:
        assert_reduces(schedule)


@settings(max_examples=40, deadline=None)
@given(placed_layouts())
def test_members_may_be_numbered_in_any_order(layout):
    for schedule in applying(layout):
        assert_reduces(schedule)


@settings(max_examples=40, deadline=None)
@given(layouts, st.sampled_from([0, 1, 3, 257]), st.sampled_from(["sum", "mean", "max"]))
def test_sizes_and_operations(layout, numel, op):
    schedule = har(layout)
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(layout.world_size, numel, generator=generator, dtype=torch.float64)
    tensors = list(inputs.clone())
    execute(schedule, tensors, op)
    expected = {"sum": inputs.sum(0), "mean": inputs.mean(0), "max": inputs.amax(0)}[op]
    torch.testing.assert_close(tensors[0], expected)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)


def test_ip_only_is_one_step():
    assert steps(ip_only(Layout.parse("2x2"))) == [("all_reduce", "ip", ((0, 1, 2, 3),))]


def test_rp_only_is_m_rings_and_one_across_on_distinct_devices():
    # GMI-DRL Figure 7b with n = 4, m = 3: ring j holds the j-th GMI of each device.
    assert steps(rp_only(Layout.parse("4x3"))) == [
        ("reduce", "rp", ((0, 3, 6, 9), (4, 1, 7, 10), (8, 2, 5, 11))),
        ("all_reduce", "rp", ((0, 4, 8),)),
        ("broadcast", "rp", ((0, 3, 6, 9), (4, 1, 7, 10), (8, 2, 5, 11))),
    ]


def test_rp_only_with_one_gmi_per_device_is_one_ring():
    assert steps(rp_only(Layout.parse("3x1"))) == [("all_reduce", "rp", ((0, 1, 2),))]


@given(st.integers(1, 8), st.integers(1, 10))
def test_rp_only_needs_m_at_most_n(n, m):
    layout = Layout.from_counts([[m] * n])
    if m <= n:
        assert rp_only(layout).primitives <= {"rp"}
    else:
        with pytest.raises(CompositionError, match=f"m = {m} rings .* n = {n}"):
            rp_only(layout)


def test_rp_only_on_unequal_devices_where_the_rings_have_distinct_ends():
    # Rings (0 3 5), (1 4 6), (2 7): the last has no GMI on device 1.
    assert steps(rp_only(Layout.parse("3+2+3")))[1] == ("all_reduce", "rp", ((0, 4, 7),))
    with pytest.raises(CompositionError, match="unequal"):
        rp_only(Layout.parse("3+1+1"))  # rings (1) and (2) both end on device 0


def test_hybrid_leaves_n_times_m_minus_k_plus_k_members_to_shared_memory():
    # GMI-DRL §3.2.1: the second step has n (m - k) + k members. n = 4, m = 3, k = 2: 4 + 2 = 6.
    layout = Layout.parse("4x3")
    for k in range(1, 4):
        rings, memory, back = hybrid(layout, k).steps
        assert [len(ring) for ring in rings.groups] == [4] * k
        assert [len(group) for group in memory.groups] == [4 * (3 - k) + k]
        assert (rings.op, memory.op, back.op) == ("reduce", "all_reduce", "broadcast")
        assert (rings.primitive, memory.primitive) == ("rp", "ip")
    assert steps(hybrid(layout, 2))[1] == ("all_reduce", "ip", ((0, 2, 4, 5, 8, 11),))


def test_hybrid_without_rings_is_ip_only():
    layout = Layout.parse("4x3")
    assert steps(hybrid(layout, 0)) == steps(ip_only(layout))


@pytest.mark.parametrize("k", [-1, 4])
def test_hybrid_wants_k_up_to_m(k):
    with pytest.raises(CompositionError, match=r"k must be in 0\.\.3"):
        hybrid(Layout.parse("4x3"), k)


def test_one_device_has_no_rings():
    for build in (lambda layout: hybrid(layout, 1), rp_only):
        with pytest.raises(CompositionError):
            build(Layout.parse("1x4"))
    assert steps(har(Layout.parse("1x4"))) == [("all_reduce", "ip", ((0, 1, 2, 3),))]


def test_har_reduces_in_devices_then_among_leaders():
    assert steps(har(Layout.parse("2x3"))) == [
        ("reduce", "ip", ((0, 1, 2), (3, 4, 5))),
        ("all_reduce", "rp", ((0, 3),)),
        ("broadcast", "ip", ((0, 1, 2), (3, 4, 5))),
    ]


def test_leaders_follow_the_preprints_rule():
    # GMI_id % M == t with M = 3 and t = 0.
    ring = har(Layout.parse("4x3")).steps[1].groups[0]
    assert ring == (0, 3, 6, 9)


@pytest.mark.parametrize(
    ("mpl", "choice"),
    [
        ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], "mrr"),  # the preprint's example: 3 GMIs on each of 3 GPUs
        ([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]], "mrr"),  # and with one GPU more
        ([[0, 1, 2], [3, 4, 5]], "har"),  # 3 GMIs per GPU > 2 GPUs
        ([[0, 1], [2, 3]], "mrr"),  # equal counts are not more
        ([[0, 1, 2], [3, 4], [5, 6, 7]], "har"),  # unequal
        ([[0, 1, 2]], "mpr"),  # one GPU
        ([[0]], "mpr"),
        ([], "mpr"),
        ([[0], [1]], "mrr"),
    ],
)
def test_algorithm_1_of_the_preprint(mpl, choice):
    assert select_preprint(mpl) == choice


@settings(deadline=None)
@given(layouts.filter(lambda layout: len(layout.nodes) == 1))
def test_what_algorithm_1_selects_applies(layout):
    schedule = compose(select_preprint(layout.mpl), layout)
    assert schedule.composition == select_preprint(layout.mpl)


@pytest.mark.parametrize(
    ("layout", "chosen"), [("1x3", "mpr"), ("2x2", "mrr"), ("2x3", "har"), ("1+2", "har")]
)
def test_what_algorithm_1_selects_can_be_requested(layout, chosen):
    found = compose("preprint", Layout.parse(layout))
    assert found == compose(chosen, Layout.parse(layout))
    assert is_composition_name("preprint")


def test_the_preprints_names_have_the_steps_of_the_later_paper():
    layout = Layout.parse("3x3")
    assert steps(mpr(layout)) == steps(ip_only(layout))
    assert steps(mrr(layout)) == steps(rp_only(layout))
    with pytest.raises(CompositionError, match=r"mrr .* same number"):
        mrr(Layout.parse("3+2+3"))
    with pytest.raises(CompositionError, match="mrr on 1x2"):
        mrr(Layout.parse("1x2"))


def test_gmis_of_a_device_need_not_pass_through_the_host():
    layout = Layout.parse("2x2")
    assert device_rp(layout).primitives == {"device", "rp"}
    assert device_ip(layout).primitives == {"device", "ip"}
    assert steps(device_rp(Layout.parse("1x3"))) == [("all_reduce", "device", ((0, 1, 2),))]
    with pytest.raises(CompositionError, match="two GMIs"):
        device_rp(Layout.parse("3x1"))


def test_hosts_are_the_outer_level():
    assert steps(har(Layout.parse("2x2x2"))) == [
        ("reduce", "ip", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("reduce", "rp", ((0, 2), (4, 6))),
        ("all_reduce", "net", ((0, 4),)),
        ("broadcast", "rp", ((0, 2), (4, 6))),
        ("broadcast", "ip", ((0, 1), (2, 3), (4, 5), (6, 7))),
    ]


def test_hosts_of_one_gmi_reduce_directly():
    assert steps(ip_only(Layout.parse("3x1x1"))) == [("all_reduce", "net", ((0, 1, 2),))]


@pytest.mark.parametrize(
    ("layout", "hybrids"), [("4x3", 3), ("3+2", 2), ("1x4", 0), ("5+1", 1), ("1x4|3+2", 2), ("1x1", 0)]
)
def test_hybrids_are_tried_as_long_as_there_is_another_ring(layout, hybrids):
    tried = [name for name in composition_names(Layout.parse(layout)) if name.startswith("hybrid")]
    assert tried == [f"hybrid({k})" for k in range(1, hybrids + 1)]


def test_a_single_gmi_has_nothing_to_do():
    for name in ("ip_only", "rp_only", "har", "mpr", "mrr"):
        assert compose(name, Layout.parse("1x1")).steps == ()


@settings(max_examples=40, deadline=None)
@given(layouts)
def test_one_rank_of_each_host_crosses_the_network(layout):
    assume(len(layout.nodes) > 1)
    places = layout.places()
    for schedule in applying(layout):
        across = [step for step in schedule.steps if step.primitive == "net"]
        assert len(across) == 1
        assert Counter(places[rank][0] for rank in across[0].groups[0]) == Counter(range(len(layout.nodes)))


def test_a_hybrid_may_be_written_without_parentheses():
    assert compose("hybrid:2", Layout.parse("4x3")) == compose("hybrid(2)", Layout.parse("4x3"))


@pytest.mark.parametrize("name", ["ring", "hybrid", "hybrid(x)", "hybrid:", ""])
def test_an_unknown_composition_names_those_there_are(name):
    with pytest.raises(CompositionError, match=r"ip_only, rp_only, har"):
        compose(name, Layout.parse("2x2"))
