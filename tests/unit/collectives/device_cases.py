"""What the transport of GMIs that share a GPU must do, for members on a CPU (unit tests) and on a GPU (tests/gpu)."""

import pickle
from dataclasses import dataclass
from functools import reduce

import torch

from collectives.objects import exchange
from collectives.rendezvous import this_member
from collectives.transports.base import shares
from collectives.transports.device import DeviceTransport

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
SIZES = (0, 1, 17, 1001, 50_001)


def all_members(communicator):
    me = this_member(communicator.rank)
    return [pickle.loads(message) for message in exchange(communicator, pickle.dumps(me))]


def connected(communicator, device="cpu"):
    """The transport, among all members of a communicator on the host."""
    return DeviceTransport(communicator, all_members(communicator), torch.device(device), 30.0)


def values(rank, size, dtype):
    generator = torch.Generator().manual_seed(1000 * rank + size % 997)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, (size,), generator=generator)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def in_rank_order(parts, op):
    """What the contract says: in rank order, bfloat16 in float32, rounded once, and a mean divided once."""
    dtype = parts[0].dtype
    parts = [part.float() if dtype == torch.bfloat16 else part for part in parts]
    total = reduce(torch.maximum if op == "max" else torch.add, parts)
    return (total / len(parts) if op == "mean" else total).to(dtype)


def ops_of(dtype):
    return ("sum", "max") if dtype == torch.int64 else ("sum", "mean", "max")


@dataclass(frozen=True)
class EveryOperation:
    """A member's task: every operation on registered memory and on memory of its own; results, on the host."""

    device: str

    def __call__(self, communicator, done):
        transport = connected(communicator, self.device)
        found = {}
        for dtype in DTYPES:
            buffer = transport.buffer(max(SIZES), dtype)
            assert buffer.eq(0).all()
            for size in SIZES:
                found |= self.results("registered", transport, buffer[:size])
                found |= self.results("own", transport, torch.empty_like(buffer[:size]))
        found["matrix"] = transport.all_gather(
            torch.full((2, 3), float(transport.rank), device=self.device).t()
        )
        transport.barrier()
        return {key: self.on_host(value) for key, value in found.items()}

    def results(self, where, transport, tensor):
        key = (where, tensor.numel(), tensor.dtype)
        mine = values(transport.rank, tensor.numel(), tensor.dtype)
        found = {}
        for op in ops_of(tensor.dtype):
            for name in ("all_reduce", "reduce", "reduce_scatter"):
                begin, end = getattr(transport, name)(tensor.copy_(mine), op) or (0, tensor.numel())
                found[name, op, *key] = (begin, end, tensor[begin:end].clone())
        found["all_gather", *key] = transport.all_gather(tensor.copy_(mine))
        transport.broadcast(tensor.copy_(mine), transport.world_size - 1)
        found["broadcast", *key] = tensor.clone()
        return found

    def on_host(self, value):
        return value.cpu() if isinstance(value, torch.Tensor) else (*value[:2], value[2].cpu())


def check_reductions(results, where, size, dtype):
    """Equal, to the last bit, to sums in rank order made here, on every member that has them."""
    n = len(results)
    parts = [values(rank, size, dtype) for rank in range(n)]
    for op in ops_of(dtype):
        expected = in_rank_order(parts, op)
        key = (op, where, size, dtype)
        assert all(torch.equal(found["all_reduce", *key][2], expected) for found in results), op
        assert torch.equal(results[0]["reduce", *key][2], expected), op
        for rank, (begin, end) in enumerate(shares(size, n)):
            found = results[rank]["reduce_scatter", *key]
            assert found[:2] == (begin, end)
            assert torch.equal(found[2], expected[begin:end]), op


def check_copies(results, where, size, dtype):
    """What was gathered and broadcast is what the members gave."""
    parts = [values(rank, size, dtype) for rank in range(len(results))]
    for found in results:
        assert torch.equal(found["all_gather", where, size, dtype], torch.stack(parts))
        assert torch.equal(found["broadcast", where, size, dtype], parts[-1])


CASES = [(where, size, dtype) for where in ("registered", "own") for size in SIZES for dtype in DTYPES]
