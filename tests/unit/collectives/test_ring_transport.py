"""What runs on a GPU over NCCL, here over Gloo: the arithmetic around the group, its limits and its errors."""

import os
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from device_cases import DTYPES, SIZES, values
from members import run_group, succeeded

from collectives.environment import temporary_environment
from collectives.errors import CommunicatorError
from collectives.objects import exchange
from collectives.rendezvous import this_member
from collectives.transports.base import shares
from collectives.transports.gloo import GlooStore
from collectives.transports.nccl import (
    NcclTransport,
    nccl_version,
    parse_version,
)
from collectives.transports.ring import RingTransport

_kept = []
"""Groups: the end of one waits for what it was doing, until Gloo's own time limit."""


def connected(communicator, timeout_s=30.0, check=lambda waited_s: None):
    rank, n = communicator.rank, communicator.world_size
    members = [this_member(other) for other in range(n)]
    store = GlooStore.host(members, timeout_s) if rank == 0 else None
    endpoint = exchange(communicator, store.endpoint.encode() if store else b"")[0].decode()
    store = store or GlooStore.connect(endpoint, rank, timeout_s)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout_s + 1)
    group = dist.ProcessGroupGloo(store.store, rank, n, options)
    _kept.append(group)
    return RingTransport(group, members, rank, device=torch.device("cpu"), timeout_s=timeout_s, check=check)


def every_operation(communicator, done):
    ring = connected(communicator)
    rank, found = ring.rank, {}
    for size in SIZES:
        for dtype in DTYPES:
            for op in ("sum", "max") if dtype == torch.int64 else ("sum", "mean", "max"):
                for name in ("all_reduce", "reduce", "reduce_scatter"):
                    tensor = values(rank, size, dtype)
                    found[name, op, size, dtype] = (getattr(ring, name)(tensor, op), tensor)
            found["all_gather", size, dtype] = ring.all_gather(values(rank, size, dtype))
            tensor = ring.buffer(size, dtype)
            assert tensor.eq(0).all()
            tensor.copy_(values(rank, size, dtype))
            ring.broadcast(tensor, 1)
            found["broadcast", size, dtype] = tensor
    ring.barrier()
    return found


@pytest.fixture(scope="module", params=[2, 3])
def results(request):
    return succeeded(run_group("inprocess", request.param, every_operation))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_agree_with_float64_and_are_bitwise_equal_on_all_members(results, size, dtype):
    n = len(results)
    parts = torch.stack([values(rank, size, dtype) for rank in range(n)])
    accuracy = {torch.float32: 4e-6, torch.float64: 1e-14, torch.bfloat16: 2**-8, torch.int64: 0}[dtype]
    exact = parts if dtype == torch.int64 else parts.double()
    expected = {"sum": exact.sum(0), "max": exact.amax(0) if size else exact.sum(0)}
    if dtype != torch.int64:
        expected["mean"] = exact.sum(0) / n
    for op, right in expected.items():
        first = results[0]["all_reduce", op, size, dtype][1]
        torch.testing.assert_close(first.to(right.dtype), right, rtol=accuracy, atol=accuracy)
        assert all(torch.equal(found["all_reduce", op, size, dtype][1], first) for found in results)
        reduced = results[0]["reduce", op, size, dtype][1]
        torch.testing.assert_close(reduced.to(right.dtype), right, rtol=accuracy, atol=accuracy)
        for rank, (begin, end) in enumerate(shares(size, n)):
            bounds, tensor = results[rank]["reduce_scatter", op, size, dtype]
            assert bounds == (begin, end)
            torch.testing.assert_close(
                tensor[begin:end].to(right.dtype), right[begin:end], rtol=accuracy, atol=accuracy
            )
    for found in results:
        assert torch.equal(found["all_gather", size, dtype], parts)
        assert torch.equal(found["broadcast", size, dtype], parts[1])


