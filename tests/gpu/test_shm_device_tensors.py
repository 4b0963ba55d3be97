"""Tensors of a CUDA device through host shared memory: members of one device, pieces copied while others are reduced."""

import pytest
import torch

from collectives.transports.shm.memory import STAGING_BUFFER_BYTES
from tests.unit.collectives.shm_members import run_members

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing here was verified"),
]

SIZES = (0, 1, 1001, 5 * STAGING_BUFFER_BYTES // 4 + 3)


def reduce_on_device(transport):
    """What differs from the sum in rank order, of values that the host can make again."""
    wrong = []
    for size in SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            parts = [
                torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)
                for rank in range(transport.world_size)
            ]
            expected = sum(part.float() for part in parts).to(dtype)
            tensor = parts[transport.rank].to("cuda")
            transport.all_reduce(tensor)
            gathered = transport.all_gather(parts[transport.rank].to("cuda"))
            message = parts[transport.rank].to("cuda")
            transport.broadcast(message, source=1)
            if not torch.equal(tensor.cpu(), expected):
                wrong.append(("all_reduce", size, dtype))
            if not torch.equal(gathered.cpu(), torch.stack(parts)):
                wrong.append(("all_gather", size, dtype))
            if not torch.equal(message.cpu(), parts[1]):
                wrong.append(("broadcast", size, dtype))
    return wrong


def test_device_tensors_are_exchanged_as_host_tensors_are():
    assert run_members(2, reduce_on_device) == [[], []]
