"""The composed communicator over the reference transport: every composition, any layout, members in threads."""

import threading
from functools import partial, reduce

import pytest
import torch
from device_cases import values
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.buckets import adjacent, views
from collectives.compositions import compose, composition_names
from collectives.errors import CommunicatorError, CompositionError
from collectives.layout import Layout
from collectives.queue import OperationQueue
from collectives.rendezvous import poll
from tests.threads import in_threads, unfailed
from tests.unit.collectives.schedule_reference import execute
from tests.unit.collectives.thread_group import ThreadGroup

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
ACCURACY = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float64: 1e-14}


def run_threads(group: ThreadGroup, task) -> list:
    """What each rank's task returned; raises what one of them raised."""

    def member(rank: int):
        with group.communicator(rank) as communicator:
            return task(communicator)

    return unfailed(in_threads([partial(member, rank) for rank in range(group.layout.world_size)]))


def applicable(layout: Layout) -> list[str]:
    found = []
    for name in composition_names(layout):
        try:
            compose(name, layout)
        except CompositionError:
            continue
        found.append(name)
    return found


layouts = st.lists(
    st.lists(st.integers(min_value=1, max_value=10), min_size=1, max_size=8), min_size=1, max_size=4
).map(Layout.from_counts)


def check(layout: Layout, composition: str, size: int, dtype: torch.dtype, op: str) -> None:
    """Compare with float64, with the reference execution of the schedule, and all ranks with each other."""

    def task(communicator):
        tensor = values(communicator.rank, size, dtype)
        communicator.all_reduce(tensor, op)
        return tensor

    answers = run_threads(ThreadGroup(layout, composition), task)
    expected = [values(rank, size, dtype) for rank in range(layout.world_size)]
    execute(compose(composition, layout), expected, op)
    assert all(torch.equal(answer, expected[0]) for answer in answers)
    parts = [values(rank, size, dtype) for rank in range(layout.world_size)]
    if op == "max":
        assert torch.equal(answers[0], reduce(torch.maximum, parts))
    elif dtype == torch.int64:
        assert torch.equal(answers[0], reduce(torch.add, parts))
    else:
        total = reduce(torch.add, [part.double() for part in parts])
        total = total / len(parts) if op == "mean" else total
        scale = len(parts) * ACCURACY[dtype]
        torch.testing.assert_close(answers[0].double(), total, rtol=ACCURACY[dtype], atol=scale)


@settings(max_examples=40, deadline=None)
@given(
    layout=layouts,
    data=st.data(),
    size=st.sampled_from([0, 1, 7, 1001]),
    dtype=st.sampled_from(DTYPES),
    op=st.sampled_from(["sum", "mean", "max"]),
)
def test_any_layout_and_composition_reduces_right_and_bitwise_alike(layout, data, size, dtype, op):
    composition = data.draw(st.sampled_from(applicable(layout)))
    check(layout, composition, size, dtype, "sum" if dtype == torch.int64 and op == "mean" else op)


LAYOUT_4X3 = Layout.parse("4x3")


@pytest.mark.parametrize("composition", [*applicable(LAYOUT_4X3), "mpr", "mrr"])
def test_every_composition_reduces_four_devices_of_three(composition):
    for dtype in DTYPES:
        check(LAYOUT_4X3, composition, 1001, dtype, "sum")


