"""Which consumer gets a batch, and what becomes of batches when consumers and producers come and go."""

import pytest
from channel_cases import LIMIT_S, SCHEMA, pair, random_rows, same, take_all

from collectives.experience.errors import ChannelClosedError, ChannelTimeoutError
from collectives.experience.inbox import Inbox
from collectives.experience.outbox import Outbox

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
