"""A slot is withheld while anything refers to its batch, and that is reported."""

import threading

import numpy as np
import pytest
import torch
from channel_cases import LIMIT_S, SCHEMA, pair, random_rows

from collectives.experience.errors import ChannelClosedError, ChannelTimeoutError


def held_tensor(batch):
    return batch["obs"]


def held_slice(batch):
    return batch["obs"][1:, 0]


def held_numpy(batch):
    return batch["obs"].numpy()


def held_record_batch(batch):
    return batch.record_batch()


def held_column(batch):
    return batch.record_batch().column(0)


def held_graph(batch):
    return batch["obs"] * torch.ones(5, requires_grad=True)


HOLDERS = (held_tensor, held_slice, held_numpy, held_record_batch, held_column, held_graph)


@pytest.mark.parametrize("hold", HOLDERS)
def test_a_slot_is_withheld_while_anything_refers_to_it_and_that_is_reported(hold, caplog):
    ring, consumer_endpoint = pair(slots=1)
    ring.put(random_rows(SCHEMA, 4, 0), version=0)
    batch = consumer_endpoint.take(LIMIT_S)
    held = hold(batch)
    batch.release()
    assert consumer_endpoint.leaks == 1
    assert "batch 1 of producer 0 was released while tensors of it are in use" in caplog.text
    with pytest.raises(ChannelTimeoutError):
        ring.reserve(timeout_s=0.0)
    del held
    ring.reserve(timeout_s=0.0).cancel()
    assert consumer_endpoint.leaks == 1


@pytest.mark.parametrize("hold", HOLDERS)
def test_references_dropped_before_the_release_are_no_leak(hold, caplog):
    ring, consumer_endpoint = pair(slots=1)
    for number in range(3):
        ring.put(random_rows(SCHEMA, 4, number), version=0, timeout_s=0.0)
        with consumer_endpoint.take(LIMIT_S) as batch:
            hold(batch)
    assert (consumer_endpoint.leaks, caplog.text) == (0, "")


def test_a_batch_that_is_never_released_is_reported_and_its_slot_comes_back(caplog):
    ring, consumer_endpoint = pair(slots=1)
    ring.put(random_rows(SCHEMA, 4, 0), version=0)
    held = consumer_endpoint.take(LIMIT_S)["obs"]
    assert "was never released" in caplog.text
    with pytest.raises(ChannelTimeoutError):
        ring.reserve(timeout_s=0.0)
    del held
    ring.reserve(timeout_s=0.0).cancel()


def test_a_released_batch_is_not_read():
    ring, consumer_endpoint = pair()
    ring.put(random_rows(SCHEMA, 4, 0), version=0)
    batch = consumer_endpoint.take(LIMIT_S)
    batch.release()
    batch.release()
    for read in (lambda: batch["obs"], lambda: batch.record_batch()):
        with pytest.raises(ChannelClosedError, match="batch 1 was released"):
            read()


def test_leaks_are_counted_after_their_producer_has_closed():
    ring, consumer_endpoint = pair()
    ring.put(random_rows(SCHEMA, 1, 0), version=0)
    batch = consumer_endpoint.take(LIMIT_S)
    held = batch["env"]
    batch.release()
    ring.close()
    assert consumer_endpoint.take(LIMIT_S) is None
    assert consumer_endpoint.leaks == 1
    assert np.array_equal(held.numpy(), random_rows(SCHEMA, 1, 0)["env"].numpy())


def test_any_thread_may_release_batches():
    ring, consumer_endpoint = pair(slots=8)
    count, taken, errors = 400, threading.Semaphore(0), []
    batches = []

    def release():
        for _ in range(count // 4):
            if not taken.acquire(timeout=LIMIT_S):
                errors.append("no batch came")
                return
            batches.pop().release()

    threads = [threading.Thread(target=release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(count):
        ring.put(random_rows(SCHEMA, 1, number), version=number, timeout_s=LIMIT_S)
        batches.append(consumer_endpoint.take(LIMIT_S))
        assert batches[-1:] == [] or batches[-1].sequence <= number + 1
        taken.release()
    for thread in threads:
        thread.join(LIMIT_S)
    assert (errors, consumer_endpoint.leaks, ring.drain(LIMIT_S)) == ([], 0, 0)
