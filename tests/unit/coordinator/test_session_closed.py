import pickle
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import rayagi.coordinator.session as session_module
from actors.errors import GmiLostError, GmiSilentError
from actors.protocols import IterationResult
from placement.errors import PartitionError, PlanError, ReservationError, SliceError
from placement.inventory import load_machine
from rayagi.config.spec import GmiSpec, RunSpec
from rayagi.coordinator.decoupled import session_of
from rayagi.coordinator.session import Session, SessionClosedError, states_of_gmis


@pytest.mark.parametrize("template", ["dp_only", "decoupled"])
def test_a_session_that_was_not_opened_says_so(template):
    session = session_of(RunSpec(gmi=GmiSpec(template=template)))
    for ask in (
        lambda: session.train(1),
        lambda: session.evaluate(1),
        session.state_dict,
        lambda: session.plan,
    ):
        with pytest.raises(SessionClosedError, match="not opened"):
            ask()
    session.close()
    session.close()


@pytest.mark.parametrize("count", [0, -1])
def test_counts_below_one_are_named(count):
    session = Session(RunSpec())
    with pytest.raises(ValueError, match=f"num_iterations={count}"):
        session.submit(count)
    with pytest.raises(ValueError, match=f"num_episodes={count}"):
        session.evaluate(count)


