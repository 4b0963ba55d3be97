import math

import pytest
import torch

from collectives.errors import CompositionError
from collectives.layout import Layout
from collectives.schedule import CollectiveSchedule, Step, ranks_text
from tests.unit.collectives.schedule_reference import execute

TWO_BY_TWO = Layout.parse("2x2")
IN_DEVICES = Step("reduce", "ip", ((0, 1), (2, 3)))
ACROSS = Step("all_reduce", "rp", ((0, 2),))
BACK = Step("broadcast", "ip", ((0, 1), (2, 3)))


def schedule(*steps, layout=TWO_BY_TWO):
    return CollectiveSchedule("mine", layout, steps)


def test_a_right_schedule_is_built():
    made = schedule(IN_DEVICES, ACROSS, BACK)
    assert made.primitives == {"ip", "rp"}
    assert list(made.steps_of(2)) == [(0, IN_DEVICES, (2, 3)), (1, ACROSS, (0, 2)), (2, BACK, (2, 3))]
    assert [number for number, _, _ in made.steps_of(3)] == [0, 2]


def test_its_table_shows_steps_primitives_and_groups():
    assert schedule(IN_DEVICES, ACROSS, BACK).table().splitlines() == [
        "mine on 2x2",
        "  0  reduce      ip      (1 -> 0) (3 -> 2)",
        "  1  all_reduce  rp      (0 2)",
        "  2  broadcast   ip      (0 -> 1) (2 -> 3)",
    ]


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ((), "rank 0 ends without rank 1's contribution"),
        ((IN_DEVICES, ACROSS), "rank 1 ends with unspecified contents"),
        ((IN_DEVICES, BACK), "rank 0 ends without rank 2's contribution"),
        ((IN_DEVICES, IN_DEVICES), r"step 1 \(reduce by ip\): rank 1 has unspecified contents to add"),
        (
            (Step("all_reduce", "ip", ((0, 1), (2, 3))), Step("all_reduce", "ip", ((0, 1, 2, 3),))),
            "step 1 .*: rank 0's contribution would be added twice",
        ),
        ((IN_DEVICES, Step("broadcast", "ip", ((1, 0),))), "rank 1 has unspecified contents to send"),
        (
            # The same four contributions, but 0+2 first here and 1+3 first there.
            (Step("all_reduce", "rp", ((0, 2), (1, 3))), Step("all_reduce", "ip", ((0, 1), (3, 2)))),
            "ranks 0 and 2 end with sums taken in different orders",
        ),
    ],
)
def test_a_schedule_that_reduces_wrongly_cannot_be_built(steps, reason):
    with pytest.raises(CompositionError, match=reason):
        schedule(*steps)


def test_equal_sums_in_equal_order_are_equal_wherever_they_are_made():
    schedule(Step("all_reduce", "rp", ((0, 2), (1, 3))), Step("all_reduce", "ip", ((0, 1), (2, 3))))


@pytest.mark.parametrize(
    ("primitive", "group", "layout"),
    [
        ("rp", (0, 1), "1x2"),  # one device twice
        ("rp", (0, 1), "2x1x1"),  # two hosts
        ("ip", (0, 1), "2x1x1"),
        ("device", (0, 1), "2x1"),
        ("net", (0, 1), "1x2"),
    ],
)
def test_a_primitive_connects_only_whom_it_can(primitive, group, layout):
    with pytest.raises(CompositionError, match=f"{primitive} works .*, not among 0 1"):
        schedule(Step("all_reduce", primitive, (group,)), layout=Layout.parse(layout))


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        ((), "no groups"),
        (((0,), (1, 2)), "a group of 1"),
        (((0, 1), (1, 2)), "rank 1 occurs twice"),
        (((0, 0, 1),), "rank 0 occurs twice"),
        (((0, 4),), "there is no rank 4"),
    ],
)
def test_groups_are_disjoint_and_of_ranks_that_exist(groups, reason):
    with pytest.raises(CompositionError, match=reason):
        schedule(Step("all_reduce", "ip", groups))


def test_ranks_are_written_short():
    assert ranks_text((0, 1, 2, 3, 6, 8, 9)) == "0-3 6 8 9"


def test_the_reference_computes_sum_mean_and_max():
    made = schedule(IN_DEVICES, ACROSS, BACK)
    for op, expected in (("sum", [10.0, -2.0]), ("mean", [2.5, -0.5]), ("max", [4.0, 1.0])):
        tensors = [torch.tensor(row) for row in ([1.0, 1.0], [2.0, -1.0], [3.0, -1.0], [4.0, -1.0])]
        execute(made, tensors, op)
        assert [tensor.tolist() for tensor in tensors] == [expected] * 4


def test_the_reference_rounds_bfloat16_once_per_step():
    # 256 + 1 is not a bfloat16 (8 bits of mantissa): added one after another it would stay 256. In float32 the sum of
    # 256 and three 1 is 259, and rounds to 260.
    tensors = [torch.tensor([value], dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0, 1.0)]
    execute(schedule(Step("all_reduce", "ip", ((0, 1, 2, 3),))), tensors)
    assert [tensor.item() for tensor in tensors] == [260.0] * 4


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_nan_propagates(op):
    tensors = [torch.tensor([value, math.inf]) for value in (1.0, math.nan, 2.0, math.inf)]
    execute(schedule(IN_DEVICES, ACROSS, BACK), tensors, op)
    assert all(math.isnan(tensor[0]) and tensor[1] == math.inf for tensor in tensors)


def test_the_reference_wants_a_tensor_of_each_rank_and_no_mean_of_integers():
    made = schedule(IN_DEVICES, ACROSS, BACK)
    with pytest.raises(ValueError, match="3 tensors for 4 ranks"):
        execute(made, [torch.zeros(1)] * 3)
    with pytest.raises(ValueError, match="int64"):
        execute(made, [torch.zeros(1, dtype=torch.int64) for _ in range(4)], "mean")
