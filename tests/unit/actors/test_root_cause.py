"""The error of a call to several GMIs: of one that is stopped, the others only know that something did not arrive."""

import itertools
import logging
from types import SimpleNamespace

import pytest
import ray.exceptions
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, OutOfMemoryError

from actors import groups, ping
from actors.errors import GmiLostError, GmiSilentError, ObjectStoreError
from actors.gmi import GmiIdentity
from actors.groups import GmiGroup
from actors.ping import PingMonitor
from collectives import limits
from collectives.experience.errors import ChannelError
from placement.types import Slice
from rayagi.cli.failures import explain
from rayagi.coordinator.probe import failure_kind


class _RayTaskError(Exception):
    def __init__(self, cause):
        super().__init__()
        self.cause = cause


@pytest.fixture
def group(monkeypatch):
    """Two GMIs, of which the first has a failed call and the second has not answered."""

    def get(ref):
        raise _RayTaskError(ChannelError("experience", "producers 1 did not send"))

    def wait(refs, *, num_returns=1, timeout):
        ready = [ref for ref in refs if ref == "call 0"]
        return ready, [ref for ref in refs if ref != "call 0"]

    exceptions = SimpleNamespace(RayTaskError=_RayTaskError, RayError=_RayTaskError)
    monkeypatch.setattr(groups, "ray", SimpleNamespace(get=get, wait=wait, exceptions=exceptions))
    pings = PingMonitor(silence_s=60.0)
    pings.add(1, ("b", 2))
    identities = [
        GmiIdentity(
            index=index, num_gmis=2, slice=Slice(node="n", backend="cpu"), roles=("trainer",), task="Point"
        )
        for index in range(2)
    ]
    return GmiGroup(identities, [], None, pings)


def test_what_ray_writes_about_memory_is_one_clause(group, monkeypatch):
    """As of Ray 2.60, shortened."""

    def get(ref):
        raise OutOfMemoryError(
            "2 worker(s) were killed due to the node running low on memory.\nMemory on the node (IP: 192.0.2.2, ID: 4bda) "
            "was 2.07GB used / 2.15GB limit (0.961499); OOM kill reason: Memory usage 2212544512B exceeded threshold.\n"
            "Object store memory usage: [- objects spillable: 0\n- bytes spillable: 0\n]"
        )

    monkeypatch.setattr(groups, "ray", SimpleNamespace(get=get, exceptions=ray.exceptions))
    lost = group.failure(1, "call 1", "1 training iteration")
    assert lost.known == "Ray ended it, as its node was running low on memory (2.07GB of 2.15GB in use)"
    assert failure_kind(lost) == "out of memory"


def test_a_process_that_ended_itself_is_not_taken_for_one_that_was_killed(group, monkeypatch):
    def get(ref):
        raise ray.exceptions.WorkerCrashedError("Worker unexpectedly exits with a connection error code 2.")

    monkeypatch.setattr(ray.exceptions.WorkerCrashedError, "__str__", lambda error: error.args[0])
    monkeypatch.setattr(groups, "ray", SimpleNamespace(get=get, exceptions=ray.exceptions))
    known = group.failure(1, "call 1", "1 training iteration").known
    assert known.startswith("its process was killed")
    assert known.endswith("or code of the environment ended it (os._exit)")


def test_a_stopped_gmi_is_the_cause_of_what_the_others_did_not_get(group, monkeypatch):
    monkeypatch.setattr(ping, "is_stopped", lambda address: True)
    with pytest.raises(GmiLostError) as caught:
        group.answers(["call 0", "call 1"], "1 training iteration", 60.0)
    assert caught.value.index == 1
    assert "GMI 1/2" in str(caught.value)
    assert "its process has answered nothing" in str(caught.value)
    assert "producers 1 did not send" in str(caught.value)


def test_a_gmi_that_answers_is_not(group, monkeypatch):
    monkeypatch.setattr(ping, "is_stopped", lambda address: False)
    with pytest.raises(ChannelError, match="producers 1 did not send"):
        group.answers(["call 0", "call 1"], "1 training iteration", 60.0)


