"""The search around Algorithm 1 with a synthetic probe: cache, resumption, counts, "auto" values. No Ray."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

import rayagi
from actors.errors import GmiLostError, GmiSilentError
from placement.errors import GpuMemoryError, PlanError, ReservationError
from placement.inventory import load_machine
from placement.search import TrialFailure, TrialMeasurement
from rayagi.config.errors import ConfigError
from rayagi.config.presets import preset
from rayagi.coordinator import auto, searching
from rayagi.coordinator.auto import resolve_auto
from rayagi.coordinator.probe import VALIDATION, candidate_spec, failure_kind, run_spec_of
from rayagi.coordinator.search_store import (
    SearchStore,
    _digest,
    code_digest,
    code_files,
    predict_throughput,
    search_key,
)
from rayagi.coordinator.searching import NothingMeasuredError, SearchSettings, search
from rayagi.envs.errors import MemoryShortError
from rayagi.planning import plan_of
from rayagi.run.errors import DiskError
from rayagi.run.prediction import (
    Prediction,
    load_prediction,
    parts_range,
    record_measurement,
    save_prediction,
)

MIB = 2**20
SPEC = preset("Ant-v5")


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch, tmp_path):
    """Searches are cached in the test's own folder."""
    monkeypatch.setattr("rayagi.coordinator.search_store.default_folder", lambda: tmp_path)


@pytest.fixture
def two_cores():
    return load_machine("tests/data/machines/cpu2.json")


@pytest.fixture
def eight_gpus():
    return load_machine("tests/data/machines/h100x8.json")


ROW = [16, 32, 64, 128, 256, 512, 64]
"""What is tried on cores with the bench below: three doublings in a row without a gain end it, the last beside 64 again."""


class Bench:
    """In the place of SessionProbe: 1000 steps/s a GMI, 1.2 times as many up to 64 environments, then fewer.

    Its GMIs wait for each other a fifth of the time, so that it cannot be excluded that one alone is faster.
    """

    def __init__(self):
        self.asked, self.confirmed, self.fails, self.interrupt_at, self.known = [], [], set(), None, {}

    def __call__(self, spec, machine):
        return self

    def __enter__(self):
        return self

    def remember(self, gmis, steps_per_s):
        self.known.setdefault(gmis, []).append(steps_per_s)

    def __exit__(self, *about):
        pass

    def measure(self, gmis, envs, settings):
        if (gmis, envs) == self.interrupt_at:
            raise KeyboardInterrupt
        (self.confirmed if settings is VALIDATION else self.asked).append((gmis, envs))
        if (gmis, envs) in self.fails:
            return TrialFailure(kind="crashed", reason="signal 11")
        speed = 1000 * 1.2 ** min(envs.bit_length(), 7) * (0.5 if envs > 64 else 1.0)
        return TrialMeasurement(
            steps_per_s=speed,
            memory_bytes=(400 + envs) * MIB,
            relative_error=0.02 if settings is VALIDATION else 0.05,
            phases_s={"simulate_s": 0.8, "sync_s": 0.2},
        )


@pytest.fixture
def bench(monkeypatch):
    made = Bench()
    monkeypatch.setattr(searching, "SessionProbe", made)
    monkeypatch.setattr(searching, "connected", nullcontext)
    return made


def run(bench, machine, folder, **changes):
    return search(SPEC, machine, SearchSettings(folder=folder, **changes))


def test_on_two_cores_two_gmis_then_one(bench, two_cores, tmp_path):
    found = run(bench, two_cores, tmp_path)
    assert bench.asked == [(gmis, envs) for gmis in (2, 1) for envs in ROW]
    # 1.2 ** 7, nothing else comes near it.
    assert bench.confirmed == [(2, 64)] * 4
    assert found.best is found.trials[-1]
    assert (found.best.gmis_per_gpu, found.best.num_envs, found.complete) == (2, 64, True)
    assert not found.on_gpus
    text = json.dumps(found.to_dict(), allow_nan=False)
    assert json.loads(text)["best"]["num_envs"] == 64


