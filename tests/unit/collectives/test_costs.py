import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.compositions import compose, composition_names, hybrid, ip_only, rp_only
from collectives.costs import UnitCost, all_reduce_s, project, scaled_s, unit_group
from collectives.errors import CompositionError
from collectives.layout import Layout

S, B1, B2 = 6e6, 10e9, 100e9
"""The preprint's SH, 1.5e6 float32; bandwidths chosen so that S / B1 = 0.6 ms and S / B2 = 0.06 ms."""


def ip_only_s(n: int, m: int, nbytes: float, b1: float) -> float:
    """GMI-DRL §3.2.1: 2 (mn - 1) S / (mn B1). The paper prints 2 (m - n - 1), a misprint: its estimate has mn - 1."""
    return all_reduce_s(n * m, nbytes, b1)


def rp_only_s(n: int, nbytes: float, b2: float) -> float:
    """GMI-DRL §3.2.1: 2 x 2 (n - 1) S / (n B2), two steps; the rings of a step run in parallel."""
    return 2 * all_reduce_s(n, nbytes, b2)


def hybrid_s(n: int, m: int, k: int, nbytes: float, b1: float, b2: float) -> float:
    """GMI-DRL §3.2.1: 2 (n - 1) S / (n B2) + 2 (n (m - k) + k - 1) S / ((n (m - k) + k) B1); no rings if k = 0."""
    rings = all_reduce_s(n, nbytes, b2) if k else 0.0
    return rings + all_reduce_s(hybrid_members(n, m, k), nbytes, b1)


def mpr_s(g: int, t: int, nbytes: float, b1: float) -> float:
    """Preprint, Table 2: 2 (gt - 1) M_p / (gt B1)."""
    return all_reduce_s(g * t, nbytes, b1)


def mrr_s(g: int, t: int, nbytes: float, b2: float) -> float:
    """Preprint, Table 2: 2 (g - 1) (t + 1) M_p / (g B2): t rings one after another, and the ring over their roots."""
    return (t + 1) * all_reduce_s(g, nbytes, b2)


def har_s(g: int, t: int, nbytes: float, b1: float, b2: float) -> float:
    """Preprint, Table 2: 2 (g - 1) M_p / (g B2) + 2 (t - 1) M_p / (t B1)."""
    return all_reduce_s(g, nbytes, b2) + all_reduce_s(t, nbytes, b1)


def hybrid_members(n: int, m: int, k: int) -> int:
    """Members of the hybrid's second step: one of each ring, and all GMIs outside the rings."""
    return n * (m - k) + k


def hybrid_published_s(n: int, m: int, k: int, cost_ip_s: float, cost_rp_s: float) -> float:
    """GMI-DRL §3.2.1 as printed: (k/n + m - k) Cost_ip + Cost_rp.

    It assumes that the second step's cost is proportional to its members, and so does not follow from ``hybrid_s``.
    ``hybrid_derived_s`` does.
    """
    return (k / n + m - k) * cost_ip_s + cost_rp_s


def hybrid_derived_s(n: int, m: int, k: int, cost_ip_s: float, cost_rp_s: float) -> float:
    """The estimate that follows from ``hybrid_s``: Cost_ip scaled to the members of the second step, plus Cost_rp."""
    return scaled_s(cost_ip_s, n, hybrid_members(n, m, k)) + cost_rp_s


several = st.integers(2, 8)
gmis = st.integers(1, 10)


def units(n, cost_ip_s, cost_rp_s):
    return {"ip": UnitCost(members=n, seconds=cost_ip_s), "rp": UnitCost(members=n, seconds=cost_rp_s)}


def test_table_2_of_the_preprint():
    # g = 4, t = 3. MPR: 2 * 11/12 * 0.6. MRR: 2 * 3/4 * (3 + 1) * 0.06. HAR: 2 * 3/4 * 0.06 + 2 * 2/3 * 0.6.
    assert mpr_s(4, 3, S, B1) == pytest.approx(1.1e-3)
    assert mrr_s(4, 3, S, B2) == pytest.approx(0.36e-3)
    assert har_s(4, 3, S, B1, B2) == pytest.approx(0.89e-3)


def test_costs_of_gmi_drl():
    # n = 4, m = 3, k = 2. Hybrid: 2 * 3/4 * 0.06 + 2 * 5/6 * 0.6, the second step among 4 + 2 members.
    assert ip_only_s(4, 3, S, B1) == pytest.approx(1.1e-3)
    assert rp_only_s(4, S, B2) == pytest.approx(0.18e-3)
    assert hybrid_members(4, 3, 2) == 6
    assert hybrid_s(4, 3, 2, S, B1, B2) == pytest.approx(1.09e-3)
    # k = m: one GMI of each ring is left, 2 * 3/4 * 0.06 + 2 * 2/3 * 0.6.
    assert hybrid_s(4, 3, 3, S, B1, B2) == pytest.approx(0.89e-3)


