"""Decisions from a run's health, computed by hand; and that they do not oscillate."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from placement.backends.base import SliceHealth
from rayagi.coordinator.decisions import (
    ALL_GMIS,
    GmiHealth,
    RunHealth,
    decide,
    growth_per_iteration,
)

MIB = 2**20


def health(*speeds, window=6, planned=None, **other):
    """Each GMI at a constant speed, or with the speeds given."""
    gmis = tuple(
        GmiHealth(
            steps_per_s=tuple(speed) if isinstance(speed, list) else (speed,) * window,
            planned_steps_per_s=planned,
        )
        for speed in speeds
    )
    return RunHealth(gmis=gmis, num_envs=32, fewer_envs=16, window=window, **other)


def remembering(*held, limit=1000, **other):
    gmis = tuple(
        GmiHealth(
            steps_per_s=(100.0,) * 6, memory_bytes=tuple(m * MIB for m in own), memory_limit_bytes=limit * MIB
        )
        for own in held
    )
    return RunHealth(**({"gmis": gmis, "num_envs": 32, "fewer_envs": 16, "window": 6} | other))


def test_nothing_is_decided_before_a_window_is_full():
    assert decide(health([10.0] * 5, [100.0] * 6)).action == "nothing"


def test_a_gmi_at_most_a_fifth_below_the_others_is_left_alone():
    decision = decide(health(80.0, 100.0, 100.0))
    assert (decision.action, decision.findings) == ("nothing", frozenset())


def test_a_gmi_more_than_a_fifth_below_the_others_leads_to_a_proposal():
    decision = decide(health(100.0, 79.0, 100.0, may_replan=True))
    # Without it 2 x 100 = 200, with it 3 x 79 = 237: it stays.
    assert decision.action == "propose"
    assert (decision.left_out, decision.num_envs) == ((), 0)
    assert decision.findings == {("slow", 1)}
    assert "GMI 1 runs at 79 steps/s of its own work, the others at 100" in decision.reason
    assert "No other number of GMIs is expected to be faster" in decision.reason


@pytest.mark.parametrize(("may_replan", "action"), [(True, "replan"), (False, "propose")])
def test_a_gmi_that_holds_up_the_others_for_more_than_it_brings_is_left_out(may_replan, action):
    decision = decide(health(100.0, 40.0, 90.0, may_replan=may_replan))
    # 2 x 90 = 180 against 3 x 40 = 120.
    assert (decision.action, decision.left_out, decision.num_envs) == (action, (1,), 32)
    assert (
        "without GMI 1 the run is faster, 180 steps/s of own work with 2 instead of 120 with 3"
        in decision.reason
    )


@pytest.mark.parametrize("straggler", range(4))
def test_the_gmi_that_is_left_out_is_the_slow_one_wherever_it_is(straggler):
    speeds = [100.0] * 4
    speeds[straggler] = 25.0
    decision = decide(health(*speeds, may_replan=True))
    assert (decision.action, decision.left_out) == ("replan", (straggler,))
    assert f"without GMI {straggler} the run is faster, 300 steps/s" in decision.reason


def test_only_those_of_the_slow_gmis_are_left_out_without_which_it_is_fastest():
    # Without GMI 3 alone 4 x 79 = 316; without all four that are slow, 1 x 100; with all, 5 x 10.
    decision = decide(health(79.0, 79.0, 100.0, 10.0, 79.0, planned=100.0, may_replan=True))
    assert decision.findings == {("slow", i) for i in (0, 1, 3, 4)} | {("straggler", ALL_GMIS)}
    assert decision.left_out == (3,)
    # Two of 11 and 10: 3 x 100, after 4 x 11 without one of them.
    decision = decide(health(100.0, 11.0, 100.0, 10.0, 100.0))
    assert decision.left_out == (1, 3)
    assert "without GMI 1 and GMI 3 the run is faster, 300 steps/s of own work with 3" in decision.reason


def test_one_slow_iteration_decides_nothing_nor_do_two_of_six():
    assert decide(health([100.0, 1.0, 100.0, 100.0, 2.0, 100.0], 100.0)).action == "nothing"


def test_all_below_the_plan_is_the_run_not_a_gmi():
    decision = decide(health(75.0, 76.0, planned=100.0, may_replan=True))
    assert (decision.action, decision.findings) == ("propose", {("slow", ALL_GMIS)})
    assert decision.reason.startswith("GMIs run at 76 steps/s of their own work, 100 were predicted.")
    assert decide(health(75.0, planned=90.0)).action == "nothing"
    assert decide(health(70.0, planned=90.0)).action == "propose"


@pytest.mark.parametrize("late", range(3))
def test_each_gmi_is_compared_with_its_own_prediction(late):
    # 75 is more than four fifths of the others' 90, and less than four fifths of 100.
    speeds = [90.0] * 3
    speeds[late] = 75.0
    assert decide(health(*speeds)).action == "nothing"
    decision = decide(health(*speeds, planned=100.0, may_replan=True))
    assert (decision.action, decision.findings) == ("propose", {("slow", late)})
    assert decision.reason.startswith(
        f"GMI {late} runs at 75 steps/s of its own work, 100 were predicted. No other number of GMIs"
    )
    # Two predictions: 75 is what was expected of one GMI, and 90 too little of the others.
    gmis = tuple(
        replace(gmi, planned_steps_per_s=75.0 if index == late else 120.0)
        for index, gmi in enumerate(health(*speeds).gmis)
    )
    other = decide(RunHealth(gmis=gmis, num_envs=32, fewer_envs=16, window=6))
    assert other.findings == {("slow", index) for index in range(3) if index != late}


def test_a_gmi_without_a_simulator_has_no_speed_to_judge():
    learner = GmiHealth(steps_per_s=(), planned_steps_per_s=100.0)
    fine = health(100.0, 40.0, 100.0, planned=100.0)
    decision = decide(replace(fine, gmis=(learner, *fine.gmis)))
    assert decision.findings == {("slow", 2), ("straggler", ALL_GMIS)}
    assert decision.left_out == (2,)  # 2 x 100 against 3 x 40
    assert decide(replace(fine, gmis=(learner,))).action == "nothing"


def test_a_straggler_does_not_make_the_plan_too_hopeful():
    decision = decide(health(100.0, 20.0, 100.0, planned=105.0))
    assert decision.findings == {("slow", 1), ("straggler", ALL_GMIS)}


def test_a_reported_straggler_that_becomes_worse_leads_to_a_new_plan():
    reported = decide(health(100.0, 70.0, 100.0, may_replan=True))
    assert (reported.action, reported.findings) == ("propose", {("slow", 1)})
    worse = decide(health(100.0, 50.0, 100.0, may_replan=True, findings=reported.findings))
    assert (worse.action, worse.left_out) == ("replan", (1,))
    # 200 against 3 x 65 = 195 is less than a twentieth more, and not less: neither raised nor cleared.
    for findings in (reported.findings, worse.findings):
        assert decide(health(100.0, 65.0, 100.0, findings=findings)).findings == findings


def test_a_finding_is_reported_once_and_cleared_only_at_nine_tenths():
    reported = decide(health(100.0, 70.0, 100.0)).findings
    for speed, still in ((70.0, True), (85.0, True), (89.0, True), (91.0, False)):
        again = decide(health(100.0, speed, 100.0, findings=reported))
        assert again.action == "nothing"
        assert (("slow", 1) in again.findings) == still
    assert decide(health(100.0, 85.0, 100.0)).findings == frozenset()


def test_memory_near_its_limit_halves_the_environments():
    decision = decide(remembering([910] * 6, [500] * 6, may_replan=True))
    assert (decision.action, decision.left_out, decision.num_envs) == ("replan", (), 16)
    assert "GMI 0 holds 910 MiB of 1,000" in decision.reason
    assert decide(remembering([890] * 6, [500] * 6)).action == "nothing"
    odd = decide(remembering([910] * 6, [500] * 6, num_envs=10, fewer_envs=4))
    assert (odd.num_envs, odd.reason.rpartition(". ")[2]) == (
        4,
        "Fewer environments need less: 4 for each GMI",
    )


def test_memory_that_grows_is_followed_ten_windows_ahead():
    # 8 MiB an iteration: 540 + 60 x 8 = 1020 > 900; the limit is (1000 - 540) / 8 = 57.5 away.
    decision = decide(remembering([500 + 8 * i for i in range(1, 7)]))
    assert decision.action == "propose"
    # The last three are 532, 540 and 548.
    assert (
        "holds 540 MiB of 1,000 and grows by 8.00 MiB an iteration: the limit is 58 iterations"
        in decision.reason
    )
    assert decide(remembering([500 + 2 * i for i in range(1, 7)])).action == "nothing"


def test_what_is_allocated_once_is_no_growth():
    assert growth_per_iteration([100, 700, 700, 700, 700, 700]) == 0.0
    assert growth_per_iteration([700, 700, 690, 700, 700, 650]) == 0.0
    assert growth_per_iteration([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 1.0
    assert decide(remembering([100, 700, 700, 700, 700, 700])).action == "nothing"


def test_fewer_gmis_where_environments_cannot_be_fewer():
    decision = decide(remembering([500] * 6, [950] * 6, num_envs=1, fewer_envs=0))
    assert (decision.left_out, decision.num_envs) == ((1,), 1)
    assert "Fewer GMIs need less: 1" in decision.reason
    alone = decide(remembering([950] * 6, num_envs=1, fewer_envs=0, may_replan=True))
    assert (alone.action, alone.left_out, alone.num_envs) == ("propose", (), 0)
    assert "give it more memory" in alone.reason


def test_memory_that_nobody_measures_or_limits_is_not_judged():
    assert decide(remembering([], [])).action == "nothing"
    assert decide(remembering([10**6] * 6, limit=0)).action == "nothing"


def shared(*given, **other):
    """GMIs that count no memory of their own, by what their hosts say of their shares."""
    gmis = tuple(
        GmiHealth(
            steps_per_s=(100.0,) * 6, memory_limit_bytes=1000 * MIB, driver_bytes=one.memory_bytes, share=one
        )
        for one in given
    )
    return RunHealth(**({"gmis": gmis, "num_envs": 32, "fewer_envs": 16, "window": 6} | other))


def share(state="ok", held=500):
    return SliceHealth(state=state, text=f"the server is {state}", memory_bytes=held * MIB)


def test_the_drivers_count_of_memory_is_judged_where_it_is_more_than_the_programs():
    decision = decide(shared(share(held=950), share(), may_replan=True))
    assert (decision.action, decision.num_envs) == ("replan", 16)
    assert "GMI 0 holds 950 MiB of 1,000" in decision.reason
    # torch holds 600 MiB, the process with CUDA's own memory 920; cleared below 800 only.
    own = replace(shared(share(held=920)).gmis[0], memory_bytes=(600.0 * MIB,) * 6)
    assert (
        "GMI 0 holds 920 MiB" in decide(RunHealth(gmis=(own,), num_envs=32, fewer_envs=16, window=6)).reason
    )
    still = decide(shared(share(held=850), share(), findings=decision.findings))
    assert still.findings == decision.findings == {("memory", 0)}
    assert decide(shared(share(held=790), share(), findings=decision.findings)).findings == frozenset()


def test_an_unhealthy_share_is_reported_once():
    decision = decide(shared(share(), share("degraded"), may_replan=True))
    assert (decision.action, decision.num_envs) == ("propose", 0)
    assert decision.reason == "GMI 1: the server is degraded"
    again = decide(shared(share(), share("degraded"), findings=decision.findings))
    assert again.action == "nothing"
    assert decide(shared(share(), share(), findings=again.findings)).findings == frozenset()


speed = st.floats(1.0, 1e6)


@given(
    st.lists(st.lists(speed, min_size=6, max_size=6), min_size=1, max_size=6),
    st.none() | speed,
    st.booleans(),
)
def test_decisions_are_sound(speeds, planned, may_replan):
    given = health(*speeds, planned=planned, may_replan=may_replan)
    decision = decide(given)
    assert decide(given) == decision
    assert (decision.action == "nothing") == (decision.reason == "")
    assert set(decision.left_out) < set(range(len(speeds)))
    assert {("slow", index) for index in decision.left_out} <= decision.findings
    if decision.action == "replan":
        assert may_replan
        assert decision.left_out
    # The same health again says nothing new.
    assert decide(replace(given, findings=decision.findings)).action == "nothing"


@given(st.lists(st.floats(0.8, 0.9), min_size=2, max_size=40), st.booleans())
@example([0.8, 0.9], False)
@example([0.8, 0.9], True)
def test_speeds_between_the_thresholds_never_change_the_findings(shares, before):
    findings = frozenset({("slow", 0)}) if before else frozenset()
    for share in shares:
        decision = decide(health(100.0 * share, 100.0, 100.0, findings=findings))
        assert decision.action == "nothing"
        assert decision.findings == findings


@given(st.lists(st.floats(0.5, 1.2), min_size=1, max_size=60))
def test_notices_come_and_go_at_thresholds_that_are_apart(shares):
    # 2 x 100 against 3 x 100 share: 1.05 times as much below 0.635, less from 0.667 on.
    comes, goes = {"slow": 0.8, "straggler": 2 / 3.15}, {"slow": 0.9, "straggler": 2 / 3}
    findings = frozenset()
    for share in shares:
        decision = decide(health(100.0 * share, 100.0, 100.0, findings=findings))
        assert (decision.action == "nothing") == (decision.findings <= findings)
        assert all(share <= comes[kind] + 1e-9 for kind, _ in decision.findings - findings)
        assert all(share >= goes[kind] - 1e-9 for kind, _ in findings - decision.findings)
        findings = decision.findings


@given(st.floats(0.8, 0.9), st.booleans())
@example(0.8, True)
@example(0.9, False)
def test_memory_between_the_thresholds_neither_comes_nor_goes(share, before):
    findings = frozenset({("memory", 0)}) if before else frozenset()
    decision = decide(remembering([1000 * share] * 6, findings=findings))
    assert (decision.action, decision.findings) == ("nothing", findings)


def caused(*gmis, planned=None):
    """GMIs at these speeds with these further measurements."""
    return RunHealth(
        gmis=tuple(
            GmiHealth(steps_per_s=(speed,) * 6, planned_steps_per_s=planned, **more) for speed, more in gmis
        ),
        num_envs=32,
        fewer_envs=16,
        window=6,
    )


def phases(simulate, act, update):
    return {"phases_s": {"simulate": simulate, "act": act, "update": update}}


def test_a_slow_gmi_s_phase_with_most_of_the_additional_time_is_named():
    # 30 ms more in simulate, 10 ms in update; less in act does not count.
    decision = decide(
        caused((50.0, phases(0.050, 0.010, 0.040)), *[(100.0, phases(0.020, 0.012, 0.030))] * 2)
    )
    assert (
        "the others at 100 (75% of the difference is in simulate, 30 ms more an iteration)" in decision.reason
    )


def test_others_on_its_cores_and_pages_from_disk_are_named():
    slow = {"queue_share": 0.43, "major_faults": 210.4}
    decision = decide(caused((50.0, slow), (100.0, {"queue_share": 0.02})))
    assert (
        "(43% of its time others were on its cores; it waits for 210 pages from disk an iteration: memory is short)"
    ) in decision.reason


def test_a_queue_that_all_have_is_no_cause_of_one_gmi_but_of_a_slow_run():
    gmis = [(50.0, {"queue_share": 0.3}), (100.0, {"queue_share": 0.25})]
    assert "on its cores" not in decide(caused(*gmis)).reason
    gmis = [(50.0, {"queue_share": 0.3}), (50.0, {"queue_share": 0.2})]
    assert "100 were predicted (25% of its time others" in decide(caused(*gmis, planned=100.0)).reason


def test_phases_are_compared_only_where_both_have_them():
    gmis = [(50.0, {"phases_s": {"simulate": 1.0}}), (100.0, {"phases_s": {"update": 0.1}})]
    assert decide(caused(*gmis)).reason.startswith(
        "GMI 0 runs at 50 steps/s of its own work, the others at 100. "
    )