@pytest.mark.parametrize(("round_s", "rounds"), [(4.9, 4), (9.9, 3), (10.0, 2), (20.0, 1)])
def test_what_takes_long_is_confirmed_in_fewer_rounds(
    bench, two_cores, tmp_path, monkeypatch, round_s, rounds
):
    """Twenty seconds in all will do; 3 x 4.9 and 2 x 9.9 are less."""
    brief = bench.measure
    monkeypatch.setattr(bench, "measure", lambda *what: replace(brief(*what), duration_s=round_s))
    run(bench, two_cores, tmp_path)
    assert bench.confirmed == [(2, 64)] * rounds
    assert len(SearchStore(SPEC, two_cores, tmp_path).rounds(2, 64)) == rounds


def test_on_eight_gpus_the_paper_s_ranges(bench, eight_gpus, tmp_path):
    found = run(bench, eight_gpus, tmp_path)
    assert bench.asked[:2] == [(10, 128), (10, 256)]
    # throughput stands still from 64 environments on: Sat is 0 at the second of every size
    assert bench.asked == [(gmis, envs) for gmis in range(10, 0, -1) for envs in (128, 256)]
    assert found.best.system_steps_per_s == pytest.approx(500 * 1.2**7 * 80)


@pytest.mark.parametrize(
    ("name", "most"),
    # 64 cores for the GMIs of eight GPUs: eight of each
    [("v100x8", 8), ("a30x8", 8), ("rtx4090x8", 8)],
)
def test_what_cannot_be_planned_on_all_gpus_is_a_row_with_the_reason_and_never_measured(
    bench, tmp_path, name, most
):
    machine = load_machine(f"tests/data/machines/{name}.json")
    found = run(bench, machine, tmp_path)
    assert {gmis for gmis, _ in bench.asked} == set(range(1, most + 1))
    failed = {
        trial.gmis_per_gpu: trial.outcome for trial in found.trials if isinstance(trial.outcome, TrialFailure)
    }
    assert list(failed) == list(range(10, most, -1))
    assert {failure.kind for failure in failed.values()} == {"cannot be planned"}
    assert "80 GMIs of 1 core each" in failed[10].reason
    assert "it has 64 cores" in failed[10].reason
    best = run_spec_of(SPEC, machine, found.best.gmis_per_gpu, found.best.num_envs)
    assert found.best.gmis_per_gpu == most
    assert plan_of(best, machine).num_gmis == 8 * most


def test_a_stored_measurement_of_what_cannot_be_planned_does_not_win(bench, tmp_path):
    machine = load_machine("tests/data/machines/v100x8.json")
    fast = TrialMeasurement(steps_per_s=1e9, memory_bytes=MIB)
    SearchStore(SPEC, machine, tmp_path).save_outcome(10, 128, fast)
    assert run(bench, machine, tmp_path).best.gmis_per_gpu == 8


def test_gpus_that_cannot_be_used_count_neither_as_devices_nor_for_memory(bench, tmp_path):
    # Of four, one admits nobody and one has 1 of 80 GiB free; 78 GiB are free on the fuller of the others.
    found = run(bench, load_machine("tests/data/machines/a100_80x4_in_use.json"), tmp_path)
    assert found.memory_bytes == 78 * 1024 * MIB
    assert found.best.system_steps_per_s == 2 * found.best.gmis_per_gpu * found.best.outcome.steps_per_s


def forget(store, outcome):
    """Leave a stored outcome out of the file."""
    content = store._read()
    del content["outcomes"][outcome]
    store.path.write_text(json.dumps({"key": store.key, "digest": _digest(content), **content}))


def test_an_interrupted_search_continues(bench, two_cores, tmp_path):
    bench.interrupt_at = (2, 32)
    with pytest.raises(KeyboardInterrupt):
        run(bench, two_cores, tmp_path)
    bench.interrupt_at = None
    found = run(bench, two_cores, tmp_path)
    assert bench.asked == [(gmis, envs) for gmis in (2, 1) for envs in ROW]
    assert len(found.trials) == len(bench.asked) + 1


