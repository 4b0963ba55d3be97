"""When a probe reuses the processes of its session, and when it starts new ones. Fake sessions."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from actors.errors import GmiLostError, GmiSilentError
from actors.protocols import IterationResult
from placement.errors import ReservationError
from placement.inventory import load_machine
from placement.search import TrialFailure, TrialMeasurement
from rayagi.config.presets import preset
from rayagi.coordinator import probe as probing
from rayagi.coordinator.probe import PHASES, ProbeSettings, SessionProbe
from rayagi.envs.errors import EnvironmentOptionError

SETTINGS = ProbeSettings(
    relative_error=0.1,
    min_duration_s=1.0,
    loose_after_s=2.0,
    loose_error=0.2,
    max_duration_s=3.0,
    iteration_s=0.25,
)


class Sessions:
    """Makes sessions whose iterations take 1 ms for each environment and 64 steps; ``fails`` says what happens where."""

    def __init__(self):
        self.log, self.fails, self.falls_back = [], {}, False

    def __call__(self, spec, factory, make_plan, on_plan):
        self.make_plan = make_plan
        on_plan(SimpleNamespace(backend=spec.gmi.backend))
        if self.falls_back:
            on_plan(SimpleNamespace(backend="direct"))
        return _Session(self, spec, factory)

    def build(self, what, gmis, factory):
        """Builds are numbered from 1."""
        spec, _, parts = factory.args
        self.log.append((what, gmis, spec.gmi.envs, parts))
        error = self.fails.get(len(self.log))
        if error is not None:
            raise error
        steps = spec.gmi.envs * gmis * 64 / parts
        seconds = spec.gmi.envs / 1000 / parts
        phases = dict.fromkeys(PHASES, seconds / 4)
        metrics = {"env_steps": steps, "iteration_s": seconds, "resident_bytes": 2.0**28, **phases}
        return IterationResult(iteration=1, metrics=metrics)


class _Session:
    def __init__(self, sessions, spec, factory):
        self.sessions, self.gmis, self.factory = sessions, spec.gmi.num_gmis, factory

    def __enter__(self):
        self.result = self.sessions.build("started", self.gmis, self.factory)
        return self

    def rebuild(self, factory):
        self.result = self.sessions.build("rebuilt", self.gmis, factory)

    def submit(self, count):
        self.count = count

    def collect(self, timeout_s):
        return [self.result] * self.count

    def close(self):
        self.sessions.log.append(("closed", self.gmis))


@pytest.fixture
def sessions(monkeypatch):
    made = Sessions()
    monkeypatch.setattr(probing, "Session", made)
    return made


@pytest.fixture
def probe(sessions):
    return SessionProbe(preset("Ant-v5"), load_machine("tests/data/machines/cpu2.json"), SETTINGS)


def test_as_many_gmis_stay_and_others_are_started(sessions, probe):
    with probe:
        for gmis, num_envs in ((2, 16), (2, 32), (1, 32)):
            found = probe(gmis, num_envs)
            # 64 steps of each environment in 1 ms an environment: 64,000 steps/s of one GMI
            assert found.steps_per_s == pytest.approx(64_000)
    assert [entry[:3] for entry in sessions.log] == [
        ("started", 2, 16), ("rebuilt", 2, 32), ("closed", 2), ("started", 1, 32), ("closed", 1),
    ]  # fmt: skip


def test_mps_that_does_not_work_is_not_tried_in_every_trial(sessions, probe):
    sessions.falls_back = True
    backends = []
    for gmis in (1, 2):
        probe(gmis, 16)
        spec, *_ = probe._session.factory.args
        backends.append(spec.gmi.backend)
    assert backends == ["auto", "direct"]


def test_long_iterations_are_divided_by_earlier_measurements(sessions, probe):
    # Nothing is known: 64 steps of 1000 environments at 10,000 steps/s would take 6.4 s, an eighth of it 0.8 s, which is
    # as short as a preset with 8 minibatches can be made. It takes 1 s, so of 300 environments 0.3 s, and half of it 0.15.
    assert probe(1, 1000).phases_s == {name: pytest.approx(0.25) for name in PHASES}  # of a whole iteration
    probe(1, 300)
    probe(1, 16)
    assert [entry[3] for entry in sessions.log] == [8, 2, 1]


def test_what_fails_where_others_ran_before_is_tried_in_new_processes(sessions, probe):
    sessions.fails = {2: MemoryError("no 8 GiB left")}
    probe(2, 16)
    assert isinstance(probe(2, 32), TrialMeasurement)
    assert [entry[:3] for entry in sessions.log] == [
        ("started", 2, 16), ("rebuilt", 2, 32), ("closed", 2), ("started", 2, 32),
    ]  # fmt: skip


def test_what_fails_in_new_processes_has_failed(sessions, probe):
    sessions.fails = {1: MemoryError("no 8 GiB left")}
    assert probe(2, 16).kind == "out of memory"
    assert sessions.log == [("started", 2, 16, 1)]
    sessions.log.clear()
    sessions.fails = {2: ZeroDivisionError("x"), 4: ZeroDivisionError("y")}
    probe(2, 16)
    found = probe(2, 32)
    assert (found.kind, found.reason) == ("crashed", "ZeroDivisionError: y")
    assert [entry[0] for entry in sessions.log] == ["started", "rebuilt", "closed", "started"]


def test_a_process_that_somebody_kills_in_a_first_trial_is_not_the_candidates_fault(sessions, probe):
    sessions.fails = {1: GmiLostError(1, "GMI 1/2", "training", "its process was killed")}
    assert isinstance(probe(2, 16), TrialMeasurement)
    assert [entry[:3] for entry in sessions.log] == [("started", 2, 16), ("started", 2, 16)]


REFUSED = EnvironmentOptionError("Many-v0", "Gymnasium cannot make it with {}: RuntimeError: too many")


def test_so_many_environments_that_they_cannot_be_made_are_a_failure_of_the_candidate(sessions, probe):
    sessions.fails = {2: REFUSED, 4: REFUSED}
    probe(1, 16)
    found = probe(1, 256)
    assert (found.kind, found.reason) == ("crashed", f"EnvironmentOptionError: {REFUSED}")
    assert isinstance(probe(1, 32), TrialMeasurement)


def test_environments_that_were_made_in_an_earlier_search_can_be_made(sessions, probe):
    sessions.fails = {1: REFUSED, 2: REFUSED}
    probe.remember(1, 1000.0)
    assert probe(1, 256).kind == "crashed"


def test_an_environment_that_cannot_be_made_at_all_ends_the_probe(sessions, probe):
    sessions.fails = {1: REFUSED}
    with pytest.raises(EnvironmentOptionError, match="too many"):
        probe(1, 16)


def test_what_hangs_is_not_waited_for_twice(sessions, probe):
    sessions.fails = {2: GmiSilentError("GMI 0", "training", 120.0)}
    probe(2, 16)
    found = probe(2, 32)
    assert isinstance(found, TrialFailure)
    assert found.kind == "hung"
    assert [entry[0] for entry in sessions.log] == ["started", "rebuilt", "closed"]


def test_what_would_take_too_long_is_not_started(sessions, probe):
    probe(1, 16)
    # 64 steps of 65,536 environments at 64,000 steps/s: 65.5 s
    found = probe(1, 65536)
    assert (found.kind, found.reason) == ("too long", "an iteration would last 66 s; the limit is 40 s")
    assert isinstance(probe(1, 32), TrialMeasurement)
    assert [entry[:3] for entry in sessions.log] == [("started", 1, 16), ("rebuilt", 1, 32)]


@pytest.mark.parametrize(
    "error", [ReservationError("2 x {1 CPU}", "1 CPU", "Wait", 10.0), KeyboardInterrupt()]
)
def test_what_is_not_about_the_candidate_ends_the_probe_and_its_processes(sessions, probe, error):
    sessions.fails = {2: error}
    probe(2, 16)
    with pytest.raises(type(error)):
        probe(2, 32)
    assert sessions.log[-1] == ("closed", 2)


def test_memory_of_the_trial_before_is_not_taken_for_that_of_others(monkeypatch):
    before = load_machine("tests/data/machines/a100_80x4_in_use.json")
    (node,) = before.nodes
    spec = replace(preset("Ant-v5"), gmi=replace(preset("Ant-v5").gmi, num_envs=32))
    sessions = Sessions()
    monkeypatch.setattr(probing, "Session", sessions)
    with SessionProbe(spec, before, SETTINGS) as probe:
        probe(2, 128)
        # The processes of a trial that has just ended hold all of the first GPU, by an MPS server that ends too.
        held = replace(node.gpus[0], memory_free_bytes=0, mps_running=True)
        now = replace(before, nodes=(replace(node, ray_node_id="n1", gpus=(held, *node.gpus[1:])),))
        plan = sessions.make_plan(now)
    assert {gmi_slice.gpu_uuid for gmi_slice in plan.slices} == {held.uuid}
    assert [plan.memory_bytes(index) for index in range(2)] == [40 * 2**30] * 2
    assert (plan.backend, plan.machine.nodes[0].ray_node_id) == ("mps", "n1")