def test_the_error_about_a_program_that_does_not_come_says_where_it_is(group, monkeypatch):
    monkeypatch.setattr(ping, "is_stopped", lambda address: False)
    monkeypatch.setattr(ping, "code_position", lambda address: f"/envs/{address[0]}.py:7 in step")
    with pytest.raises(ChannelError) as caught:
        group.answers(["call 0", "call 1"], "1 training iteration", 60.0)
    assert caught.value.__notes__ == ["GMI 1/2 cpu[1 thread] trainer Point is still at /envs/b.py:7 in step."]
    with pytest.raises(GmiSilentError, match=r"within 0 s; .*; its program was at /envs/b.py:7 in step$"):
        group.answers(["call 1"], "1 training iteration", 0.0, of=[1])


@pytest.mark.parametrize(
    ("waited_s", "notes"),
    [(4.0, []), (6.0, ["GMI 1/2 cpu[1 thread] trainer Point is still at e.py:7 in step."])],
)
def test_who_ends_a_long_wait_by_ctrl_c_is_told_where_the_program_is(group, monkeypatch, waited_s, notes):
    times = iter([0.0])
    monkeypatch.setattr(groups, "time", SimpleNamespace(monotonic=lambda: next(times, waited_s)))
    monkeypatch.setattr(ping, "code_position", lambda address: "e.py:7 in step")

    def wait(refs, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(groups.ray, "wait", wait)
    with pytest.raises(KeyboardInterrupt) as caught:
        group.answers(["call 1"], "1 training iteration", 60.0, of=[1])
    assert getattr(caught.value, "__notes__", []) == notes


@pytest.mark.parametrize("where", ["in the GMI", "in the driver"])
@pytest.mark.parametrize("kind", [OutOfDiskError, ObjectStoreFullError])
def test_an_object_store_that_others_have_filled_is_said_and_no_gmi_is_lost(group, monkeypatch, where, kind):
    def get(ref):
        raise _RayTaskError(kind("full")) if "GMI" in where else kind("full")

    monkeypatch.setattr(groups.ray, "get", get)
    with pytest.raises(ObjectStoreError) as caught:
        group.answers(["call 0"], "its state", 60.0, of=[0])
    assert str(caught.value).startswith(
        "GMI 0/2 cpu[1 thread] trainer Point cannot answer the call for its state: Ray's object store on its node is full"
    )
    assert (known := explain(caught.value)) is not None
    assert (known.exit_code, known.error) == (1, caught.value)


def test_a_long_wait_is_told_once_with_where_the_program_is(group, monkeypatch, caplog):
    """The clock goes on by five seconds at each look; the call has ten minutes."""
    clock = itertools.count(0.0, 5.0)
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(ping, "is_stopped", lambda address: False)
    monkeypatch.setattr(ping, "code_position", lambda address: "e.py:7 in step")
    with caplog.at_level(logging.WARNING), pytest.raises(GmiSilentError):
        group.answers(["call 1"], "18 training iterations", 600.0, of=[1])
    assert caplog.messages == [
        "GMI 1/2 cpu[1 thread] trainer Point has not answered for 5 min; the call was: 18 training iterations; its program "
        "is at e.py:7 in step; the limit is 10 min"
    ]


def test_of_several_gmis_that_hang_each_is_named_with_its_line(group, monkeypatch):
    monkeypatch.setattr(ping, "code_position", lambda address: f"/envs/{address[0]}.py:7 in step")
    group.pings.add(0, ("a", 1))
    monkeypatch.setattr(groups.ray, "wait", lambda refs, **options: ([], refs))
    with pytest.raises(
        GmiSilentError, match=r"^GMI 0/2 .*; its program was at /envs/a\.py:7 in step"
    ) as caught:
        group.answers(["call 0", "call 1"], "1 training iteration", 0.0)
    assert caught.value.__notes__ == ["GMI 1/2 cpu[1 thread] trainer Point is still at /envs/b.py:7 in step."]


def test_the_time_for_which_the_driver_itself_was_stopped_does_not_count(group, monkeypatch):
    """It is stopped for an hour in the first of three looks; the answer comes between the second and the third."""
    clock, looks = SimpleNamespace(now_s=0.0), []

    def wait(refs, *, timeout):
        looks.append(timeout)
        clock.now_s += 3600.0 if len(looks) == 1 else timeout
        return (refs, []) if len(looks) == 3 else ([], refs)

    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(groups.ray, "wait", wait)
    monkeypatch.setattr(groups.ray, "get", lambda refs: ["answer"])
    assert group.answers(["call 0"], "1 training iteration", 60.0, of=[0]) == ["answer"]
    assert looks == [5.0, 5.0, 5.0]