def test_a_search_interrupted_during_validation_continues_there(bench, two_cores, tmp_path):
    run(bench, two_cores, tmp_path)
    asked = len(bench.asked)
    forget(SearchStore(SPEC, two_cores, tmp_path), "2x64 again 2")
    bench.confirmed.clear()
    assert run(bench, two_cores, tmp_path).best.num_envs == 64
    assert (len(bench.asked), bench.confirmed) == (asked, [(2, 64)])


def test_where_cores_hardly_wait_fewer_gmis_are_not_tried(bench, two_cores, tmp_path, monkeypatch):
    busy = bench.measure

    def measure(gmis, envs, settings):
        return replace(busy(gmis, envs, settings), phases_s={"simulate_s": 0.98, "sync_s": 0.02})

    monkeypatch.setattr(bench, "measure", measure)
    found = run(bench, two_cores, tmp_path)
    assert bench.asked == [(2, envs) for envs in ROW]
    left_out = [(trial.gmis_per_gpu, trial.verdict) for trial in found.trials if trial.outcome is None]
    assert left_out == [(1, "cannot win")]


def test_a_finished_search_is_not_run_again_unless_asked(bench, two_cores, tmp_path):
    first = run(bench, two_cores, tmp_path)
    asked = len(bench.asked)
    assert run(bench, two_cores, tmp_path, budget_s=1e-9).trials == first.trials
    assert len(bench.asked) == asked
    run(bench, two_cores, tmp_path, again=True)
    assert len(bench.asked) == 2 * asked


def test_measuring_one_candidate_again_keeps_the_other_measurements(bench, two_cores, tmp_path):
    run(bench, two_cores, tmp_path)
    before = SearchStore(SPEC, two_cores, tmp_path)
    before.save_outcome(1, 16, TrialMeasurement(steps_per_s=9.0, memory_bytes=1, duration_s=1.0))
    for round_ in (1, 2, 3, 4, -1):
        before.save_outcome(1, 16, TrialMeasurement(steps_per_s=9.0, memory_bytes=1), round_)
    others = {name: value for name, value in before._read()["outcomes"].items() if name[:4] != "1x16"}
    bench.asked.clear()
    run(bench, two_cores, tmp_path, gmis=1, num_envs=16, again=True)
    after = SearchStore(SPEC, two_cores, tmp_path)
    assert bench.asked == [(1, 16)]
    assert after.outcome(1, 16).steps_per_s != 9.0
    assert (len(after.rounds(1, 16)), after.outcome(1, 16, -1)) == (4, None)
    kept = {name: value for name, value in after._read()["outcomes"].items() if name[:4] != "1x16"}
    assert kept == others
    assert set(after._read()["notes"]) == {
        SearchSettings().name(),
        SearchSettings(gmis=1, num_envs=16).name(),
    }


def test_what_is_measured_again_counts_once_it_was_saved(two_cores, tmp_path):
    old, new = (TrialMeasurement(steps_per_s=speed, memory_bytes=1) for speed in (1.0, 2.0))
    before = SearchStore(SPEC, two_cores, tmp_path)
    before.save_note("noise scale", {"a": 1})
    for round_ in range(5):
        before.save_outcome(2, 16, old, round_)
    store = SearchStore(SPEC, two_cores, tmp_path, again=True)
    assert (store.outcome(2, 16), store.trials(2), store.load_note("noise scale")) == (None, (), None)
    store.save_outcome(2, 32, new)
    assert store.trials(2) == ((32, new),)
    assert SearchStore(SPEC, two_cores, tmp_path).outcome(2, 16, 4) == old
    # The rounds of before are not pooled with those of the new trial.
    store.save_outcome(2, 16, new)
    store.save_outcome(2, 16, new, 1)
    store.save_outcome(2, 16, new, 2)
    later = SearchStore(SPEC, two_cores, tmp_path)
    assert later.rounds(2, 16) == store.rounds(2, 16) == (new, new)
    assert later.load_note("noise scale") == {"a": 1}


