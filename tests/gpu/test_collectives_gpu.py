"""Collectives on real devices: memory shared by processes of one GPU, NCCL, and staging through pinned memory.

Times are printed (``pytest -s``), not asserted.
"""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from collectives.errors import CommunicatorError
from collectives.objects import exchange
from collectives.primitive_probe import PrimitiveProbe, local_capabilities, probe_primitives
from collectives.transports.gloo import GlooStore
from collectives.transports.nccl import NcclTransport, nccl_version
from placement.inventory import local_machine
from tests.unit.collectives.device_cases import (
    CASES,
    EveryOperation,
    all_members,
    check_copies,
    check_reductions,
    connected,
    values,
)
from tests.unit.collectives.members import run_group, succeeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing here was verified"),
]

LIMIT_S = 30.0
GRADIENTS = (110_000, 290_000, 1_500_000)
"""The models of the preprint's Table 7, in float32 elements."""


def answers_of(world_size, task, timeout_s=2 * LIMIT_S):
    return succeeded(run_group("shm", world_size, task, timeout_s=timeout_s))


@pytest.fixture(scope="module", params=[2, 3], ids=["two processes", "three processes"])
def results(request):
    return answers_of(request.param, EveryOperation("cuda:0"))


@pytest.mark.parametrize(("where", "size", "dtype"), CASES)
def test_processes_of_one_gpu_reduce_in_rank_order_to_the_last_bit(results, where, size, dtype):
    check_reductions(results, where, size, dtype)
    check_copies(results, where, size, dtype)


def test_sums_on_the_device_agree_with_float64(results):
    for where, size, dtype in CASES:
        if dtype.is_floating_point:
            accuracy = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float64: 1e-14}[dtype]
            expected = sum(values(rank, size, dtype).double() for rank in range(len(results)))
            found = results[0]["all_reduce", "sum", where, size, dtype][2].double()
            torch.testing.assert_close(found, expected, rtol=accuracy, atol=accuracy)


def lose_a_member(communicator, done):
    transport = connected(communicator, "cuda:0")
    buffer = transport.buffer(1000, torch.float32)
    transport.all_reduce(buffer)
    pids = [member.pid for member in all_members(communicator)]
    if communicator.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    waited_s = None
    try:
        for _ in range(1000):
            transport.all_reduce(buffer)
    except CommunicatorError as error:
        waited_s = error.waited_s
    # The context of a survivor is whole: the device still computes.
    return waited_s, float(torch.ones(3, device="cuda:0").sum()), pids[1]


def test_a_killed_member_is_noticed_and_leaves_nothing():
    first, killed, third = answers_of(3, lose_a_member)
    assert killed is None
    for waited_s, computed, pid in (first, third):
        assert waited_s is not None
        assert waited_s < LIMIT_S
        assert computed == 3.0
        assert not list(Path("/dev/shm").glob(f"torch_{pid}_*"))


SHARED_GPU_SINCE = (2, 30, 0)
"""First NCCL that supports several ranks on one GPU."""
SHARED_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
"""All ranks' blocks must be resident on the GPU at once, or they deadlock: so few blocks each."""


@dataclass(frozen=True)
class Nccl:
    """Connect over NCCL and reduce; what the error says where it does not go."""

    shared_gpu: bool
    devices: tuple[int, ...]

    def __call__(self, communicator, done):
        device = torch.device("cuda", self.devices[communicator.rank])
        torch.cuda.set_device(device)
        try:
            if self.shared_gpu:
                os.environ.update(SHARED_GPU)
            transport = over_nccl(communicator, device)
        except CommunicatorError as error:
            return str(error)
        found = {}
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
            tensor = values(communicator.rank, 1001, dtype).to(device)
            transport.all_reduce(tensor)
            found["sum", dtype] = tensor.cpu()
        tensor = torch.ones(4, device=device)
        tensor[communicator.rank] = torch.nan
        transport.all_reduce(tensor, "max")
        found["nan"] = tensor.isnan().tolist()
        found["times"] = times(transport, device)
        communicator.barrier()
        transport.close()
        return found


def over_nccl(communicator, device):
    members = all_members(communicator)
    store = GlooStore.host(members, LIMIT_S) if communicator.rank == 0 else None
    endpoint = exchange(communicator, store.endpoint.encode() if store else b"")[0].decode()
    store = store or GlooStore.connect(endpoint, communicator.rank, LIMIT_S)
    communicator.barrier()  # a host that is refused at once takes its store along
    return NcclTransport(store, members, communicator.rank, device=device, timeout_s=LIMIT_S)