def test_a_plan_that_does_not_fit_is_refused_before_ray_starts(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    shown = []
    with pytest.raises(PlanError, match="num_gmis=10000"):
        Session(RunSpec(gmi=GmiSpec(num_gmis=10_000)), on_plan=shown.append).__enter__()
    assert shown == []


@pytest.mark.parametrize(
    "error",
    [
        GmiLostError(1, "GMI 1/2", "3 training iterations", "the worker died"),
        GmiSilentError("GMI 1/2", "entering its slice", 120.0),
        SessionClosedError("it was closed"),
    ],
)
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def test_a_lost_gmi_is_named_with_what_was_asked():
    text = str(GmiLostError(1, "GMI 1/2 cpu[1]", "3 training iterations", "the worker died"))
    # How to go on depends on the command: a forecast has no checkpoint to resume from.
    assert text == (
        "GMI 1/2 cpu[1] was lost during 3 training iterations: the worker died. "
        "If memory ran out, lower num_envs or num_gmis"
    )


@pytest.mark.parametrize(
    ("changes", "envs", "keeps"),
    [
        ({}, (4, 4), True),
        ({"envs": None}, (4, 4), True),  # of a run folder, whose settings do not change
        ({}, (6, 6), False),
        ({}, (6, 2), False),
        ({}, (4, 4, 4), False),
        ({"local": None}, (4, 4), False),
    ],
)
def test_gmis_get_their_own_states_back_if_they_have_the_environments_of_then(changes, envs, keeps):
    saved = {"shared": "weights", "local": ["first", "second"], "num_gmis": 2, "envs": (4, 4), **changes}
    state = {name: value for name, value in saved.items() if value is not None}
    own = [{"local": "first"}, {"local": "second"}] if keeps else [{} for _ in envs]
    assert states_of_gmis(state, envs) == [{"shared": "weights", **each} for each in own]


def test_gmis_are_given_the_absolute_path_of_a_replay(tmp_path, monkeypatch):
    """On a cluster they have another working directory than the driver."""
    monkeypatch.chdir(tmp_path)
    session, asked = Session.__new__(Session), []
    session._plan = SimpleNamespace(num_gmis=2)
    gmi = SimpleNamespace(save_replay=SimpleNamespace(remote=asked.append))
    session._ask = lambda question, text, of: [question(index, gmi) for index in of]
    assert session.save_replays(Path("runs/a/replay")) == {}
    assert asked == [str(tmp_path / f"runs/a/replay/gmi_{index}") for index in range(2)]


@pytest.mark.parametrize("given", [True, False])
def test_what_gmis_say_to_the_user_is_logged(given, caplog):
    """By every GMI alike: said as one."""
    logged = []
    session = session_of(RunSpec(), log=logged.append if given else None)
    results = [
        IterationResult(number, {"env_steps": 1.0}, notes=("actions are beyond",) * (number == 0))
        for number in range(2)
    ]
    session._group = SimpleNamespace(ask=lambda question: ["ref"], answers=lambda *given: [results] * 2)
    assert [result.metrics["env_steps"] for result in session.train(2)] == [2.0, 2.0]
    assert (logged or caplog.messages) == ["actions are beyond"]
    assert bool(logged) == given


def test_resources_that_the_program_holds_itself_are_named(monkeypatch):
    """As in a notebook, where the algorithm of a cell before was not stopped."""
    monkeypatch.setattr(session_module, "connected", lambda *given, **more: nullcontext())
    monkeypatch.setattr(session_module, "starts_local", lambda address: False)
    monkeypatch.setattr("rayagi.coordinator.deployment.join_and_build", lambda *given: None)
    found = SimpleNamespace(plan=None, workers=(), partitioners=None, group=None)
    monkeypatch.setattr(Session, "_deployed", lambda self, early, undo: found)
    first = Session(RunSpec(), factory=lambda context: None).__enter__()

    def refused(self, early, undo):
        raise ReservationError("1 x {2 CPU}", "vm: 2 CPU (0 free)", "Nothing would fit now", 10.0)

    monkeypatch.setattr(Session, "_deployed", refused)
    for notes in (
        ["This program has 1 other session open: algo.stop() or session.close() frees what it holds."],
        [],
    ):
        with pytest.raises(ReservationError) as caught:
            Session(RunSpec()).__enter__()
        assert getattr(caught.value, "__notes__", []) == notes
        first.close()


NO_DAEMON = PartitionError("`nvidia-cuda-mps-control -d` for GPU-1", "ended with exit code 1", "See dmesg")
NO_CLIENT = SliceError("process 7 attached to the MPS daemon", "none of its clients", "See its log")


@pytest.fixture
def without_mps(monkeypatch):
    """A GPU on which what needs MPS fails. Sets by what, and whether one process only may use the GPU."""
    found = SimpleNamespace(error=NO_DAEMON, compute_mode="default", deployed=[], undone=[])

    def local_machine():
        (node,) = load_machine("tests/data/machines/h100x1.json").nodes
        gpus = tuple(replace(gpu, compute_mode=found.compute_mode) for gpu in node.gpus)
        return replace(load_machine("tests/data/machines/h100x1.json"), nodes=(replace(node, gpus=gpus),))

    def deploy(plan, *, undo, **rest):
        found.deployed.append(plan)
        undo.callback(found.undone.append, plan.backend)
        if plan.backend == "mps" and found.error is NO_DAEMON:
            raise NO_DAEMON
        return SimpleNamespace(plan=plan, workers=(), partitioners=None, group=plan.backend)

    def join_and_build(group, gmi, factory):
        if group == "mps":
            raise NO_CLIENT

    monkeypatch.setattr(session_module, "connected", lambda *given, **more: nullcontext())
    monkeypatch.setattr(session_module, "starts_local", lambda address: True)
    monkeypatch.setattr(session_module, "recover_this_host", lambda: None)
    monkeypatch.setattr(session_module, "local_machine", local_machine)
    monkeypatch.setattr("rayagi.coordinator.deployment.deploy", deploy)
    monkeypatch.setattr("rayagi.coordinator.deployment.join_and_build", join_and_build)
    return found


def two_on_a_gpu(backend, logged, plans):
    spec = RunSpec(gmi=GmiSpec(backend=backend, gmis_per_gpu=2, num_envs=4))
    options = {"on_plan": plans.append, "factory": lambda context: None}
    return session_of(spec, log=logged.append, **options)


@pytest.mark.parametrize("error", [NO_DAEMON, NO_CLIENT])
def test_where_mps_does_not_work_auto_goes_on_without_it_and_says_so(without_mps, error):
    without_mps.error, logged, plans = error, [], []
    with two_on_a_gpu("auto", logged, plans) as session:
        mps, direct = without_mps.deployed
        assert (mps.backend, direct.backend) == ("mps", "direct")
        assert session.plan == plans[-1] == direct
        assert plans == [mps, direct]
        assert without_mps.undone == ["mps"]
    assert without_mps.undone == ["mps", "direct"]
    assert direct.bundles() == mps.bundles()
    assert direct.envs == mps.envs
    assert direct.slices[0].label() == "direct[GPU-00050000 x0.50]"
    assert direct.reason == f"{mps.reason}; direct instead, since mps failed"
    (line,) = logged
    assert line.startswith(f"With MPS it failed: {error} Since gmi.backend is auto, the run goes on")


def test_where_mps_does_not_work_a_run_that_names_it_ends_with_the_reason(without_mps):
    logged, plans = [], []
    with pytest.raises(PartitionError, match="ended with exit code 1"):
        two_on_a_gpu("mps", logged, plans).__enter__()
    assert [plan.backend for plan in without_mps.deployed] == without_mps.undone == ["mps"]
    assert logged == []


def test_where_mps_does_not_work_and_the_gpu_has_one_process_without_it_the_reason_is_that_of_mps(
    without_mps,
):
    without_mps.compute_mode, logged = "exclusive_process", []
    with pytest.raises(PartitionError, match="ended with exit code 1"):
        two_on_a_gpu("auto", logged, []).__enter__()
    assert logged == []