def test_a_budget_ends_the_search_with_what_there_is(bench, two_cores, tmp_path):
    with pytest.raises(NothingMeasuredError, match="larger --budget"):
        run(bench, two_cores, tmp_path, budget_s=1e-9)
    bench.interrupt_at = (2, 32)
    with pytest.raises(KeyboardInterrupt):
        run(bench, two_cores, tmp_path)
    found = run(bench, two_cores, tmp_path, budget_s=1e-9)
    assert (found.best.num_envs, found.complete) == (16, False)
    assert found.best.verdict == "coarse"  # there was no time to confirm it


class Clock:
    """In the place of the module time: ten seconds pass with every measurement of a bench."""

    def __init__(self, bench):
        self.bench = bench

    def monotonic(self):
        return 10.0 * (len(self.bench.asked) + len(self.bench.confirmed))


@pytest.fixture
def clock(bench, monkeypatch):
    monkeypatch.setattr(searching, "time", Clock(bench))
    monkeypatch.setattr(auto, "_continued", set())


COARSE = [(gmis, envs) for gmis in range(10, 0, -1) for envs in (128, 1024)]
"""With the bench above, 1024 environments are no faster than 128, and 8192 are not tried."""


def test_a_budget_covers_all_numbers_of_gmis_before_it_looks_closely(bench, clock, eight_gpus, tmp_path):
    found = run(bench, eight_gpus, tmp_path, budget_s=220.0)
    # Twenty measurements in the coarse pass; then two of the rows, the fastest one first.
    assert bench.asked == [*COARSE, (10, 256), (9, 256)]
    assert (found.best.gmis_per_gpu, found.best.num_envs, found.complete) == (10, 128, False)
    assert found.best.verdict == "first"  # of its own row, not of the coarse pass
    assert found.untried == dict.fromkeys(range(8, 0, -1), (256, 512, 2048, 4096, 8192, 16384, 32768))
    assert found.rest() == "Not tried: 1-8 GMIs per GPU of 256-512, 2048-32768 environments."
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["complete"] is False


