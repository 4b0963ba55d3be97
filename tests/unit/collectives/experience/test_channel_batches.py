"""What is committed is what is taken, and slots come back exactly when their batches are released."""

import threading

import numpy as np
import pytest
import torch
from channel_cases import LIMIT_S, SCHEMA, pair, random_rows, same, take_all

from collectives.experience.errors import (
    ChannelClosedError,
    ChannelError,
    ChannelTimeoutError,
    SchemaError,
)
from collectives.experience.inbox import Inbox
from collectives.experience.outbox import Outbox
from collectives.experience.schema import ExperienceSchema, Field


def test_a_batch_is_taken_as_it_was_put_with_its_numbers():
    outbox, inbox = pair(producer=7, origin=11)
    rows = random_rows(SCHEMA, 4, seed=1)
    assert outbox.put(rows, version=5) == 1
    with inbox.take(LIMIT_S) as batch:
        assert same(batch, rows)
        assert (batch.producer, batch.origin, batch.sequence, batch.version) == (7, 11, 1, 5)
        assert (batch.num_rows, batch.slots) == (4, 4)


def test_what_is_written_in_a_claim_is_read_in_place():
    outbox, inbox = pair()
    claim = outbox.claim(2)
    claim["obs"].fill_(2.5)
    claim["done"].copy_(torch.tensor([[True, False, True]] * 2))
    claim["env"].copy_(torch.tensor([3, -4]))
    claim.commit(version=0)
    batch = inbox.take(LIMIT_S)
    assert batch["obs"].shape == (2, 3, 5)
    assert bool((batch["obs"] == 2.5).all())
    assert batch["done"].tolist() == [[True, False, True]] * 2
    assert batch["env"].tolist() == [3, -4]
    claim["env"][0] = 9  # the same bytes, in both ends
    assert batch["env"].tolist() == [9, -4]
    batch.release()


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_batches_of_any_number_of_rows_follow_each_other_in_one_slot(count):
    outbox, inbox = pair(slots=1)
    for seed, number in enumerate((4, count, 2, count, 4)):
        rows = random_rows(SCHEMA, number, seed)
        outbox.put(rows, version=seed, timeout_s=LIMIT_S)
        with inbox.take(LIMIT_S) as batch:
            assert batch.num_rows == number
            assert same(batch, rows)
            assert batch.record_batch().num_rows == number


def test_order_is_kept_around_the_ring_many_times():
    outbox, inbox = pair(slots=3)
    held = []
    for number in range(50):
        outbox.put(random_rows(SCHEMA, 1, number), version=number)
        held.append(inbox.take(LIMIT_S))
        if len(held) == 3:
            held.pop((number * 7) % 3).release()  # in any order
    assert held[-1].sequence == 50
    for batch in held:
        assert same(batch, random_rows(SCHEMA, 1, batch.sequence - 1))
        batch.release()
    assert outbox.drain(LIMIT_S) == 0


def test_a_slot_is_not_given_out_again_before_its_release():
    outbox, inbox = pair(slots=1)
    outbox.put(random_rows(SCHEMA, 1, 0), version=0)
    batch = inbox.take(LIMIT_S)
    with pytest.raises(ChannelTimeoutError, match=r"of 1 slots of producer 0, process \d+ holds 1"):
        outbox.claim(timeout_s=0.0)
    batch.release()
    outbox.claim(timeout_s=0.0).cancel()


def test_a_cancelled_claim_is_seen_by_nobody_and_frees_its_slot():
    outbox, inbox = pair(slots=1)
    claim = outbox.claim()
    with pytest.raises(ChannelTimeoutError, match="1 are being filled"):
        outbox.claim(timeout_s=0.0)
    claim.cancel()
    claim.cancel()
    with pytest.raises(ChannelError, match="committed or cancelled before"):
        claim.commit(version=0)
    with pytest.raises(ChannelTimeoutError, match="nothing came of producer 0"):
        inbox.take(timeout_s=0.0)
    outbox.claim(timeout_s=0.0).commit(version=0)
    assert inbox.take(LIMIT_S).sequence == 1


def test_a_claim_is_committed_once():
    outbox, inbox = pair()
    claim = outbox.claim()
    claim.commit(version=0)
    with pytest.raises(ChannelError, match="committed or cancelled before"):
        claim.commit(version=0)
    claim.cancel()  # nothing happens after commit
    assert inbox.take(LIMIT_S).sequence == 1
    with pytest.raises(ChannelTimeoutError):
        inbox.take(timeout_s=0.0)


