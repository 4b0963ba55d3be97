"""Which consumer gets a batch, and what happens to batches when consumers and producers attach and close."""

import pytest
from channel_cases import LIMIT_S, SCHEMA, pair, random_rows, same, take_all

from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.errors import ChannelClosedError, ChannelTimeoutError
from collectives.experience.producer_ring import ProducerRing

# Credit and routes


def test_a_consumer_gets_no_more_than_its_credit_and_the_rest_waits_in_order():
    ring, consumer_endpoint = pair(slots=4, credit=2)
    for number in range(4):
        ring.put(random_rows(SCHEMA, 1, number), version=number)
    assert [state.backlog for state in ring.consumers()] == [2]
    assert ring.waiting() == [3, 4]
    first = consumer_endpoint.take(LIMIT_S)
    assert consumer_endpoint.take(LIMIT_S).sequence == 2  # dropped unreleased: given back by the collector
    assert [state.backlog for state in ring.consumers()] == [2]
    assert ring.waiting() == [4]
    first.release()
    ring.update()
    assert [consumer_endpoint.take(LIMIT_S).sequence for _ in range(2)] == [3, 4]


def test_batches_go_to_the_consumer_with_the_least_backlog_unless_one_is_given():
    ring, first = pair(slots=6)
    second = ConsumerEndpoint(SCHEMA)
    queue = ring.attach(second.endpoint)
    assert ring.attach(second.endpoint) == queue
    for number in range(4):
        ring.put(random_rows(SCHEMA, 1, number), version=number)
    ring.put(random_rows(SCHEMA, 1, 4), version=4, to=queue)
    assert [state.backlog for state in ring.consumers()] == [2, 3]
    assert [ring.backlog(queue), ring.backlog(99)] == [3, 0]
    assert second.producers == (0,)
    sequences = [
        [batch.sequence for batch in take_all(consumer_endpoint)] for consumer_endpoint in (first, second)
    ]
    assert sequences == [[1, 3], [2, 4, 5]]


def test_a_consumer_that_comes_late_gets_what_waited_for_it():
    ring = ProducerRing(SCHEMA, rows=2, slots=2)
    rows = [random_rows(SCHEMA, 2, number) for number in range(2)]
    for number in range(2):
        ring.put(rows[number], version=number)
    with pytest.raises(ChannelTimeoutError, match="no consumer is attached; 2 wait for a consumer"):
        ring.reserve(timeout_s=0.0)
    consumer_endpoint = ConsumerEndpoint(SCHEMA)
    with pytest.raises(ChannelTimeoutError, match="no producer has connected"):
        consumer_endpoint.take(timeout_s=0.0)
    ring.attach(consumer_endpoint.endpoint)
    assert all(same(consumer_endpoint.take(LIMIT_S), rows[number]) for number in range(2))


def test_an_owner_that_routes_decides_where_each_batch_goes():
    ring = ProducerRing(SCHEMA, rows=1, slots=3, routed=True)
    consumer_endpoint = ConsumerEndpoint(SCHEMA)
    queue = ring.attach(consumer_endpoint.endpoint)
    rows = [random_rows(SCHEMA, 1, number) for number in range(3)]
    for number in range(3):
        reservation = ring.reserve(1)
        for name, tensor in rows[number].items():
            reservation[name].copy_(tensor)
        reservation.commit(version=number, sequence=10 + number)
    assert ring.waiting() == [10, 11, 12]
    assert ring.unreleased() == {10, 11, 12}
    ring.post(11, queue)
    encoded_batch = ring.encoded_batch(12)
    assert (encoded_batch.sequence, encoded_batch.version, encoded_batch.rows) == (12, 2, 1)
    other = ProducerRing(SCHEMA, rows=1, slots=1, producer=1)
    copied = other.reserve(1)
    copied.message[:] = encoded_batch.message
    copied.commit(version=encoded_batch.version, sequence=encoded_batch.sequence)
    ring.drop(12)
    with consumer_endpoint.take(LIMIT_S) as batch:
        assert batch.sequence == 11
        assert same(batch, rows[1])
    ring.update()
    assert ring.unreleased() == {10}
    other.attach(consumer_endpoint.endpoint)
    with consumer_endpoint.take(LIMIT_S) as batch:
        assert (batch.sequence, batch.producer) == (12, 1)
        assert same(batch, rows[2])


def test_a_number_that_comes_again_in_the_same_slot_is_another_batch():
    ring, consumer_endpoint = pair(slots=1)
    ring.reserve(1).commit(version=0, sequence=5)
    consumer_endpoint.take(LIMIT_S).release()
    ring.reserve(1, timeout_s=0.0).commit(version=1, sequence=5)
    ring.update()
    assert ring.unreleased() == {5}
    assert consumer_endpoint.take(LIMIT_S).version == 1