def test_a_search_that_its_budget_ended_is_continued_with_what_was_not_tried(
    bench, clock, eight_gpus, tmp_path
):
    first = run(bench, eight_gpus, tmp_path, budget_s=50.0)
    assert bench.asked == COARSE[:5]
    assert first.untried[10] == (256, 512, 2048, 4096, 8192, 16384, 32768)
    assert first.untried[7] == first.untried[1] == (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    found = run(bench, eight_gpus, tmp_path, budget_s=1e9)
    assert bench.asked == [*COARSE, *((gmis, 256) for gmis in range(10, 0, -1))]
    assert (found.complete, found.untried, found.rest()) == (True, {}, "")
    # What was measured before limits how long an iteration may last.
    assert len(bench.known[10]) > 1
    whole = run(bench, eight_gpus, tmp_path / "other")
    assert (found.best.gmis_per_gpu, found.best.num_envs) == (whole.best.gmis_per_gpu, whole.best.num_envs)
    # The finished search stays, whatever the next budget is.
    measured = len(bench.asked)
    again = run(bench, eight_gpus, tmp_path, budget_s=1e-9)
    assert (again.complete, len(bench.asked)) == (True, measured)


def test_auto_continues_an_incomplete_search_once_in_every_process(
    bench, clock, eight_gpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(auto, "BUDGET_S", 210.0)
    spec = replace(SPEC, gmi=replace(SPEC.gmi, gmis_per_gpu="auto", num_envs="auto"))
    messages = []

    def resolve(**options):
        messages.clear()
        return resolve_auto(spec, eight_gpus, log=messages.append, **options).gmi

    rest = "The search is not complete. Not tried: 1-9 GMIs per GPU of 256-512, 2048-32768 environments. "
    assert resolve().gmis_per_gpu == 10
    assert messages[0].startswith("Searching the best configuration of Ant-v5")
    assert messages[-2].startswith(rest)
    # A plan, a trial of Tune, and this process again take what there is, and say so.
    for options in ({"measuring": "nothing"}, {"measuring": "missing"}, {}):
        resolve(**options)
        assert len(bench.asked) == 21
        assert messages[0].startswith(rest)
    monkeypatch.setattr(auto, "_continued", set())
    assert resolve().gmis_per_gpu == 10
    assert messages[0].startswith("Continuing the search of the best configuration of Ant-v5")
    assert len(set(bench.asked)) == len(bench.asked) == 30
    assert len(messages) == 1 + 9 + len(bench.confirmed) + 1
    monkeypatch.setattr(auto, "_continued", set())
    resolve()
    assert messages == ["auto: 10 GMIs per GPU of 128 environments, by search."]


def test_crashes_are_tried_again_and_lack_of_memory_or_time_is_not(two_cores, tmp_path):
    store = SearchStore(SPEC, two_cores, tmp_path)
    store.save_outcome(2, 8, TrialFailure(kind="crashed", reason="signal 11"))
    store.save_outcome(2, 16, TrialFailure(kind="out of memory", reason="no 8 GiB"))
    store.save_outcome(2, 32, TrialFailure(kind="too long", reason="40 s"))
    again = SearchStore(SPEC, two_cores, tmp_path)
    assert again.outcome(2, 8) is None
    assert again.outcome(2, 16).kind == "out of memory"
    assert again.outcome(2, 32).kind == "too long"


def test_a_cache_that_cannot_be_written_is_reported_before_the_first_trial(bench, two_cores, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="give another folder with --cache"):
        run(bench, two_cores, tmp_path / "file" / "cache")
    assert bench.asked == []


def test_if_all_candidates_fail_the_reasons_are_reported(bench, two_cores, tmp_path):
    bench.fails = {(2, 16), (1, 16)}
    with pytest.raises(NothingMeasuredError, match="no candidate for Ant-v5 could be measured: signal 11"):
        run(bench, two_cores, tmp_path)


def test_what_two_processes_measure_at_the_same_time_is_all_kept(two_cores, tmp_path):
    """A store that was opened before another one's measurement keeps it, and its newer value of the same candidate."""
    early, late = (SearchStore(SPEC, two_cores, tmp_path) for _ in range(2))
    slow, fast = (TrialMeasurement(steps_per_s=speed, memory_bytes=1) for speed in (1.0, 2.0))
    early.save_outcome(1, 16, slow)
    early.save_note("early", {"a": 1})
    late.save_outcome(1, 32, slow)
    late.save_outcome(1, 16, fast)
    late.save_note("late", {"a": 2})
    early.save_outcome(1, 64, slow)
    for store in (early, SearchStore(SPEC, two_cores, tmp_path)):
        assert [envs for envs, _ in store.trials(1)] == [16, 32, 64]
        assert [store.load_note(name) for name in ("early", "late")] == [{"a": 1}, {"a": 2}]
    assert SearchStore(SPEC, two_cores, tmp_path).outcome(1, 16) == fast


def test_writers_wait_for_each_other(two_cores, tmp_path):
    stores = [SearchStore(SPEC, two_cores, tmp_path) for _ in range(4)]

    def save(store):
        for number in range(10):
            store.save_note(f"{stores.index(store)} {number}", {})

    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(save, stores))
    assert len(SearchStore(SPEC, two_cores, tmp_path)._read()["notes"]) == 40


def test_a_damaged_store_counts_as_empty(two_cores, tmp_path):
    store = SearchStore(SPEC, two_cores, tmp_path)
    store.save_note("n", {"a": 1})
    store.path.write_text(store.path.read_text()[:-20])
    assert SearchStore(SPEC, two_cores, tmp_path).load_note("n") is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content["outcomes"]["2x8"].update(speed=1),
        lambda content: content["outcomes"].update({"twoxeight": {"steps_per_s": 1.0, "memory_bytes": 1}}),
        lambda content: content["outcomes"].update({"2x16": 5}),
        lambda content: content["notes"]["n"].clear(),
        lambda content: content.pop("digest"),
    ],
)
def test_a_store_with_other_content_than_it_was_given_counts_as_empty(two_cores, tmp_path, damage):
    store = SearchStore(SPEC, two_cores, tmp_path)
    store.save_note("n", {"complete": True, "sizes": (1, 2), "by": {1: 2.5}})
    store.save_outcome(2, 8, TrialMeasurement(steps_per_s=1.0, memory_bytes=1))
    assert SearchStore(SPEC, two_cores, tmp_path).trials(2)
    content = json.loads(store.path.read_text())
    damage(content)
    store.path.write_text(json.dumps(content))
    again = SearchStore(SPEC, two_cores, tmp_path)
    assert again.load_note("n") is None
    assert again.trials(2) == ()
    assert again.outcome(2, 16) is None


