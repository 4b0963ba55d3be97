"""What is committed is what is taken, and slots come back exactly when their batches are released."""

import pytest
import torch
from channel_cases import LIMIT_S, SCHEMA, pair, random_rows, same

from collectives.experience.errors import ChannelError, ChannelTimeoutError, SchemaError
from collectives.experience.schema import ExperienceSchema, Field


def test_a_batch_is_taken_as_it_was_put_with_its_numbers():
    ring, consumer_endpoint = pair(producer=7, origin=11)
    rows = random_rows(SCHEMA, 4, seed=1)
    assert ring.put(rows, version=5) == 1
    with consumer_endpoint.take(LIMIT_S) as batch:
        assert same(batch, rows)
        assert (batch.producer, batch.origin, batch.sequence, batch.version) == (7, 11, 1, 5)
        assert (batch.num_rows, batch.slots) == (4, 4)


def test_what_is_written_to_a_reserved_slot_is_read_in_place():
    ring, consumer_endpoint = pair()
    reservation = ring.reserve(2)
    reservation["obs"].fill_(2.5)
    reservation["done"].copy_(torch.tensor([[True, False, True]] * 2))
    reservation["env"].copy_(torch.tensor([3, -4]))
    reservation.commit(version=0)
    batch = consumer_endpoint.take(LIMIT_S)
    assert batch["obs"].shape == (2, 3, 5)
    assert bool((batch["obs"] == 2.5).all())
    assert batch["done"].tolist() == [[True, False, True]] * 2
    assert batch["env"].tolist() == [3, -4]
    reservation["env"][0] = 9  # the same bytes, on both sides
    assert batch["env"].tolist() == [9, -4]
    batch.release()


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_batches_of_any_number_of_rows_follow_each_other_in_one_slot(count):
    ring, consumer_endpoint = pair(slots=1)
    for seed, number in enumerate((4, count, 2, count, 4)):
        rows = random_rows(SCHEMA, number, seed)
        ring.put(rows, version=seed, timeout_s=LIMIT_S)
        with consumer_endpoint.take(LIMIT_S) as batch:
            assert batch.num_rows == number
            assert same(batch, rows)
            assert batch.record_batch().num_rows == number


def test_order_is_kept_around_the_ring_many_times():
    ring, consumer_endpoint = pair(slots=3)
    held = []
    for number in range(50):
        ring.put(random_rows(SCHEMA, 1, number), version=number)
        held.append(consumer_endpoint.take(LIMIT_S))
        if len(held) == 3:
            held.pop((number * 7) % 3).release()  # in any order
    assert held[-1].sequence == 50
    for batch in held:
        assert same(batch, random_rows(SCHEMA, 1, batch.sequence - 1))
        batch.release()
    assert ring.drain(LIMIT_S) == 0


def test_a_slot_is_not_reserved_again_before_its_release():
    ring, consumer_endpoint = pair(slots=1)
    ring.put(random_rows(SCHEMA, 1, 0), version=0)
    batch = consumer_endpoint.take(LIMIT_S)
    with pytest.raises(ChannelTimeoutError, match=r"of 1 slot of producer 0, process \d+ holds 1"):
        ring.reserve(timeout_s=0.0)
    batch.release()
    ring.reserve(timeout_s=0.0).cancel()


def test_a_cancelled_slot_is_not_posted_and_is_free_again():
    ring, consumer_endpoint = pair(slots=1)
    reservation = ring.reserve()
    with pytest.raises(ChannelTimeoutError, match="1 are being filled"):
        ring.reserve(timeout_s=0.0)
    reservation.cancel()
    reservation.cancel()
    with pytest.raises(ChannelError, match="committed or cancelled before"):
        reservation.commit(version=0)
    with pytest.raises(ChannelTimeoutError, match="no batch came from producer 0"):
        consumer_endpoint.take(timeout_s=0.0)
    ring.reserve(timeout_s=0.0).commit(version=0)
    assert consumer_endpoint.take(LIMIT_S).sequence == 1


def test_a_slot_is_committed_once():
    ring, consumer_endpoint = pair()
    reservation = ring.reserve()
    reservation.commit(version=0)
    with pytest.raises(ChannelError, match="committed or cancelled before"):
        reservation.commit(version=0)
    reservation.cancel()  # nothing happens after commit
    assert consumer_endpoint.take(LIMIT_S).sequence == 1
    with pytest.raises(ChannelTimeoutError):
        consumer_endpoint.take(timeout_s=0.0)


def test_a_reserved_slot_that_is_garbage_collected_is_freed_and_reported(caplog):
    ring, _ = pair(slots=1)
    ring.reserve()
    assert "neither committed nor cancelled" in caplog.text
    ring.reserve(timeout_s=0.0).cancel()


def test_a_refused_version_or_copy_costs_no_slot_and_no_number():
    ring, consumer_endpoint = pair(slots=1)
    with pytest.raises(ValueError, match="version=-1"):
        ring.put(random_rows(SCHEMA, 1, 0), version=-1)
    with pytest.raises(SchemaError, match="fields"):
        ring.put({"obs": torch.zeros(1, 3, 5)}, version=0)
    assert ring.put(random_rows(SCHEMA, 1, 0), version=2**63, timeout_s=0.0) == 1
    assert consumer_endpoint.take(LIMIT_S).version == 2**63


def test_views_made_in_inference_mode_are_written_and_trained_with_outside_of_it():
    ring, consumer_endpoint = pair(slots=1)
    with torch.inference_mode():
        ring.put(random_rows(SCHEMA, 4, 0), version=0)
        batch = consumer_endpoint.take(LIMIT_S)
        obs = batch["obs"]
    weight = torch.ones(5, requires_grad=True)
    obs.nan_to_num_().clamp_(-1, 1)  # in place, as outside of that mode one may
    (obs @ weight).sum().backward()
    torch.testing.assert_close(weight.grad, obs.sum(dim=(0, 1)))
    del obs
    batch.release()
    ring.put(random_rows(SCHEMA, 4, 1), version=1)
    assert consumer_endpoint.take(LIMIT_S).version == 1


def test_putting_what_requires_grad_keeps_no_graph():
    schema = ExperienceSchema("values", (Field(name="value"),))
    ring, consumer_endpoint = pair(schema, rows=2, slots=1)
    ring.put({"value": torch.ones(2, requires_grad=True) * 2}, version=0)
    with consumer_endpoint.take(LIMIT_S) as batch:
        assert batch["value"].tolist() == [2.0, 2.0]
    assert ring.reserve(timeout_s=0.0)["value"].grad_fn is None
