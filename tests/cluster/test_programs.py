"""A workload of another kind on a Ray of this machine: the papers' Listing 1 in Python's habits."""

import pytest
import torch

from experiments.stencil.heat import HeatStrip, solve
from placement.errors import PlanError
from rayagi.coordinator.session import SessionClosedError
from rayagi.programs import GmiConfig, GmiManager, GmiProgram

pytestmark = pytest.mark.cluster


def test_heat_in_strips_is_the_whole_plate_to_the_last_bit(cluster):
    whole, change = solve(size=31, num_steps=20)
    manager = GmiManager(GmiConfig(backend="cpu", threads_per_gmi=1), name="heat")
    for gmi_id in range(2):
        manager.add_gmi(gmi_id, HeatStrip, size=31)
    with manager:
        assert manager.plan.num_gmis == 2
        assert manager.plan.roles_of(0) == ("program",)
        manager.gmi_run(12)
        answers = manager.gmi_run(num_steps=8)
    assert [strip.shape[0] for strip, _ in answers] == [15, 16]
    assert torch.equal(torch.cat([strip for strip, _ in answers]), whole)
    assert [largest for _, largest in answers] == [change] * 2
    assert change > 0
    with pytest.raises(SessionClosedError):
        manager.gmi_run(1)


class Fails(GmiProgram):
    def gmi_run(self):
        if self.gmi_id == 1:
            raise LookupError("no such gene")
        self.recv(source=1)


@pytest.mark.slow
def test_what_a_program_raises_arrives_as_itself_though_another_waits_for_it(cluster):
    manager = GmiManager(GmiConfig(backend="cpu", threads_per_gmi=1))
    manager.add_gmi(0, Fails)
    manager.add_gmi(1, Fails)
    with manager, pytest.raises(LookupError, match="no such gene"):
        manager.gmi_run()


def added(*gmi_ids, config=None):
    manager = GmiManager(config)
    for gmi_id in gmi_ids:
        manager.add_gmi(gmi_id, Fails)
    return manager


@pytest.mark.parametrize(
    ("manager", "message"),
    [
        (added(), "count from 0"),
        (added(0, 2), "count from 0"),
        (added(0, config=GmiConfig(num_gmis=2)), "num_gmis=2: the program has 1 GMI"),
    ],
)
def test_gmis_that_do_not_add_up_are_refused_before_anything_starts(manager, message):
    with pytest.raises(PlanError, match=message):
        manager.__enter__()


def test_a_gmi_is_added_once_and_before_it_is_put_on_a_gpu():
    manager = added(0)
    with pytest.raises(ValueError, match="GMI 0 was added before"):
        manager.add_gmi(0, Fails)
    with pytest.raises(ValueError, match="add the GMI first"):
        manager.set_gpu(1, 0)


def test_gmis_on_one_gpu_share_it_evenly():
    manager = added(0, 1, 2, 3)
    for gmi_id, gpu_id in enumerate([0, 0, 0, 1]):
        manager.set_gpu(gmi_id, gpu_id)
    assert manager._gmi_config().slices == (1 / 3, 1 / 3, 1 / 3, 1.0)
    manager.set_gpu(3, 2)
    with pytest.raises(PlanError, match=r"GMIs on GPUs \[0, 0, 0, 2\]"):
        manager._gmi_config()