def test_trials_that_differ_in_numbers_without_influence_on_speed_share_a_search(two_cores):
    key = search_key(SPEC, two_cores)
    for changed in (
        {"learning_rate": 1e-5, "gamma": 0.9, "gae_lambda": 0.5, "clip_ratio": 0.3},
        {"max_grad_norm": 2.0},
    ):
        assert search_key(replace(SPEC, learning=replace(SPEC.learning, **changed)), two_cores) == key
    for changed in ({"max_grad_norm": 0.0}, {"entropy_coef": 0.01}, {"value_clip": 0.2}, {"num_epochs": 2}):
        assert search_key(replace(SPEC, learning=replace(SPEC.learning, **changed)), two_cores) != key
    calmer = replace(SPEC, network=replace(SPEC.network, initial_log_std=-1.0))
    assert search_key(calmer, two_cores) == key


def test_the_key_tells_machines_and_tasks_apart_but_not_seeds_and_sizes(two_cores, eight_gpus):
    key = search_key(SPEC, two_cores)
    assert search_key(SPEC, eight_gpus) != key
    assert search_key(preset("Hopper-v5"), two_cores) != key
    assert search_key(replace(SPEC, learning=replace(SPEC.learning, rollout_length=128)), two_cores) != key
    other = replace(SPEC, seed=7, total_env_steps=10, gmi=replace(SPEC.gmi, num_gmis=2, num_envs=8))
    assert search_key(other, two_cores) == key