def test_the_printed_ip_only_cost_is_a_misprint():
    # 2 (m - n - 1) S / (mn B1) would be negative for n = 4, m = 3; the estimate of the same paper has mn - 1.
    cost_ip = all_reduce_s(4, S, B1)
    assert ip_only_s(4, 3, S, B1) == pytest.approx((4 * 3 - 1) / (3 * (4 - 1)) * cost_ip)


@given(several, gmis)
def test_hybrid_without_rings_is_ip_only(n, m):
    assert hybrid_s(n, m, 0, S, B1, B2) == ip_only_s(n, m, S, B1)


@given(several, gmis, st.floats(1e-6, 1e-1))
def test_ip_only_is_estimated_as_in_the_paper(n, m, cost_ip_s):
    assert scaled_s(cost_ip_s, n, n * m) == pytest.approx((n * m - 1) / (m * (n - 1)) * cost_ip_s)


def test_one_device_is_scaled_from_two_of_its_gmis():
    # n = 1: the paper's (m - 1) / (m (1 - 1)) divides by zero. From 2 members to 4: (3/4) / (1/2).
    assert scaled_s(2e-3, 2, 4) == pytest.approx(3e-3)
    with pytest.raises(ValueError, match="at least two"):
        scaled_s(2e-3, 1, 4)


def test_the_printed_hybrid_estimate_does_not_follow_from_the_formula():
    # n = 4, m = 3, k = 2, Cost_ip = 0.9 ms, Cost_rp = 0.09 ms (2 * 3/4 of S/B): printed (2/4 + 1) 0.9 + 0.09;
    # from the formula 0.9 * (5/6) / (3/4) + 0.09, which is hybrid_s itself.
    assert hybrid_published_s(4, 3, 2, 0.9e-3, 0.09e-3) == pytest.approx(1.44e-3)
    assert hybrid_derived_s(4, 3, 2, 0.9e-3, 0.09e-3) == pytest.approx(1.09e-3)


@given(several, gmis, st.floats(1e9, 1e12), st.floats(1e9, 1e12))
def test_projections_are_the_formulas_with_bandwidths_eliminated(n, m, b1, b2):
    layout = Layout.from_counts([[m] * n])
    cost_ip, cost_rp = all_reduce_s(n, S, b1), all_reduce_s(n, S, b2)
    for name, expected in {
        "ip_only": ip_only_s(n, m, S, b1),
        "rp_only": rp_only_s(n, S, b2)
        if m > 1
        else cost_rp,  # with one GMI per device there is no ring across
        "har": har_s(n, m, S, b1, b2),
    }.items():
        if name != "rp_only" or m <= n:
            projected = project(compose(name, layout), units(n, cost_ip, cost_rp))
            assert projected.derived_s == pytest.approx(expected)
            assert projected.published_s == projected.derived_s
    for k in range(1, m + 1):
        if hybrid_members(n, m, k) > 1:
            projected = project(hybrid(layout, k), units(n, cost_ip, cost_rp))
            assert projected.derived_s == pytest.approx(hybrid_s(n, m, k, S, b1, b2))
            assert projected.derived_s == pytest.approx(hybrid_derived_s(n, m, k, cost_ip, cost_rp))
            assert projected.published_s == pytest.approx(hybrid_published_s(n, m, k, cost_ip, cost_rp))


def test_broadcasts_cost_nothing_in_the_papers():
    assert project(rp_only(Layout.parse("3x3")), units(3, 1.0, 0.25)).derived_s == 0.5


def test_several_hosts_add_a_step_over_the_network():
    layout = Layout.parse("2x2x2")
    costs = units(2, 0.5, 0.1) | {"net": UnitCost(members=2, seconds=7.0)}
    # Among the 4 of a host: (3/4) / (1/2) of what 2 cost.
    assert project(ip_only(layout), costs).derived_s == pytest.approx(0.75 + 7.0)


@pytest.mark.parametrize(
    ("layout", "primitive", "group"),
    [
        ("4x3", "ip", (0, 3, 6, 9)),  # n devices with 1 GMI each
        ("4x3", "rp", (0, 3, 6, 9)),
        ("4x3", "device", (0, 1)),
        ("4x3", "net", (0,)),
        ("1x4", "ip", (0, 1)),
        ("1x4", "rp", (0,)),
        ("3+2|4", "net", (0, 5)),
        ("1|3+2", "rp", (1, 4)),  # the host with most devices
    ],
)
def test_where_unit_costs_are_measured(layout, primitive, group):
    assert unit_group(primitive, Layout.parse(layout)) == group


@given(st.lists(st.lists(gmis, min_size=1, max_size=8), min_size=1, max_size=4))
def test_whatever_a_schedule_needs_has_a_unit_cost(counts):
    layout = Layout.from_counts(counts)
    groups = {primitive: unit_group(primitive, layout) for primitive in ("ip", "rp", "device", "net")}
    costs = {
        primitive: UnitCost(members=len(group), seconds=1.0)
        for primitive, group in groups.items()
        if len(group) > 1
    }
    for name in composition_names(layout):
        try:
            schedule = compose(name, layout)
        except CompositionError:
            continue
        assert project(schedule, costs).derived_s >= 0
