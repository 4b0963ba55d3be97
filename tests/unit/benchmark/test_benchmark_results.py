"""Rows, tables and figures from measurements that are worked out by hand."""

import json

import pytest
import torch

from collectives.compositions import compose
from collectives.layout import Layout
from collectives.profile import CostProfile, ProfilePoint, StepShape
from placement.inventory import local_machine
from rayagi.benchmark.bench import make_case
from rayagi.benchmark.measure import (
    LayoutMeasurement,
    StoppedError,
    TimingBudget,
    WrongResultError,
    measure,
    profile_sizes,
)
from rayagi.benchmark.member import BenchMember, CheckResult
from rayagi.benchmark.plots import save_plot
from rayagi.benchmark.results import fitted, profile_of, rows_of, table, to_dict
from rayagi.cli import comm_bench
from rayagi.run.errors import DiskError


class PerfectMembers:
    """Steps and compositions that cost exactly 1 us + 1 ns per byte and step; it notes what it was asked."""

    rendezvous = None

    def __init__(self, layout, wrong=None):
        self.layout, self.wrong, self.asked = layout, wrong, []

    def ask(self, method, *arguments):
        self.asked.append((method, *arguments))
        answers = {
            "join": lambda: {"ip", "rp", "net"},
            "open": lambda: f"opened {arguments[0]}",
            "check": lambda: CheckResult("same bits", 0),
            "time": lambda: self._seconds(arguments[0], arguments[1]),
            "time_step": lambda: 1e-6 + 1e-9 * arguments[1],
            "end_steps": lambda: None,
        }
        found = [answers[method]() for _ in range(self.layout.world_size)]
        if method == "check" and self.wrong is not None:
            found[self.wrong[0]] = self.wrong[1]
        return found

    def _seconds(self, composition, nbytes):
        return len(compose(composition, self.layout).steps) * (1e-6 + 1e-9 * nbytes)


def pace(before_each=lambda text: None, sizes=(1000, 8000)):
    return TimingBudget(sizes=sizes, repeats=3, slice_s=1e-3, before_each=before_each)


def measured(text="2x2", **wanted):
    layout = Layout.parse(text)
    found = LayoutMeasurement(case=make_case(layout, (), None))
    measure(PerfectMembers(layout, **wanted), pace(), found)
    return found


def test_a_case_has_what_applies_once_and_reasons_for_the_rest():
    case = make_case(Layout.parse("2x1"), (), None)
    # One GMI on each of two devices: the ring is all there is to rp_only, hybrid(1) and har.
    assert case.compositions == ("ip_only", "rp_only")
    assert dict(case.skipped)["har"] == "the same steps as rp_only"
    assert "two GMIs" in dict(case.skipped)["device_rp"]


def test_what_was_asked_for_by_name_is_measured_even_if_it_repeats_another():
    assert make_case(Layout.parse("2x2"), ["ip_only", "mpr", "hybrid:1"], None).compositions == (
        "ip_only",
        "mpr",
        "hybrid(1)",
    )


def test_compositions_take_turns_in_another_order_each_time_and_what_does_not_work_is_left_out():
    layout = Layout.parse("2x2")
    members = PerfectMembers(layout)
    found = LayoutMeasurement(case=make_case(layout, ["ip_only", "rp_only", "device_ip"], None))
    measure(members, pace(sizes=(1000,)), found)
    assert found.unavailable == [("device_ip", "device does not work here")]
    turns = [asked[1] for asked in members.asked if asked[0] == "time" and asked[3] > 2]
    assert turns == ["ip_only", "rp_only", "rp_only", "ip_only", "ip_only", "rp_only"]


def test_a_timing_runs_as_often_as_its_time_allows_but_a_few_times_at_least():
    runs = []

    def timed(count, one_s):
        runs.append(count)
        return [one_s / 2, one_s]

    assert pace().seconds(lambda count: timed(count, 1e-4)) == 1e-4  # the slowest member's
    assert pace().seconds(lambda count: timed(count, 1.0), known_s=1.0) == 1.0
    pace().seconds(lambda count: timed(count, 1e-9), known_s=1e-9)
    # 0.8 of a millisecond holds eight runs of 0.1 ms; never fewer than 3 nor more than 100 (GMI-DRL's mean of 100).
    assert runs == [2, 8, 3, 100]


def test_a_model_fitted_to_its_own_law_projects_every_composition_without_error():
    found = measured()
    rows = rows_of([found], fitted(profile_of([found], "a perfect machine")))
    assert {row.composition for row in rows} == {"ip_only", "rp_only", "hybrid(1)", "hybrid(2)", "har"}
    assert len(rows) == 2 * 5
    for row in rows:
        # ip moves all its bytes whoever takes part. A ring of g moves (g-1)/g of them: with g = 2 everywhere, it fits.
        assert row.model_error == pytest.approx(0.0, abs=1e-6)
        assert row.median_s == pytest.approx(row.steps * (1e-6 + 1e-9 * row.nbytes))
    by_name = {(row.composition, row.nbytes): row for row in rows}
    # The paper scales Cost_ip among n = 2 to mn = 4 members by (3/4) / (1/2) = 1.5; here 4 members cost the same.
    assert by_name["ip_only", 1000].paper_error == pytest.approx(1 / 1.5 - 1)