def test_the_key_covers_the_files_of_a_user_s_network_and_environment(two_cores, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    network = replace(SPEC, network=replace(SPEC.network, module=f"{tmp_path}/my_net.py:Net"))
    environment = replace(SPEC, env=replace(SPEC.env, id="my_tasks:Lander"))
    for spec, name in ((network, "my_net.py"), (environment, "my_tasks.py")):
        keys = [search_key(spec, two_cores)]  # no such file: whoever runs it says so
        for text in ("one", "other", "one"):
            (tmp_path / name).write_text(text)
            keys.append(search_key(spec, two_cores))
        assert keys[1] == keys[3]
        assert len({json.dumps(key) for key in keys}) == 3
    assert search_key(SPEC, two_cores)["user_code"] == {}


def test_auto_takes_what_a_search_found(bench, two_cores, tmp_path):
    spec = replace(SPEC, gmi=replace(SPEC.gmi, num_gmis="auto", num_envs="auto"))
    with pytest.raises(PlanError, match="rayagi search Ant-v5"):
        resolve_auto(spec, two_cores, measuring="nothing")
    messages = []
    found = resolve_auto(spec, two_cores, log=messages.append)
    assert (found.gmi.num_gmis, found.gmi.num_envs) == (2, 64)
    assert "auto: 2 GMIs of 64 environments" in messages[-1]
    asked = len(bench.asked)
    assert resolve_auto(spec, two_cores, measuring="nothing") == found
    assert len(bench.asked) == asked


def test_auto_leaves_given_numbers(bench, two_cores, eight_gpus, tmp_path):
    one = replace(SPEC, gmi=replace(SPEC.gmi, num_gmis=1, num_envs="auto"))
    found = resolve_auto(one, two_cores)
    assert (found.gmi.num_gmis, found.gmi.num_envs) == (1, 64)
    assert {gmis for gmis, _ in bench.asked} == {1}
    three = replace(SPEC, gmi=replace(SPEC.gmi, gmis_per_gpu=3, num_envs="auto"))
    found = resolve_auto(three, eight_gpus)
    assert (found.gmi.num_gmis, found.gmi.gmis_per_gpu, found.gmi.num_envs) == (None, 3, 128)


def test_numbers_alone_are_left_as_they_are(two_cores, tmp_path):
    assert resolve_auto(SPEC, two_cores) is SPEC


def test_a_plan_needs_numbers(two_cores):
    with pytest.raises(PlanError, match="auto"):
        plan_of(replace(SPEC, gmi=replace(SPEC.gmi, num_envs="auto")), two_cores)


def test_a_run_expects_what_was_probed(bench, two_cores, tmp_path):
    spec = replace(SPEC, gmi=replace(SPEC.gmi, num_gmis=2, num_envs=16))
    plan = plan_of(spec, two_cores)
    assert predict_throughput(spec, plan) is None
    run(bench, two_cores, tmp_path)
    expected = predict_throughput(spec, plan)
    assert expected.predicted_steps_per_s == pytest.approx(2 * 1000 * 1.2**5)
    assert (expected.source, expected.interval) == ("a short trial of 2 x 16 environments", None)
    assert expected.error is None
    save_prediction(expected, tmp_path)
    record_measurement(tmp_path, 4000.0)
    # 4976.64 predicted against 4000: 24.4 % too many
    assert load_prediction(tmp_path).text().endswith("measured 4,000, error +24.4 %")
    assert json.loads((tmp_path / "prediction.json").read_text())["error"] == pytest.approx(0.24416)


def test_the_own_work_of_a_gmi_is_predicted_without_its_waiting(two_cores, tmp_path):
    spec = replace(SPEC, gmi=replace(SPEC.gmi, num_gmis=2, num_envs=64))
    plan, store = plan_of(spec, two_cores), SearchStore(SPEC, two_cores, tmp_path)
    iteration_s = 64 * SPEC.learning.rollout_length / 1000.0
    for round_, waiting in ((1, 0.2), (2, 0.5)):
        phases_s = {"simulate_s": 0.3 * iteration_s, "sync_s": waiting * iteration_s}
        trial = TrialMeasurement(steps_per_s=1000.0, memory_bytes=MIB, phases_s=phases_s)
        store.save_outcome(2, 64, trial, round_)
    expected = predict_throughput(spec, plan)
    assert expected.predicted_steps_per_s == pytest.approx(2000)
    # 1000 / 0.8 and 1000 / 0.5
    assert expected.own_work_steps_per_s == pytest.approx((1250 + 2000) / 2)
    one = replace(spec, gmi=replace(spec.gmi, left_out=(0,)))
    assert predict_throughput(one, plan_of(one, two_cores)) is None


def test_a_run_expects_what_was_confirmed_and_not_the_trial(two_cores, tmp_path):
    spec = replace(SPEC, gmi=replace(SPEC.gmi, num_gmis=2, num_envs=64))
    plan, store = plan_of(spec, two_cores), SearchStore(SPEC, two_cores, tmp_path)
    for round_, speed in ((0, 4000.0), (1, 2900.0)):
        store.save_outcome(2, 64, TrialMeasurement(steps_per_s=speed, memory_bytes=MIB), round_)
    assert predict_throughput(spec, plan).predicted_steps_per_s == 8000
    store.save_outcome(2, 64, TrialMeasurement(steps_per_s=3100.0, memory_bytes=MIB), 2)
    expected = predict_throughput(spec, plan)
    # Two GMIs, of 2900 and 3100 steps/s: 6000. Their deviation is 141.4, and t is 3.078 with one degree of freedom:
    # 3.078 x 141.4 x sqrt(2 / 2) of 3000 is 14.5 %.
    assert (expected.predicted_steps_per_s, expected.source) == (
        6000,
        "2 measurements of 2 x 64 environments",
    )
    assert expected.half_width == pytest.approx(0.1451, abs=1e-4)
    for round_, speed in ((3, 2800.0), (4, 3200.0)):
        store.save_outcome(2, 64, TrialMeasurement(steps_per_s=speed, memory_bytes=MIB), round_)
    # Four rounds: deviation 182.6, t 1.638, sqrt(2 / 4): 211.5 of 3000.
    more = predict_throughput(spec, plan)
    assert (more.predicted_steps_per_s, more.source) == (6000, "4 measurements of 2 x 64 environments")
    assert more.half_width == pytest.approx(211.5 / 3000, abs=1e-4)


def test_a_prediction_reports_whether_the_run_was_within_its_interval(tmp_path):
    save_prediction(
        Prediction(predicted_steps_per_s=6000.0, half_width=0.1, source="5 measurements"), tmp_path
    )
    record_measurement(tmp_path, 5500.0, (4000.0, 6500.0))
    assert load_prediction(tmp_path).text() == (
        "6,000 steps/s (5,400 - 6,600 in 80 of 100 runs) by 5 measurements; measured 5,500 (4,000 - 6,500 in its parts), "
        "error +9.1 %, within the interval"
    )
    record_measurement(tmp_path, 5000.0)
    assert load_prediction(tmp_path).text().endswith("measured 5,000, error +20.0 %, outside of the interval")


def test_a_runs_parts_are_of_four_seconds_and_the_extreme_tenths_do_not_count():
    # Twenty parts of two iterations of 2 s: 10, 20, ... 200 steps/s.
    steps = [20.0 * (1 + place // 2) for place in range(40)]
    assert parts_range(steps, [2.0] * 40) == (30.0, 180.0)
    assert parts_range(steps[:4], [2.0] * 4) is None


def test_a_candidate_has_one_gpu_and_its_share_of_the_cores(eight_gpus):
    spec = candidate_spec(SPEC, eight_gpus, 4, 256)
    plan = plan_of(spec, eight_gpus)
    node = eight_gpus.nodes[0]
    assert len({gmi_slice.gpu_uuid for gmi_slice in plan.slices}) == 1
    assert {gmi_slice.num_threads for gmi_slice in plan.slices} == {max(1, len(node.cores) // 32)}
    assert plan.num_envs == 256


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError("no 8 GiB"), "out of memory"),
        (GpuMemoryError("mps[GPU-1 x0.50]", "Failed to allocate 8 bytes"), "out of memory"),
        (MemoryShortError("mujoco_warp", 8192, 2**20, 2**30, "cuda:0"), "out of memory"),
        (GmiLostError(0, "GMI 0", "training", "the node is running low on memory"), "out of memory"),
        (GmiLostError(0, "GMI 0", "training", "killed by SIGKILL by OOM killer or else"), "crashed"),
        (GmiSilentError("GMI 0", "training", 5.0), "hung"),
        (ZeroDivisionError("x"), "crashed"),
        (ConfigError("env.id", "x", "is wrong"), None),
        (ConnectionError("no Ray"), None),
        (ReservationError("2 x {1 CPU}", "1 CPU", "Wait", 10.0), None),
        (PlanError("num_gmis=9", "2 cores", "Use fewer"), "crashed"),
    ],
)
def test_what_an_end_means(error, kind):
    assert failure_kind(error) == kind


def test_a_change_of_models_kernels_or_transports_makes_old_measurements_void():
    files = set(code_files())
    assert {
        "actors/roles.py",
        "collectives/transports/shm/kernel.c",
        "rayagi/algorithms/ppo/learner.py",
        "rayagi/envs/mujoco_cpu/vec_env.py",
        "rayagi/models/networks.py",
        "rayagi/native/ppo.h",
        "rayagi/native/learning.py",
        "rayagi/serving/templates.py",
    } <= files
    assert not any(name.startswith("rayagi/cli/") for name in files)
    root = Path(rayagi.__file__).parents[1]
    for package in ("actors", "collectives", "placement", "rayagi"):
        sources = {str(path.relative_to(root)) for path in (root / package).rglob("*.[ch]")}
        assert {path for path in sources if not path.startswith("rayagi/profiler/")} <= files


@pytest.mark.parametrize("name", ["rayagi/native/ppo.h", "collectives/kernel.c", "rayagi/models/networks.py"])
def test_the_key_depends_on_what_the_code_says(tmp_path, monkeypatch, name):
    monkeypatch.setattr(rayagi, "__file__", str(tmp_path / "rayagi" / "__init__.py"))
    (tmp_path / name).parent.mkdir(parents=True)
    digests = []
    for text in ("one", "other", "one"):
        (tmp_path / name).write_text(text)
        digests.append(code_digest.__wrapped__())
    assert digests[0] == digests[2] != digests[1]
