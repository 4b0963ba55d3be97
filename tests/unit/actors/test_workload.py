"""User-defined workloads with GMIs as threads: the non-RL example, groups and messages."""

from functools import partial

import pytest
import torch

from actors.gmi import GmiContext
from experiments.stencil.heat import HeatStrip, cold_plate, rows_of, solve, step
from rayagi.programs import GmiProgram
from tests.threads import in_threads, unfailed
from tests.unit.collectives.thread_group import ThreadGroup


def run_gmis(num_gmis, program, *args, run=()):
    """Build the program on every GMI and run it; their answers in order."""
    group = ThreadGroup.on_one_device(num_gmis, timeout_s=30.0)

    def member(rank):
        context = GmiContext.local("t", group.communicator(rank), roles=("program",))
        return program(context, *args).gmi_run(*run)

    return unfailed(in_threads([partial(member, rank) for rank in range(num_gmis)]))


class Roles(GmiProgram):
    """GMIs 0 and 2 all-reduce their values; GMI 2 sends the result to GMI 1."""

    def __init__(self, context, offset):
        super().__init__(context)
        self.offset = offset
        self.group = self.get_group([2, 0])

    def gmi_run(self, factor):
        value = torch.tensor([float(self.gmi_id + self.offset)])
        if self.group is None:
            return self.recv(source=2).item() * factor
        self.all_reduce(value, group=self.group)
        if self.gmi_id == 2:
            self.send(value, to=1).wait()
        self.close()
        return value.item()


def test_groups_hold_some_gmis_and_messages_reach_the_others():
    assert run_gmis(3, Roles, 1, run=(10,)) == [4.0, 40.0, 4.0]


def test_one_step_of_heat_by_hand():
    # 2 x 2 inner points under a hot edge: 0 + 0.2 (1 + 0 + 0 + 0 - 0) above, 0 below.
    plate = cold_plate(2, 2, upper_edge=True)
    assert step(plate).tolist() == [[0.2, 0.2], [0.0, 0.0]]
    inner, change = solve(2, 2)
    # Above: 0.2 + 0.2 (1 + 0 + 0.2 - 0.8) = 0.28; below: 0.2 x 0.2 = 0.04.
    assert inner.tolist() == [pytest.approx([0.28, 0.28]), pytest.approx([0.04, 0.04])]
    assert change == pytest.approx(0.08)


@pytest.mark.parametrize(("num_gmis", "size"), [(1, 4), (2, 7), (3, 8), (4, 4)])
def test_heat_in_strips_is_the_whole_plate_to_the_last_bit(num_gmis, size):
    whole, change = solve(size, num_steps=15)
    answers = run_gmis(num_gmis, HeatStrip, size, run=(15,))
    assert torch.equal(torch.cat([strip for strip, _ in answers]), whole)
    assert [largest for _, largest in answers] == [change] * num_gmis


def test_rows_are_partitioned_without_gaps():
    assert [list(rows_of(index, 3, 5)) for index in range(3)] == [[0], [1, 2], [3, 4]]