# Closing


def test_what_a_closed_consumer_had_not_taken_goes_to_others_at_once_and_the_rest_when_released():
    ring, consumer_endpoint = pair(slots=4)
    for number in range(3):
        ring.put(random_rows(SCHEMA, 1, number), version=number)
    taken = consumer_endpoint.take(LIMIT_S)
    consumer_endpoint.close()
    consumer_endpoint.close()
    with pytest.raises(ChannelClosedError):
        consumer_endpoint.take(timeout_s=0.0)
    other = ConsumerEndpoint(SCHEMA)
    ring.attach(other.endpoint)
    assert [state.backlog for state in ring.consumers()] == [1, 2]
    assert same(taken, random_rows(SCHEMA, 1, 0))
    assert [batch.sequence for batch in take_all(other)] == [2, 3]
    taken.release()
    assert len(ring.consumers()) == 1
    assert ring.drain(LIMIT_S) == 0


def test_a_batch_for_a_consumer_that_is_closed_goes_to_another():
    ring, first = pair()
    second = ConsumerEndpoint(SCHEMA)
    ring.attach(second.endpoint)
    assert ring.is_attached_to(0, first.endpoint)
    assert not ring.is_attached_to(0, second.endpoint)
    first.close()
    assert not ring.is_attached_to(0, first.endpoint)
    ring.put(random_rows(SCHEMA, 1, 0), version=0, to=0)
    assert second.take(LIMIT_S).sequence == 1


def test_a_closed_producer_is_drained_and_then_take_returns_none():
    ring, consumer_endpoint = pair()
    rows = random_rows(SCHEMA, 2, 3)
    ring.put(rows, version=0)
    ring.close()
    ring.close()
    with pytest.raises(ChannelClosedError, match="producer 0 is closed"):
        ring.reserve()
    batch = consumer_endpoint.take(LIMIT_S)
    assert consumer_endpoint.take(LIMIT_S) is None
    assert consumer_endpoint.take(LIMIT_S) is None
    assert same(batch, rows)
    batch.release()
    assert consumer_endpoint.lost == []


def test_a_producer_that_closes_with_undelivered_batches_reports_them(caplog):
    ring = ProducerRing(SCHEMA, rows=1)
    ring.put(random_rows(SCHEMA, 1, 0), version=0)
    ring.close(timeout_s=0.0)
    assert "closed with 1 undelivered batches" in caplog.text


def test_a_producer_that_closes_before_its_connect_request_is_accepted_is_not_lost():
    consumer_endpoint = ConsumerEndpoint(SCHEMA)
    first = ProducerRing(SCHEMA, rows=1)
    first.attach(consumer_endpoint.endpoint)
    first.close(timeout_s=0.0)
    assert consumer_endpoint.producers == ()
    assert consumer_endpoint.lost == []
    second = ProducerRing(SCHEMA, rows=1)  # the same producer, restarted
    second.attach(consumer_endpoint.endpoint)
    assert consumer_endpoint.producers == (0,)


def test_a_producer_with_the_number_of_a_closed_one_is_distinguished():
    first, consumer_endpoint = pair(slots=1)
    first.put(random_rows(SCHEMA, 1, 0), version=0)
    first.close()
    second = ProducerRing(SCHEMA, rows=4, slots=1)  # gets the descriptor's number, too
    second.attach(consumer_endpoint.endpoint)
    second.put(random_rows(SCHEMA, 1, 1), version=1)
    for seed in (0, 1):
        with consumer_endpoint.take(LIMIT_S) as batch:
            assert same(batch, random_rows(SCHEMA, 1, seed))
    assert consumer_endpoint.producers == (0,)


def test_a_consumer_with_the_descriptor_of_a_closed_one_is_distinguished():
    ring, first = pair(slots=2)
    ring.put(random_rows(SCHEMA, 1, 0), version=0)
    held = first.take(LIMIT_S)
    first.close()
    second = ConsumerEndpoint(SCHEMA)
    assert second.endpoint.split("#")[0] == first.endpoint.split("#")[0]
    queue = ring.attach(second.endpoint)
    assert queue != 0
    ring.put(random_rows(SCHEMA, 1, 1), version=0)
    assert same(second.take(LIMIT_S), random_rows(SCHEMA, 1, 1))
    held.release()


def test_an_endpoint_that_is_garbage_collected_is_closed():
    ring, consumer_endpoint = pair()
    del ring
    assert consumer_endpoint.take(LIMIT_S) is None
    ring, consumer_endpoint = pair()
    del consumer_endpoint
    assert ring.consumers() == ()