def test_sixty_four_megabytes():
    # Element i of rank r is (r + 1)(i % 1000), so the sum of four is exact: 10 (i % 1000).
    ramp = torch.arange(1000, dtype=torch.float32).repeat(2**24 // 1000 + 1)[: 2**24]

    def task(communicator):
        tensor = ramp * (communicator.rank + 1)
        communicator.all_reduce(tensor)
        return torch.equal(tensor, 10 * ramp)

    assert run_threads(ThreadGroup(Layout.parse("2x1x2"), "har"), task) == [True] * 4


def everything(communicator):
    rank, size = communicator.rank, 100
    found = {}
    tensor = values(rank, size, torch.float64)
    communicator.reduce(tensor, "mean")
    found["reduce"] = tensor
    tensor = values(rank, size, torch.float64)
    found["share"] = communicator.reduce_scatter(tensor, "sum")
    found["scattered"] = tensor
    found["rows"] = communicator.all_gather(torch.full((2, 3), rank).t())
    tensor = values(rank, size, torch.bfloat16)
    communicator.broadcast(tensor, source=2)
    found["broadcast"] = tensor
    communicator.barrier()
    return found


@pytest.mark.parametrize("text", ["4", "2x2", "2x1x2", "1|3"])
def test_operations_that_are_no_all_reduce_know_no_layout(text):
    found = run_threads(ThreadGroup(Layout.parse(text)), everything)
    total = reduce(torch.add, [values(rank, 100, torch.float64) for rank in range(4)])
    assert torch.equal(found[0]["reduce"], total / 4)
    # 100 elements are 7 blocks of 16: 1, 2, 2 and 2 of them, the last one short
    assert [answer["share"] for answer in found] == [(0, 16), (16, 48), (48, 80), (80, 100)]
    for answer in found:
        begin, end = answer["share"]
        assert torch.equal(answer["scattered"][begin:end], total[begin:end])
        assert torch.equal(answer["rows"], torch.stack([torch.full((3, 2), rank) for rank in range(4)]))
        assert torch.equal(answer["broadcast"], values(2, 100, torch.bfloat16))


def test_bfloat16_is_summed_in_float32_and_rounded_once():
    # Between 256 and 512 bfloat16 knows even numbers only: 256 + 1 is 256 again, but 256 + 1 + 1 + 1 = 259 becomes 260.
    def task(communicator):
        tensor = torch.tensor([256.0 if communicator.rank == 0 else 1.0], dtype=torch.bfloat16)
        communicator.all_reduce(tensor)
        return tensor.item()

    assert run_threads(ThreadGroup.on_one_device(4), task) == [260.0] * 4


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("composition", ["ip_only", "rp_only", "har"])
def test_nan_and_infinity_propagate(composition):
    rows = torch.tensor([[NAN, INF, INF, 1.0], [0.0, -INF, INF, 2.0], [1.0, 0.0, 0.0, -INF], [1, 1, 1, 1]])

    def task(communicator):
        total, most = rows[communicator.rank].clone(), rows[communicator.rank].clone()
        communicator.all_reduce(total)
        communicator.all_reduce(most, "max")
        return torch.stack((total, most))

    expected = torch.tensor([[NAN, NAN, INF, -INF], [NAN, INF, INF, 2.0]])
    for answer in run_threads(ThreadGroup(Layout.parse("2x2"), composition), task):
        assert torch.equal(answer.nan_to_num(nan=-7.0), expected.nan_to_num(nan=-7.0))


def test_a_list_of_tensors_is_reduced_in_one_reused_bucket():
    shapes = ((3, 4), (), (0,), (17,))

    def task(communicator):
        sums = []
        for turn in range(3):
            tensors = [torch.full(shape, float(communicator.rank + turn)) for shape in shapes]
            communicator.all_reduce(tensors, "mean")
            sums.append([tensor.unique().tolist() for tensor in tensors])
        communicator.all_reduce([])
        return sums

    # ranks 0, 1, 2: the mean of turn + rank is turn + 1
    expected = [[[turn + 1.0], [turn + 1.0], [], [turn + 1.0]] for turn in range(3)]
    assert run_threads(ThreadGroup.on_one_device(3), task) == [expected] * 3


def test_views_of_a_buffer_are_reduced_in_place_as_one_bucket():
    buffer = torch.zeros(100)
    parts = views(buffer, [torch.empty(3, 4), torch.empty(()), torch.empty(17)])
    assert [tuple(part.shape) for part in parts] == [(3, 4), (), (17,)]
    flat = adjacent(parts)
    assert (flat.data_ptr(), flat.numel()) == (buffer.data_ptr(), 30)
    assert adjacent([parts[0], parts[2]]) is None
    assert adjacent([parts[1], parts[0]]) is None
    assert adjacent([parts[0], torch.empty(3)]) is None


def test_a_handle_is_pending_while_the_caller_computes():
    computed = threading.Event()

    def task(communicator):
        tensor = torch.full((1000,), float(communicator.rank + 1))
        if communicator.rank == 1:
            assert computed.wait(30)
            communicator.all_reduce(tensor)
            return tensor.unique().tolist()
        handle = communicator.all_reduce_async(tensor)
        product = torch.ones(50, 50) @ torch.ones(50, 50)
        assert not handle.done()
        computed.set()
        handle.wait()
        assert handle.done()
        assert (product == 50).all()
        return tensor.unique().tolist()

    assert run_threads(ThreadGroup.on_one_device(2), task) == [[3.0], [3.0]]


def test_operations_run_in_the_order_of_their_calls():
    def task(communicator):
        tensor = torch.tensor([float(communicator.rank)])
        handles = [communicator.all_reduce_async(tensor, op) for op in ("sum", "mean", "sum", "sum")]
        communicator.all_reduce(tensor, "mean")
        gathered = communicator.all_gather(tensor)
        assert all(handle.done() for handle in handles)
        return gathered.view(-1).tolist()

    # 0 + 1 + 2 = 3, its mean 3, then 9, then 27, whose mean is 27
    assert run_threads(ThreadGroup.on_one_device(3), task) == [[27.0] * 3] * 3


def test_an_asynchronous_error_is_raised_by_wait_and_by_later_operations():
    group = ThreadGroup.on_one_device(2, timeout_s=0.2)
    communicator = group.communicator(0)
    first, second = (communicator.all_reduce_async(torch.ones(3)) for _ in range(2))
    with pytest.raises(
        CommunicatorError, match=r"all_reduce on rank 0 failed in step 1 of 1, all_reduce by ip among 0 1"
    ):
        first.wait()
    with pytest.raises(CommunicatorError, match="an earlier all_reduce failed"):
        second.wait()
    with pytest.raises(CommunicatorError, match=r"barrier on rank 0 failed .* an earlier all_reduce failed"):
        communicator.barrier()
    with pytest.raises(CommunicatorError, match=r"send on rank 0 failed .* an earlier all_reduce failed"):
        communicator.send(torch.ones(1), to=1)  # at once, and not only by the handle's wait
    communicator.close()


def test_close_interrupts_the_running_operation_and_fails_waiting_ones():
    group = ThreadGroup.on_one_device(2, timeout_s=200.0)
    communicator = group.communicator(0)
    handles = [communicator.all_reduce_async(torch.ones(3)) for _ in range(3)]
    shared = group.transport("ip", (0, 1))
    assert poll(lambda: shared.deposits[0].numel() == 3 or None, 30.0)  # the first waits for rank 1
    communicator.close()
    communicator.close()
    for handle in handles:
        assert handle.done()
        with pytest.raises(CommunicatorError, match=r"left the group|closed"):
            handle.wait()
    with pytest.raises(CommunicatorError, match="closed"):
        communicator.barrier()


def test_a_queue_that_is_closed_while_it_is_idle_ends_its_thread():
    queue, ran_in = OperationQueue(0), []
    queue.start(lambda: ran_in.append(threading.current_thread())).wait()
    assert poll(lambda: bool(queue._moved._waiters) or None, 30.0)  # for the next operation
    queue.close(lambda: None, 30.0)
    ran_in[0].join(30.0)
    assert not ran_in[0].is_alive()


def test_an_error_names_the_step_in_which_a_member_was_missed():
    # Rank 3 does not come. Rank 2, on its device, misses it in the first step, rank 0 misses rank 2 in the second.
    group = ThreadGroup(Layout.parse("2x2"), "har", timeout_s=0.5)
    present = threading.Barrier(3)

    def task(communicator):
        if communicator.rank == 3:
            return ""
        present.wait(30)
        with pytest.raises(CommunicatorError) as caught:
            communicator.all_reduce(torch.ones(5))
        return caught.value.step

    answers = []

    def keep(communicator):
        answer = task(communicator)
        answers.append((communicator.rank, answer))
        return answer

    run_threads(group, keep)
    steps = dict(answers)
    assert steps[2] == "step 1 of 3, reduce by ip among 2 3"
    assert steps[0] == "step 2 of 3, all_reduce by rp among 0 2"
    assert steps[1] == "step 3 of 3, broadcast by ip among 0 1"


def test_groups_of_some_members_beside_the_whole():
    def task(communicator):
        even = communicator.group((2, 0))
        odd = communicator.group([1, 3])
        alone = communicator.group([3])
        mine = even if communicator.rank % 2 == 0 else odd
        assert (even is None, odd is None) == (communicator.rank % 2 == 1, communicator.rank % 2 == 0)
        assert (alone is not None) == (communicator.rank == 3)
        tensor = torch.tensor([float(communicator.rank)])
        handle = mine.all_reduce_async(tensor)
        whole = torch.tensor([1.0])
        communicator.all_reduce(whole)
        handle.wait()
        pairs = mine.group([0, 1])
        return mine.rank, tensor.item(), whole.item(), pairs.all_gather(torch.tensor(mine.rank)).tolist()

    expected = [(1, 2.0, 4.0, [0, 1]), (0, 4.0, 4.0, [0, 1]), (0, 2.0, 4.0, [0, 1]), (1, 4.0, 4.0, [0, 1])]
    assert run_threads(ThreadGroup(Layout.parse("2x2"), "har"), task) == expected


WRONG = {
    "mean of torch.int64": lambda c: c.all_reduce(torch.ones(2, dtype=torch.int64), "mean"),
    "op='min': use one of sum, mean, max": lambda c: c.all_reduce(torch.ones(2), "min"),
    "members exchange float32": lambda c: c.all_reduce(torch.ones(2, dtype=torch.float16)),
    "not contiguous": lambda c: c.all_reduce(torch.ones(2, 3).t()),
    "do not fit one bucket": lambda c: c.all_reduce([torch.ones(2), torch.ones(2).double()]),
    "source=2: the ranks are 0 to 1": lambda c: c.broadcast(torch.ones(2), source=2),
    "list different ranks": lambda c: c.group([0, 0]),
    "ranks=(0, 2)": lambda c: c.group([0, 2]),
    "ranks=()": lambda c: c.group([]),
}


@pytest.mark.parametrize("message", WRONG)
def test_invalid_arguments_are_refused_before_data_moves(message):
    communicator = ThreadGroup.on_one_device(2).communicator(0)
    with pytest.raises(ValueError) as caught:
        WRONG[message](communicator)
    assert message in str(caught.value)