def test_results_say_what_is_fastest_what_is_labelled_and_what_was_left_out():
    found = measured()
    rows = rows_of([found], fitted(profile_of([found], "a perfect machine")))
    text = table([found], rows, cores=2)
    assert "4 processes on 2 cores, without GPUs: devices and nodes are nominal" in text
    assert text.count("\n*  ") == 2
    assert "1,000 bytes: the model chooses ip_only, the fastest" in text
    assert "device_rp: no, device does not work here" in text
    content = json.loads(json.dumps(to_dict([found], rows, {"origin": "here"})))
    assert content["layouts"][0]["devices_are_labels"] is True
    assert content["rows"][0]["repeats_s"] == list(rows[0].repeats_s)


def test_what_was_measured_before_a_stop_stands(tmp_path):
    left = 49  # by ip: all-reduces of 2, 3 and 4, a reduce and a broadcast, each at nine sizes

    def before_each(text):
        nonlocal left
        left -= 1
        if left < 0:
            raise StoppedError

    layout = Layout.parse("2x2")
    found = LayoutMeasurement(case=make_case(layout, ("ip_only",), None))
    with pytest.raises(StoppedError):
        measure(PerfectMembers(layout), pace(before_each, sizes=tuple(range(1000, 9000, 1000))), found)
    assert len(found.points) + sum(map(len, found.repeats.values())) == 49
    assert len(found.points) == 5 * 9
    rows = rows_of([found], fitted(profile_of([found], "stopped")))
    assert len(rows) == 4
    save_plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_results_are_there_although_the_profile_cannot_be_written(tmp_path):
    (tmp_path / "profile.json").mkdir()
    with pytest.raises(DiskError, match=r"profile\.json: Is a directory"):
        comm_bench._report([measured()], tmp_path, tmp_path / "profile.json", local_machine())
    assert json.loads((tmp_path / "results.json").read_text())["rows"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ((3, CheckResult("other bits", 0)), "ranks \\[3\\] ended with other bits than rank 0"),
        ((0, CheckResult("same bits", 7)), "7 elements differ from the float64 sum"),
    ],
)
def test_a_composition_that_reduces_wrongly_is_not_timed(wrong, said):
    with pytest.raises(WrongResultError, match=said):
        measured(wrong=wrong)


def test_models_are_silent_about_what_was_timed_at_one_size_only():
    shape = StepShape("ip", "all_reduce", 4, 1)
    assert fitted(CostProfile(machine="m", points=())) is None
    assert fitted(CostProfile(machine="m", points=(ProfilePoint(shape, 1000, 1e-6),))) is None
    found = LayoutMeasurement(case=make_case(Layout.parse("2x2"), ("ip_only",), None))
    found.repeats["ip_only", 1000] = [2e-6]
    (row,) = rows_of([found], None)
    assert (row.model_s, row.paper_s, row.median_s) == (None, None, 2e-6)
    assert "ip_only" in table([found], [row], cores=2)


def test_medians_and_deciles_are_over_the_repeats():
    # 0, 1, ..., 10: the 10th percentile is 1 and the 90th 9.
    found = LayoutMeasurement(case=make_case(Layout.parse("2x2"), ("ip_only",), None))
    found.repeats |= {("ip_only", 4): list(map(float, range(11))), ("ip_only", 8): [2.0]}
    several, one = rows_of([found], None)
    assert (several.p10_s, several.median_s, several.p90_s) == (1.0, 5.0, 9.0)
    assert (one.p10_s, one.median_s, one.p90_s) == (2.0, 2.0, 2.0)


def test_a_profile_has_two_sizes_whatever_is_asked_for():
    assert profile_sizes([440_000]) == (4096, 440_000)
    assert len(profile_sizes([4096])) == 2


def test_a_members_gpu_is_named_by_its_index(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # set by the member, and restored
    member = BenchMember(0, Layout.parse("1x2"), gpu="GPU-1")
    assert member._device == torch.device("cuda", 0)


def test_the_check_of_a_result_finds_a_single_element_that_is_off():
    member = BenchMember(0, Layout.parse("3x1"))
    parts = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    forwards, backwards = parts[0] + parts[1] + parts[2], parts[2] + parts[1] + parts[0]
    assert not torch.equal(forwards, backwards)
    assert (member._wrong(forwards), member._wrong(backwards)) == (0, 0)  # any order of float32 sums will do
    forwards[17] += 1e-5
    assert member._wrong(forwards) == 1
    assert member._wrong(parts[0] + parts[1]) == 1000
