"""Choosing a schedule where there are several: members that say that they have devices, on this host's CPUs."""

import threading
from dataclasses import replace

import pytest
import torch

from actors.collective import Collective
from collectives import choice
from collectives.compositions import compose
from collectives.errors import CompositionError
from collectives.layout import Layout
from collectives.liveness import Liveness
from collectives.planner import make_plan
from collectives.rendezvous import meet, this_member
from collectives.wires import Meeting, Wires

CPU = torch.device("cpu")


def on_all_members(layout, task):
    """What ``task(wires, rank, control)`` returned on each, in threads."""
    world_size = layout.world_size
    collective = Collective(world_size)
    found = [None] * world_size

    def member(rank):
        _, device = layout.places()[rank]
        with Liveness(this_member(rank, device=f"GPU-{device}")) as liveness:
            members = meet(collective, liveness, world_size=world_size, generation=0, timeout_s=20)
            meeting = Meeting(
                rendezvous=collective,
                generation=0,
                timeout_s=20,
                transport="auto",
                composition="auto",
                device=CPU,
                liveness=liveness,
            )
            wires = Wires(meeting, members, rank, "")
            control = wires.apart("control").transport("ip", tuple(range(world_size)))
            found[rank] = task(wires, rank, control)
            control.barrier()
            control.close()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


LAYOUT = Layout.parse("2x2")


def test_what_works_is_found_by_trying_it():
    found = on_all_members(
        LAYOUT,
        lambda wires, rank, control: choice.offered(wires, LAYOUT, rank, control, CPU, timeout_s=20),
    )
    # There is no GPU to share; rings are Gloo's here.
    assert found == [{"ip", "rp", "net"}] * 4


def test_all_members_choose_the_same_schedule_from_what_they_measured(monkeypatch):
    models = []

    def remember(layout, nbytes, model, usable):
        models.append(model)
        return make_plan(layout, nbytes, model, usable)

    monkeypatch.setattr(choice, "make_plan", remember)
    schedules = on_all_members(
        LAYOUT,
        lambda wires, rank, control: choice.cheapest(
            wires, LAYOUT, rank, control, CPU, {"ip", "rp", "net"}, runs=3
        ),
    )
    assert all(schedule == schedules[0] for schedule in schedules)
    assert all(model == models[0] for model in models)
    assert {primitive for primitive, _ in models[0].lines} == {"ip", "rp"}
    plan = make_plan(LAYOUT, choice.TYPICAL_BYTES, models[0], {"ip", "rp"})
    assert schedules[0].composition == min(plan.candidates, key=lambda candidate: candidate.model_s).name


def chosen(composition, places):
    members = [
        replace(this_member(rank), host_id=host, device=device) for rank, (host, device) in enumerate(places)
    ]
    return choice.choose(None, members, 0, composition, CPU, timeout_s=1.0)


def test_without_a_gpu_there_is_nothing_to_choose():
    assert chosen("auto", [("a", None)] * 3) == compose("ip_only", Layout.parse("3"))
    assert chosen("auto", [("a", None), ("b", None), ("b", None)]) == compose("ip_only", Layout.parse("1|2"))


def test_what_was_asked_for_is_run_or_refused():
    places = [("a", "GPU-0"), ("a", "GPU-1"), ("a", "GPU-0"), ("a", "GPU-1")]
    assert chosen("rp_only", places).layout.mpl == [[0, 2], [1, 3]]
    with pytest.raises(CompositionError, match="no such composition"):
        chosen("ring", places)
