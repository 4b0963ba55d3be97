"""Random call sequences against a model: each batch is released once, and no slot is used twice at a time."""

import pytest
import torch
from channel_cases import take_all
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.errors import ChannelTimeoutError
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field

SCHEMA = ExperienceSchema("numbers", (Field(name="number", dtype=torch.int64),))
MOST_CONSUMERS = 3
places = st.integers(0, 10)


class OneProducer(RuleBasedStateMachine):
    """One producer ring and several consumer endpoints in this process; every batch is filled with its own number."""

    @initialize(slots=st.integers(1, 5), credit=st.integers(1, 4))
    def begin(self, slots, credit):
        self.ring = ProducerRing(SCHEMA, rows=3, slots=slots, credit=credit)
        self.open, self.reservations, self.held = [], [], []
        self.made, self.committed, self.released = [], [], []

    @precondition(lambda self: len(self.made) < MOST_CONSUMERS)
    @rule()
    def attach(self):
        consumer_endpoint = ConsumerEndpoint(SCHEMA)
        self.ring.attach(consumer_endpoint.endpoint)
        self.open.append(consumer_endpoint)
        self.made.append(consumer_endpoint)

    @rule(rows=st.integers(0, 3))
    def reservation(self, rows):
        in_use = len(self.reservations) + len(self.committed) - len(self.released)
        if in_use == self.ring.slots:
            with pytest.raises(ChannelTimeoutError):
                self.ring.reserve(rows, timeout_s=0.0)
        else:
            self.reservations.append(self.ring.reserve(rows, timeout_s=0.0))

    @precondition(lambda self: self.reservations)
    @rule(place=places, wish=st.none() | st.integers(0, MOST_CONSUMERS))
    def commit(self, place, wish):
        reservation = self.reservations.pop(place % len(self.reservations))
        reservation["number"].fill_(len(self.committed) + 1)
        self.committed.append((reservation.commit(version=0, to=wish), reservation.num_rows))

    @precondition(lambda self: self.reservations)
    @rule(place=places)
    def cancel(self, place):
        self.reservations.pop(place % len(self.reservations)).cancel()

    @precondition(lambda self: self.open)
    @rule(place=places)
    def take(self, place):
        try:
            self.held.append(self.open[place % len(self.open)].take(timeout_s=0.0))
        except ChannelTimeoutError:
            return

    @precondition(lambda self: self.held)
    @rule(place=places)
    def release(self, place):
        batch = self.held.pop(place % len(self.held))
        self.released.append((batch.sequence, batch.num_rows))
        batch.release()

    @precondition(lambda self: self.open)
    @rule(place=places)
    def close(self, place):
        self.open.pop(place % len(self.open)).close()

    @invariant()
    def what_is_held_is_what_was_committed(self):
        for batch in self.held if hasattr(self, "held") else ():
            assert batch["number"].tolist() == [batch.sequence] * batch.num_rows

    def teardown(self):
        if not hasattr(self, "ring"):
            return
        while self.reservations:
            self.reservations.pop().cancel()
        last = ConsumerEndpoint(SCHEMA)
        if len(self.made) < MOST_CONSUMERS or not self.open:
            self.ring.attach(last.endpoint)
            self.open.append(last)
        for _ in range(2 * self.ring.slots):
            self.ring.drain(0.0)
            self.held += [batch for consumer_endpoint in self.open for batch in take_all(consumer_endpoint)]
            self.what_is_held_is_what_was_committed()
            while self.held:
                self.release(0)
        assert self.ring.drain(0.0) == 0
        assert sorted(self.released) == self.committed
        assert sum(consumer_endpoint.leaks for consumer_endpoint in self.made) == 0


OneProducer.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)
test_any_order_of_calls = OneProducer.TestCase
