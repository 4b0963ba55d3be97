"""Batches of a replay on a GPU: every way against the CPU's gather, the choice, and learners that train from them."""

import logging

import numpy as np
import pytest
import torch

from actors.replay import Column, ReplaySchema, ReplayStore, Subscription, Uniform, gather, select
from rayagi.device_replay import DeviceGatherer
from rayagi.device_replay.buffers import UnavailableError
from rayagi.device_replay.choice import WAYS
from rayagi.device_replay.zero_copy import PageLockedArray
from tests.unit.algorithms.test_device_replay import SPECS, train
from tests.unit.replay.test_device_gatherers import (
    TYPES,
    assert_same,
    check_any_windows,
    check_rows_that_are_overwritten_during_the_copy,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing here was verified"),
]
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("padding", ["in_place", "head", "tail"])
@pytest.mark.parametrize("dtype", TYPES)
def test_every_way_gives_the_windows_of_the_cpus_gather(dtype, padding):
    columns = (
        Column(name="a", dtype=dtype, shape=(3,), extra=1),
        Column(name="b", dtype=dtype, shape=(2, 2)),
    )
    for offset in (-9, -3, 0, 2, 9):
        wanted = [
            Subscription(column="a", offset=offset, length=6, padding=padding),
            Subscription(column="a", offset=1, name="next"),
            Subscription(column="b", offset=offset, length=2, padding=padding),
        ]
        check_any_windows(columns, wanted, [1, 7, 4, 2, 6], 64, 1, DEVICE)


def test_rows_that_are_overwritten_during_the_copy_are_reported():
    check_rows_that_are_overwritten_during_the_copy(DEVICE)


def large():
    """2e5 transitions of 880 B, beyond the caches."""
    columns = (
        Column(name="obs", dtype="float32", shape=(105,), extra=1),
        Column(name="action", dtype="float32", shape=(10,)),
    )
    store, rng = ReplayStore.create(ReplaySchema(columns, 1), 200_000), np.random.default_rng(0)
    for _ in range(20):
        store.insert(
            {"obs": rng.random((10_000, 2, 105), "float32"), "action": rng.random((10_000, 1, 10), "float32")}
        )
    return store, (Subscription(column="obs", length=2), Subscription(column="action"))


@pytest.mark.parametrize("way", WAYS)
def test_batches_in_flight_are_not_overwritten(way):
    """Hundreds of batches without a synchronisation, each reduced on the device before the next one."""
    store, wanted = large()
    gatherer, sums, expected = WAYS[way](store, wanted, 256, DEVICE), [], []
    busy = torch.randn((4096, 4096), device=DEVICE)
    for draw in range(300):
        if draw % 100 == 0:
            for _ in range(20):  # so that the host is far ahead of the device
                busy = busy @ busy / 4096
        chosen = select(store, Uniform(), 256, seed=0, draw=draw)
        sums.append(gatherer(chosen).values["obs"].double().sum((1, 2)))
        expected.append(gather(store, chosen, wanted).values["obs"].sum((1, 2), dtype=np.float64))
    np.testing.assert_allclose(torch.stack(sums).cpu().numpy(), np.stack(expected), rtol=1e-12)
    gatherer.close()


def test_the_fastest_way_is_measured_and_all_are_available_here(caplog):
    caplog.set_level(logging.INFO, "rayagi.device_replay.choice")
    store, wanted = large()
    gatherer = DeviceGatherer(store, wanted, 256, DEVICE)
    for draw in range(3):
        chosen = select(store, Uniform(), 256, seed=0, draw=draw)
        assert_same(gatherer(chosen), gather(store, chosen, wanted))
    assert gatherer.way in WAYS
    assert "is not available" not in caplog.text
    assert all(f"{way} takes" in caplog.text for way in WAYS)
    gatherer.close()


def test_page_locked_memory_is_released_with_the_gatherer():
    store, wanted = large()
    for _ in range(2):  # memory that is still registered would be refused
        gatherer = WAYS["zero-copy"](store, wanted, 256, DEVICE)
        chosen = select(store, Uniform(), 256, seed=0, draw=0)
        assert_same(gatherer(chosen), gather(store, chosen, wanted))
        gatherer.close()


def test_memory_that_cuda_refuses_to_lock_leaves_no_error_behind():
    memory = np.zeros(2**16, np.uint8)
    locked = PageLockedArray(memory)
    with pytest.raises(UnavailableError):
        PageLockedArray(memory)  # it is registered already
    assert torch.ones(1, device=DEVICE).add_(1).item() == 2
    locked.close()


@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize("name", SPECS)
def test_iterations_agree_with_those_on_the_cpu(name, way):
    (found, on_gpu), (expected, on_cpu) = train(name, "cuda:0", way, 2), train(name, "cpu", None, 2)
    for one, other in zip(found, expected, strict=True):
        for metric in on_cpu.updater.measured:
            assert one[metric] == pytest.approx(other[metric], rel=1e-2, abs=1e-3), metric
    for part, tensor in on_cpu.updater.state_dict()["model"].items():
        torch.testing.assert_close(on_gpu.updater.state_dict()["model"][part], tensor, rtol=1e-2, atol=2e-3)