def test_bfloat16_is_rounded_once():
    # 256 + 1 + 1 in bfloat16 (8 bits): 256 + 1 rounds to 256, twice; in float32 it is 258, which bfloat16 has.
    def task(communicator, done):
        tensor = torch.tensor([256.0 if communicator.rank == 0 else 1.0], dtype=torch.bfloat16)
        connected(communicator).all_reduce(tensor)
        return tensor.item()

    assert run_group("inprocess", 3, task) == [258.0] * 3


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_infinity_propagate_from_any_member(op, dtype):
    def task(communicator, done):
        tensor = torch.ones(4, dtype=dtype)
        tensor[communicator.rank] = torch.nan
        tensor[3] = torch.inf
        connected(communicator).all_reduce(tensor, op)
        return tensor

    for found in run_group("inprocess", 3, task):
        assert found[:3].isnan().all()
        assert found[3] == torch.inf


def wait_alone(communicator, done):
    ring = connected(communicator, timeout_s=0.5)
    if communicator.rank == 1:
        done.wait(30)
        return None
    errors = []
    for call in (lambda: ring.all_reduce(torch.ones(5)), ring.barrier):
        with pytest.raises(CommunicatorError) as caught:
            call()
        errors.append(caught.value)
    done.set()
    return errors


def test_an_absent_member_ends_the_wait_at_the_limit_and_the_transport_with_it():
    first, second = run_group("inprocess", 2, wait_alone)[0]
    assert first.operation == "all_reduce"
    assert "rank 1" in first.waiting_for
    assert 0.4 < first.waited_s < 20
    assert "an earlier all_reduce failed" in second.detail


def test_a_lost_member_ends_the_wait_as_soon_as_the_check_says_so():
    def task(communicator, done):
        def check(waited_s):
            raise CommunicatorError("all_reduce", 0, "rank 1", 0.0, "its process has ended")

        ring = connected(communicator, timeout_s=5.0, check=check)
        if communicator.rank == 1:
            done.wait(30)
            return None
        with pytest.raises(CommunicatorError, match="its process has ended"):
            ring.all_reduce(torch.ones(5))
        done.set()
        return True

    assert run_group("inprocess", 2, task)[0] is True


def test_closing_from_another_thread_ends_a_wait():
    def task(communicator, done):
        ring = connected(communicator, timeout_s=5.0)
        if communicator.rank == 1:
            done.wait(30)
            return None
        waiting = threading.Event()
        ring._check = lambda waited_s: waiting.set()
        closer = threading.Thread(target=lambda: (waiting.wait(20), ring.close()))
        closer.start()
        with pytest.raises(CommunicatorError, match="this communicator is closed"):
            ring.all_reduce(torch.ones(5))
        closer.join()
        done.set()
        return True

    assert run_group("inprocess", 2, task)[0] is True


@pytest.mark.parametrize(
    ("version_tuple", "version"),
    [((2, 29, 7), (2, 29, 7)), ((2, 30, 3, "rc1"), (2, 30, 3)), ((2, 30), None), ((), None)],
)
def test_versions_are_three_numbers(version_tuple, version):
    if version is None:
        with pytest.raises(ValueError, match="three numbers"):
            parse_version(version_tuple)
    else:
        assert parse_version(version_tuple) == version


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL: tests/gpu covers it")
def test_without_nccl_a_transport_says_so_at_once():
    assert nccl_version() is None
    members = [this_member(0), this_member(1)]
    store = GlooStore.host(members, 5.0)
    with pytest.raises(CommunicatorError, match="torch was built without NCCL"):
        NcclTransport(store, members, 0, device=torch.device("cuda", 0), timeout_s=1.0)


def test_environment_variables_are_restored(monkeypatch):
    monkeypatch.setenv("RAYAGI_TEST_SET", "before")
    monkeypatch.delenv("RAYAGI_TEST_UNSET", raising=False)
    values = []

    def fail():
        with temporary_environment({"RAYAGI_TEST_SET": "1", "RAYAGI_TEST_UNSET": "2"}):
            values.extend((os.environ["RAYAGI_TEST_SET"], os.environ["RAYAGI_TEST_UNSET"]))
            raise OSError("inside")

    with pytest.raises(OSError, match="inside"):
        fail()
    assert values == ["1", "2"]
    assert os.environ["RAYAGI_TEST_SET"] == "before"
    assert "RAYAGI_TEST_UNSET" not in os.environ
