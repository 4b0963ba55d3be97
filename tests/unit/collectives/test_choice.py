"""Choice of the schedule among several: members that claim to have devices, on this host's CPUs."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from actors.rendezvous_actor import RendezvousActor
from collectives import choice
from collectives.choice import load_or_measure_profile
from collectives.compositions import compose
from collectives.errors import CompositionError
from collectives.failure_detector import FailureDetector
from collectives.layout import Layout
from collectives.profile import CostProfile, ProfilePoint, StepShape, steps_to_measure
from collectives.rendezvous import gather_members, this_member
from collectives.transport_factory import GroupContext, GroupTransportFactory
from tests.threads import in_threads, unfailed

CPU = torch.device("cpu")


def on_all_members(layout, task):
    """What ``task(transport_factory, rank, control)`` returned on each, in threads."""
    world_size = layout.world_size
    collective = RendezvousActor(world_size)

    def member(rank):
        _, device = layout.places()[rank]
        with FailureDetector(this_member(rank, device=f"GPU-{device}")) as failure_detector:
            members = gather_members(
                collective, failure_detector, world_size=world_size, generation=0, timeout_s=20
            )
            context = GroupContext(
                rendezvous=collective,
                generation=0,
                timeout_s=20,
                transport="auto",
                composition="auto",
                device=CPU,
                failure_detector=failure_detector,
            )
            transport_factory = GroupTransportFactory(context, members, rank, "")
            control = transport_factory.scoped("control").transport("ip", tuple(range(world_size)))
            found = task(transport_factory, rank, control)
            control.barrier()
            control.close()
            return found

    return unfailed(in_threads([partial(member, rank) for rank in range(world_size)]))


LAYOUT = Layout.parse("2x2")


def test_working_primitives_are_found_by_probing():
    found = on_all_members(
        LAYOUT,
        lambda transport_factory, rank, control: choice.supported_primitives(
            transport_factory, LAYOUT, rank, control, CPU, timeout_s=20
        ),
    )
    # There is no GPU to share; rings are Gloo's here.
    assert found == [{"ip", "rp", "net"}] * 4


@pytest.fixture(autouse=True)
def profiles(tmp_path, monkeypatch):
    """Where they are kept, empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rayagi" / "profiles"


def test_all_members_choose_what_was_cheapest_of_all_that_was_timed():
    plans = on_all_members(
        LAYOUT,
        lambda transport_factory, rank, control: choice.plan_cheapest(
            transport_factory, LAYOUT, rank, control, CPU, {"ip", "rp", "net"}, runs=3
        ),
    )
    assert all(plan == plans[0] for plan in plans)
    plan = plans[0]
    assert plan.layout == LAYOUT
    assert dict(plan.rejected)["device_ip"] == "it needs device, which is not available"
    assert plan.chosen in plan.measured
    assert plan.expected_s(plan.chosen) == min(measured.measured_s for measured in plan.measured.values())


def chosen(composition, places):
    members = [
        replace(this_member(rank), host_id=host, device=device) for rank, (host, device) in enumerate(places)
    ]
    return choice.choose_schedule(None, members, 0, composition, CPU, timeout_s=1.0)


def test_without_a_gpu_there_is_nothing_to_choose():
    reason = "the only composition without GPUs"
    for places, text in (([("a", None)] * 3, "3"), ([("a", None), ("b", None), ("b", None)], "1|2")):
        assert chosen("auto", places) == (compose("ip_only", Layout.parse(text)), reason, None)


def test_a_requested_composition_is_run_or_refused():
    places = [("a", "GPU-0"), ("a", "GPU-1"), ("a", "GPU-0"), ("a", "GPU-1")]
    assert chosen("rp_only", places)[0].layout.mpl == [[0, 2], [1, 3]]
    with pytest.raises(CompositionError, match="no such composition"):
        chosen("ring", places)


POINTS = [
    ProfilePoint(shape, nbytes, 1e-3 if shape.primitive == "ip" else 5e-3)
    for shape in dict.fromkeys(
        StepShape.from_step(step, layout)
        for layout in (LAYOUT, Layout.parse("4"))
        for step in steps_to_measure(layout, ("ip", "rp"))
    )
    for nbytes in (4_096, 440_000)
]
MEASURED = CostProfile(machine="made up", points=tuple(POINTS))


def profiles_of_all(usable=("ip", "rp"), layout=LAYOUT):
    """What all members get, and who of them measured."""
    measured = []

    def member(transport_factory, rank, control):
        def measure():
            measured.append(rank)
            return MEASURED

        return load_or_measure_profile(control, CPU, layout, set(usable), measure)

    return on_all_members(LAYOUT, member), sorted(measured)


def test_a_machine_is_measured_once_for_each_layout_and_set_of_primitives(profiles):
    assert profiles_of_all() == ([MEASURED] * 4, [0, 1, 2, 3])
    assert profiles_of_all() == ([MEASURED] * 4, [])
    assert profiles_of_all(usable=("ip",))[1] == [0, 1, 2, 3]
    assert profiles_of_all(layout=Layout.parse("4"))[1] == [0, 1, 2, 3]
    assert len(list(profiles.iterdir())) == 3


NO_POINTS = CostProfile(machine="made up", points=()).to_json().encode()
FEW_POINTS = CostProfile(machine="made up", points=MEASURED.points[:2]).to_json().encode()


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"\xff\xfe", b'{"format": 7, "machine": "", "points": []}', b"[1]", NO_POINTS, FEW_POINTS],
)
def test_an_unreadable_cached_profile_is_measured_again(profiles, content, caplog):
    profiles_of_all()
    (kept,) = profiles.iterdir()
    kept.write_bytes(content)
    assert profiles_of_all() == ([MEASURED] * 4, [0, 1, 2, 3])
    assert f"{kept}: " in caplog.text
    assert "measured again" in caplog.text
    assert profiles_of_all()[1] == []


def test_members_continue_if_profiles_cannot_be_saved(profiles, caplog):
    profiles.parent.mkdir(parents=True)
    profiles.write_text("a file, where a folder should be")
    assert profiles_of_all() == ([MEASURED] * 4, [0, 1, 2, 3])
    assert "cannot be saved" in caplog.text


def test_a_cached_profile_is_used_for_the_plan(profiles):
    def member(transport_factory, rank, control):
        return choice.plan_cheapest(
            transport_factory, LAYOUT, rank, control, CPU, {"ip", "rp", "net"}, runs=2
        )

    first, second = on_all_members(LAYOUT, member), on_all_members(LAYOUT, member)
    assert first[0].model == second[0].model  # no second measurement would give equal times
