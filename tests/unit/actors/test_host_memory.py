"""Resident memory, its peak, and releasing freed memory, on Linux."""

import sys
from types import SimpleNamespace

import pytest
import torch

from actors.host_memory import memory_metrics, peak_bytes, release_free_memory, reset_peak, resident_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 2**20


def touched(size):
    return bytearray(b"\1" * size)


def test_the_peak_outlives_the_memory_and_can_be_reset():
    if not reset_peak():
        pytest.skip("this system does not let a process forget its peak")
    before = resident_bytes()
    held = touched(64 * MIB)
    del held
    release_free_memory()
    assert peak_bytes() >= before + 64 * MIB
    assert resident_bytes() < before + 32 * MIB
    reset_peak()
    assert peak_bytes() < before + 32 * MIB


def test_freed_memory_is_released():
    # Many small blocks: they are in the arena, which the C library keeps, not in separate mappings.
    pieces = [bytes(bytearray(1024)) for _ in range(64 * 1024)]
    held = resident_bytes()
    del pieces
    release_free_memory()
    assert resident_bytes() < held - 32 * MIB


def no_pools(device):
    raise RuntimeError(f"Device {device} does not support memory pools")


@pytest.mark.parametrize(
    ("warp", "bytes_"),
    [
        (None, 3 * MIB),
        (SimpleNamespace(get_mempool_used_mem_current=lambda device: {"cuda:0": 5 * MIB}[device]), 8 * MIB),
        (SimpleNamespace(get_mempool_used_mem_current=no_pools), 3 * MIB),
        (SimpleNamespace(), 3 * MIB),
    ],
)
def test_memory_of_a_gpu_is_torchs_and_warps(monkeypatch, warp, bytes_):
    """The worlds of MuJoCo Warp are in a pool of Warp's, of which torch's allocator knows nothing."""
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda device: 3 * MIB)
    monkeypatch.setitem(sys.modules, "warp", warp)
    assert memory_metrics(torch.device("cuda:0"))["device_bytes"] == bytes_