def test_a_claim_that_is_dropped_gives_its_slot_back_and_says_so(caplog):
    outbox, _ = pair(slots=1)
    outbox.claim()
    assert "neither committed nor cancelled" in caplog.text
    outbox.claim(timeout_s=0.0).cancel()


def test_a_refused_version_or_copy_costs_no_slot_and_no_number():
    outbox, inbox = pair(slots=1)
    with pytest.raises(ValueError, match="version=-1"):
        outbox.put(random_rows(SCHEMA, 1, 0), version=-1)
    with pytest.raises(SchemaError, match="fields"):
        outbox.put({"obs": torch.zeros(1, 3, 5)}, version=0)
    assert outbox.put(random_rows(SCHEMA, 1, 0), version=2**63, timeout_s=0.0) == 1
    assert inbox.take(LIMIT_S).version == 2**63


def test_views_made_in_inference_mode_are_written_and_trained_with_outside_of_it():
    outbox, inbox = pair(slots=1)
    with torch.inference_mode():
        outbox.put(random_rows(SCHEMA, 4, 0), version=0)
        batch = inbox.take(LIMIT_S)
        obs = batch["obs"]
    weight = torch.ones(5, requires_grad=True)
    obs.nan_to_num_().clamp_(-1, 1)  # in place, as outside of that mode one may
    (obs @ weight).sum().backward()
    torch.testing.assert_close(weight.grad, obs.sum(dim=(0, 1)))
    del obs
    batch.release()
    outbox.put(random_rows(SCHEMA, 4, 1), version=1)
    assert inbox.take(LIMIT_S).version == 1


def test_putting_what_requires_grad_keeps_no_graph():
    schema = ExperienceSchema("values", (Field(name="value"),))
    outbox, inbox = pair(schema, rows=2, slots=1)
    outbox.put({"value": torch.ones(2, requires_grad=True) * 2}, version=0)
    with inbox.take(LIMIT_S) as batch:
        assert batch["value"].tolist() == [2.0, 2.0]
    assert outbox.claim(timeout_s=0.0)["value"].grad_fn is None


# Credit and routes


def test_a_consumer_gets_no_more_than_its_credit_and_the_rest_waits_in_order():
    outbox, inbox = pair(slots=4, credit=2)
    for number in range(4):
        outbox.put(random_rows(SCHEMA, 1, number), version=number)
    assert [state.backlog for state in outbox.consumers()] == [2]
    assert outbox.waiting() == [3, 4]
    first = inbox.take(LIMIT_S)
    assert inbox.take(LIMIT_S).sequence == 2  # dropped unreleased: given back by the collector
    assert [state.backlog for state in outbox.consumers()] == [2]
    assert outbox.waiting() == [4]
    first.release()
    outbox.look()
    assert [inbox.take(LIMIT_S).sequence for _ in range(2)] == [3, 4]


def test_batches_go_to_the_consumer_with_the_least_backlog_unless_told_otherwise():
    outbox, first = pair(slots=6)
    second = Inbox(SCHEMA)
    line = outbox.attach(second.endpoint)
    assert outbox.attach(second.endpoint) == line
    for number in range(4):
        outbox.put(random_rows(SCHEMA, 1, number), version=number)
    outbox.put(random_rows(SCHEMA, 1, 4), version=4, to=line)
    assert [state.backlog for state in outbox.consumers()] == [2, 3]
    assert [outbox.backlog(line), outbox.backlog(99)] == [3, 0]
    assert second.producers == (0,)
    sequences = [[batch.sequence for batch in take_all(inbox)] for inbox in (first, second)]
    assert sequences == [[1, 3], [2, 4, 5]]


def test_a_consumer_that_comes_late_gets_what_waited_for_it():
    outbox = Outbox(SCHEMA, rows=2, slots=2)
    rows = [random_rows(SCHEMA, 2, number) for number in range(2)]
    for number in range(2):
        outbox.put(rows[number], version=number)
    with pytest.raises(ChannelTimeoutError, match="no consumer is attached; 2 wait for a consumer"):
        outbox.claim(timeout_s=0.0)
    inbox = Inbox(SCHEMA)
    with pytest.raises(ChannelTimeoutError, match="no producer has come"):
        inbox.take(timeout_s=0.0)
    outbox.attach(inbox.endpoint)
    assert all(same(inbox.take(LIMIT_S), rows[number]) for number in range(2))


