"""A member that is suspended, given up, and resumed. ``experiments.allreduce.suspension`` runs the long version."""

import threading

import pytest
import torch
from test_shm_kernel import close, group

from collectives.errors import CommunicatorError
from collectives.rendezvous import this_member
from collectives.transports import calls
from collectives.transports.gloo import GlooStore, GlooTransport
from collectives.transports.shm import kernel, memory
from experiments.allreduce.suspension import run
from tests.threads import in_threads
from tests.unit.collectives.thread_transport import InProcessGroup


@pytest.mark.parametrize(
    "without_compiler",
    [pytest.param(False, id="compiled"), pytest.param(True, id="python", marks=pytest.mark.slow)],
)
def test_a_suspended_member_completes_nothing_that_was_given_up_and_changes_nothing(without_compiler):
    rounds = run(
        6,
        sizes=(440_000, 1_216),
        kinds=("registered", "mixed", "group"),
        without_compiler=without_compiler,
        seed=1,
    )
    assert [problem for one in rounds for problem in one.problems] == []


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "gloo"])
def test_the_same_over_tcp_and_gloo(transport):
    kinds = ("registered", "broadcast", "group")
    rounds = run(3, sizes=(440_000, 1_216), kinds=kinds, transport=transport, seed=1)
    assert [problem for one in rounds for problem in one.problems] == []


@pytest.mark.parametrize("kind", ["broadcast", "all_reduce", "reduce", "reduce_scatter"])
def test_what_gloo_completes_after_it_was_given_up_reaches_no_tensor(kind):
    """Rank 1 is suspended between comparing calls and moving data; rank 0 times out, then rank 1 resumes."""
    store = GlooStore.host([this_member(0)], 10.0)
    members = [this_member(rank) for rank in range(2)]
    made = [None, None]

    def connect(rank):
        found = store if rank == 0 else GlooStore.connect(store.endpoint, 1, 10.0)
        made[rank] = GlooTransport(found, members, rank, 0.3 if rank == 0 else 1.5)

    assert in_threads([lambda: connect(0), lambda: connect(1)]) == [None, None]
    tensors = [torch.full((200_000,), rank + 1.0) for rank in range(2)]
    given_up, really_agree = threading.Event(), made[1]._check_same_call

    def agree_and_stop(*call, **details):
        really_agree(*call, **details)
        assert given_up.wait(20)

    made[1]._check_same_call = agree_and_stop

    def operate(rank):
        operation = getattr(made[rank], kind)
        operation(tensors[rank], *((1,) if kind == "broadcast" else ()))

    def give_up():
        with pytest.raises(CommunicatorError, match="not all came within"):
            operate(0)
        tensors[0].fill_(7.0)
        given_up.set()

    failed, _ = in_threads([give_up, lambda: operate(1)])
    assert failed is None
    assert tensors[0].eq(7.0).all()
    assert not tensors[1].eq(7.0).any()
    for transport in made:
        transport.close()


def test_what_others_write_after_a_close_is_not_seen():
    transports = group(3)
    buffers = [None] * 3

    def ask(rank):
        buffers[rank] = transports[rank].buffer(5000, torch.float32)

    in_threads([lambda rank=rank: ask(rank) for rank in range(3)])
    theirs = (
        transports[2]._regions[-1].views(5000, torch.float32)
    )  # as one that is in the middle of a chunk sees them
    buffers[0].fill_(1.0)
    address = buffers[0].data_ptr()
    transports[0].close()
    for view in theirs:
        view.fill_(9.0)
    assert buffers[0].data_ptr() == address
    assert buffers[0].eq(1.0).all()
    assert buffers[1].eq(9.0).all()  # not closed
    buffers[0].fill_(2.0)
    assert theirs[0].eq(9.0).all()
    close(transports)


def test_memory_that_cannot_be_made_private_is_named(monkeypatch, caplog):
    transports = group(2)
    buffers = [None, None]

    def ask(rank):
        buffers[rank] = transports[rank].buffer(5000, torch.float32)

    in_threads([lambda rank=rank: ask(rank) for rank in range(2)])
    monkeypatch.setattr(memory._libc, "mmap", lambda *arguments: memory._MAP_FAILED)
    transports[0].close()
    assert "20480 bytes of shared memory cannot be made private" in caplog.text
    assert buffers[0].eq(0.0).all()
    monkeypatch.undo()
    close(transports)


@pytest.mark.parametrize("kind", ["barrier", "alone", "together"])
@pytest.mark.parametrize("gives_up_first", [True, False])
def test_an_operation_is_completed_by_all_or_by_none(gives_up_first, kind):
    """Rank 0 has arrived and waits; then it aborts, and rank 1 arrives; or in the other order."""
    transports = group(2)
    kernels = [transport._kernel for transport in transports]
    tensors = [torch.ones(20_000) for _ in transports]
    if kind == "together":
        in_threads(
            [lambda rank=rank: tensors.__setitem__(rank, ones_in(transports[rank])) for rank in range(2)]
        )
    operations = [
        operation_of(transport, kind, tensor) for transport, tensor in zip(transports, tensors, strict=True)
    ]
    for member, tensor in zip(kernels, tensors, strict=True):
        member._state.limit_ns, member._state.own = 0, tensor.data_ptr()

    def run_once(rank):
        return kernels[rank]._run(kernels[rank]._state_pointer, operations[rank].at)

    assert run_once(0) == kernel._TRY_AGAIN
    if gives_up_first:
        assert kernels[0]._abort_operation(kernels[0]._state_pointer)
        assert [run_once(1), run_once(1)] == [kernel._ABORTED] * 2
        assert kernels[1]._abort_operation(kernels[1]._state_pointer)
        assert all(tensor.eq(1.0).all() for tensor in tensors)
    else:
        assert run_once(1) == kernel._COMPLETE
        assert not kernels[0]._abort_operation(kernels[0]._state_pointer)
        assert run_once(0) == kernel._COMPLETE
        assert all(tensor.eq(1.0 if kind == "barrier" else 2.0).all() for tensor in tensors)
    close(transports)


def ones_in(transport):
    return transport.buffer(20_000, torch.float32).fill_(1.0)


def operation_of(transport, kind, tensor):
    if kind == "barrier":
        return transport._kernel.barrier_operation(calls.encode_call("barrier"))
    place = transport._place("all_reduce", tensor)
    return transport._prepared.reduction("all_reduce", "sum", tensor.dtype, tensor.numel(), place).compiled[0]


def test_threads_do_not_complete_what_another_gave_up():
    group_of_threads = InProcessGroup(2, timeout_s=0.01)
    early, late = group_of_threads.transport(0), group_of_threads.transport(1)
    with pytest.raises(CommunicatorError, match="the time limit passed"):
        early.barrier()
    with pytest.raises(CommunicatorError, match="rank 0 left the group"):
        late.barrier()