def check_sums(answers):
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        parts = torch.stack([values(rank, 1001, dtype) for rank in range(len(answers))])
        expected = parts.sum(0) if dtype == torch.int64 else parts.double().sum(0)
        accuracy = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float64: 1e-14, torch.int64: 0}[dtype]
        for found in answers:
            assert torch.equal(found["sum", dtype], answers[0]["sum", dtype])
            torch.testing.assert_close(
                found["sum", dtype].to(expected.dtype), expected, rtol=accuracy, atol=accuracy
            )
    for found in answers:
        assert found["nan"] == [rank < len(answers) for rank in range(4)]


def test_nccl_refuses_two_ranks_of_one_gpu():
    for answer in answers_of(2, Nccl(shared_gpu=False, devices=(0, 0))):
        assert "connect on rank" in answer
        assert "GPU" in answer


def test_nccl_with_several_ranks_on_one_gpu():
    answers = answers_of(2, Nccl(shared_gpu=True, devices=(0, 0)))
    version = nccl_version()
    if version is None or version < SHARED_GPU_SINCE:
        assert all("NCCL" in answer for answer in answers)
        pytest.skip(f"NCCL {version} takes one rank per GPU, and says so: the sums were not verified")
    check_sums(answers)
    print("nccl, 2 ranks on one GPU", answers[0]["times"])


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="fewer than 2 GPUs: rings over NCCL were not verified"
)
def test_rings_across_gpus():
    count = min(4, torch.cuda.device_count())
    answers = answers_of(count, Nccl(shared_gpu=False, devices=tuple(range(count))))
    check_sums(answers)
    print(f"nccl, {count} GPUs", answers[0]["times"])


def offers(communicator, done):
    members = tuple(range(communicator.world_size))
    device = torch.device("cuda", 0)
    candidates = {
        "device": PrimitiveProbe(members=members, open=lambda: _Borrowed(connected(communicator, device))),
        "rp": PrimitiveProbe(members=members, open=lambda: over_nccl(communicator, device)),
    }
    return probe_primitives(
        communicator, local_capabilities(device), candidates, LIMIT_S
    ), local_capabilities(device).device


class _Borrowed:
    """The transport without its end: it stands on the communicator that is still needed."""

    def __init__(self, transport):
        self._transport = transport

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def close(self):
        pass


def test_processes_of_one_gpu_are_offered_the_device_and_not_the_ring():
    (first, device), (second, _) = answers_of(2, offers)
    assert first == second
    assert not first["device"]
    assert "one rank per GPU" in first["rp"]
    assert device == local_machine().nodes[0].gpus[0].uuid or device.startswith("MIG-")


def reduce_staged(communicator, done):
    """Device tensors through shared memory of the host."""
    found = {}
    for size in (1, 1001, *GRADIENTS):
        tensor = values(communicator.rank, size, torch.float32).to("cuda:0")
        communicator.all_reduce(tensor)
        found[size] = tensor.cpu()
    found["times"] = times(communicator, torch.device("cuda", 0))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_device_tensors_are_staged_through_shared_memory(world_size):
    answers = answers_of(world_size, reduce_staged)
    for size in (1, 1001, *GRADIENTS):
        expected = sum(values(rank, size, torch.float32).double() for rank in range(world_size))
        for found in answers:
            assert torch.equal(found[size], answers[0][size])
            torch.testing.assert_close(found[size].double(), expected, rtol=4e-6, atol=4e-6)
    print(f"shm, {world_size} processes on one GPU", answers[0]["times"])


def time_the_device(communicator, done):
    return times(connected(communicator, "cuda:0"), torch.device("cuda", 0))


@pytest.mark.parametrize("world_size", [2, 3])
def test_times_of_reductions_on_the_device_are_told(world_size):
    answers = answers_of(world_size, time_the_device)
    print(f"device, {world_size} processes on one GPU", answers[0])
    assert set(answers[0]) == set(GRADIENTS)


def times(transport, device, repeats=100):
    """Microseconds for a sum of each model's gradients in registered memory: the mean of 100, after 10."""
    found = {}
    for size in GRADIENTS:
        tensor = transport.buffer(size, torch.float32) if hasattr(transport, "buffer") else None
        if tensor is None or tensor.device != device:
            tensor = torch.zeros(size, device=device)
        for turn in range(10 + repeats):
            if turn == 10:
                torch.cuda.synchronize(device)
                begin = time.perf_counter()
            transport.all_reduce(tensor)
        torch.cuda.synchronize(device)
        found[size] = round((time.perf_counter() - begin) / repeats * 1e6, 1)
    return found