def test_an_owner_that_routes_decides_where_each_batch_goes():
    outbox = Outbox(SCHEMA, rows=1, slots=3, routed=True)
    inbox = Inbox(SCHEMA)
    line = outbox.attach(inbox.endpoint)
    rows = [random_rows(SCHEMA, 1, number) for number in range(3)]
    for number in range(3):
        claim = outbox.claim(1)
        for name, tensor in rows[number].items():
            claim[name].copy_(tensor)
        claim.commit(version=number, sequence=10 + number)
    assert outbox.waiting() == [10, 11, 12]
    assert outbox.unreleased() == {10, 11, 12}
    outbox.post(11, line)
    parcel = outbox.parcel(12)
    assert (parcel.sequence, parcel.version, parcel.rows) == (12, 2, 1)
    other = Outbox(SCHEMA, rows=1, slots=1, producer=1)
    copied = other.claim(1)
    copied.message[:] = parcel.message
    copied.commit(version=parcel.version, sequence=parcel.sequence)
    outbox.drop(12)
    with inbox.take(LIMIT_S) as batch:
        assert batch.sequence == 11
        assert same(batch, rows[1])
    outbox.look()
    assert outbox.unreleased() == {10}
    other.attach(inbox.endpoint)
    with inbox.take(LIMIT_S) as batch:
        assert (batch.sequence, batch.producer) == (12, 1)
        assert same(batch, rows[2])


def test_a_number_that_comes_again_in_the_same_slot_is_another_batch():
    outbox, inbox = pair(slots=1)
    outbox.claim(1).commit(version=0, sequence=5)
    inbox.take(LIMIT_S).release()
    outbox.claim(1, timeout_s=0.0).commit(version=1, sequence=5)
    outbox.look()
    assert outbox.unreleased() == {5}
    assert inbox.take(LIMIT_S).version == 1


# Leaving


def test_what_a_closed_inbox_had_not_taken_goes_to_others_at_once_and_the_rest_when_released():
    outbox, inbox = pair(slots=4)
    for number in range(3):
        outbox.put(random_rows(SCHEMA, 1, number), version=number)
    taken = inbox.take(LIMIT_S)
    inbox.close()
    inbox.close()
    with pytest.raises(ChannelClosedError):
        inbox.take(timeout_s=0.0)
    other = Inbox(SCHEMA)
    outbox.attach(other.endpoint)
    assert [state.backlog for state in outbox.consumers()] == [1, 2]
    assert same(taken, random_rows(SCHEMA, 1, 0))
    assert [batch.sequence for batch in take_all(other)] == [2, 3]
    taken.release()
    assert len(outbox.consumers()) == 1
    assert outbox.drain(LIMIT_S) == 0


def test_a_batch_for_a_consumer_that_is_closed_goes_to_another():
    outbox, first = pair()
    second = Inbox(SCHEMA)
    outbox.attach(second.endpoint)
    assert outbox.takes(0, first.endpoint)
    assert not outbox.takes(0, second.endpoint)
    first.close()
    assert not outbox.takes(0, first.endpoint)
    outbox.put(random_rows(SCHEMA, 1, 0), version=0, to=0)
    assert second.take(LIMIT_S).sequence == 1


def test_a_closed_producer_is_drained_and_then_take_returns_none():
    outbox, inbox = pair()
    rows = random_rows(SCHEMA, 2, 3)
    outbox.put(rows, version=0)
    outbox.close()
    outbox.close()
    with pytest.raises(ChannelClosedError, match="producer 0 is closed"):
        outbox.claim()
    batch = inbox.take(LIMIT_S)
    assert inbox.take(LIMIT_S) is None
    assert inbox.take(LIMIT_S) is None
    assert same(batch, rows)
    batch.release()
    assert inbox.lost == []


def test_who_closes_before_anyone_came_for_its_batches_says_so(caplog):
    outbox = Outbox(SCHEMA, rows=1)
    outbox.put(random_rows(SCHEMA, 1, 0), version=0)
    outbox.close(timeout_s=0.0)
    assert "closes with 1 batches that no consumer has come for" in caplog.text


def test_a_producer_that_knocks_and_leaves_before_it_is_heard_is_not_lost():
    inbox = Inbox(SCHEMA)
    first = Outbox(SCHEMA, rows=1)
    first.attach(inbox.endpoint)
    first.close(timeout_s=0.0)
    assert inbox.producers == ()
    assert inbox.lost == []
    second = Outbox(SCHEMA, rows=1)  # the same producer, begun anew
    second.attach(inbox.endpoint)
    assert inbox.producers == (0,)


def test_a_producer_with_the_number_of_one_that_has_left_is_told_apart():
    first, inbox = pair(slots=1)
    first.put(random_rows(SCHEMA, 1, 0), version=0)
    first.close()
    second = Outbox(SCHEMA, rows=4, slots=1)  # gets the descriptor's number, too
    second.attach(inbox.endpoint)
    second.put(random_rows(SCHEMA, 1, 1), version=1)
    for seed in (0, 1):
        with inbox.take(LIMIT_S) as batch:
            assert same(batch, random_rows(SCHEMA, 1, seed))
    assert inbox.producers == (0,)


def test_an_inbox_with_the_descriptor_of_one_that_was_closed_is_told_apart():
    outbox, first = pair(slots=2)
    outbox.put(random_rows(SCHEMA, 1, 0), version=0)
    held = first.take(LIMIT_S)
    first.close()
    second = Inbox(SCHEMA)
    assert second.endpoint.split("#")[0] == first.endpoint.split("#")[0]
    line = outbox.attach(second.endpoint)
    assert line != 0
    outbox.put(random_rows(SCHEMA, 1, 1), version=0)
    assert same(second.take(LIMIT_S), random_rows(SCHEMA, 1, 1))
    held.release()


def test_an_end_that_is_dropped_is_closed():
    outbox, inbox = pair()
    del outbox
    assert inbox.take(LIMIT_S) is None
    outbox, inbox = pair()
    del inbox
    assert outbox.consumers() == ()


# Leaks


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
    outbox, inbox = pair(slots=1)
    outbox.put(random_rows(SCHEMA, 4, 0), version=0)
    batch = inbox.take(LIMIT_S)
    held = hold(batch)
    batch.release()
    assert inbox.leaks == 1
    assert "batch 1 of producer 0 was released while tensors of it are in use" in caplog.text
    with pytest.raises(ChannelTimeoutError):
        outbox.claim(timeout_s=0.0)
    del held
    outbox.claim(timeout_s=0.0).cancel()
    assert inbox.leaks == 1


@pytest.mark.parametrize("hold", HOLDERS)
def test_what_is_gone_before_the_release_is_no_leak(hold, caplog):
    outbox, inbox = pair(slots=1)
    for number in range(3):
        outbox.put(random_rows(SCHEMA, 4, number), version=0, timeout_s=0.0)
        with inbox.take(LIMIT_S) as batch:
            hold(batch)
    assert (inbox.leaks, caplog.text) == (0, "")


def test_a_batch_that_is_never_released_is_reported_and_its_slot_comes_back(caplog):
    outbox, inbox = pair(slots=1)
    outbox.put(random_rows(SCHEMA, 4, 0), version=0)
    held = inbox.take(LIMIT_S)["obs"]
    assert "was never released" in caplog.text
    with pytest.raises(ChannelTimeoutError):
        outbox.claim(timeout_s=0.0)
    del held
    outbox.claim(timeout_s=0.0).cancel()


def test_a_released_batch_is_not_read():
    outbox, inbox = pair()
    outbox.put(random_rows(SCHEMA, 4, 0), version=0)
    batch = inbox.take(LIMIT_S)
    batch.release()
    batch.release()
    for read in (lambda: batch["obs"], lambda: batch.record_batch()):
        with pytest.raises(ChannelClosedError, match="batch 1 was released"):
            read()


def test_leaks_are_counted_after_their_producer_has_left():
    outbox, inbox = pair()
    outbox.put(random_rows(SCHEMA, 1, 0), version=0)
    batch = inbox.take(LIMIT_S)
    held = batch["env"]
    batch.release()
    outbox.close()
    assert inbox.take(LIMIT_S) is None
    assert inbox.leaks == 1
    assert np.array_equal(held.numpy(), random_rows(SCHEMA, 1, 0)["env"].numpy())


def test_batches_are_released_by_any_thread():
    outbox, inbox = pair(slots=8)
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
        outbox.put(random_rows(SCHEMA, 1, number), version=number, timeout_s=LIMIT_S)
        batches.append(inbox.take(LIMIT_S))
        assert batches[-1:] == [] or batches[-1].sequence <= number + 1
        taken.release()
    for thread in threads:
        thread.join(LIMIT_S)
    assert (errors, inbox.leaks, outbox.drain(LIMIT_S)) == ([], 0, 0)
