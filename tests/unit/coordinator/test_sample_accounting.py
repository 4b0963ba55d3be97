"""Sample accounting across lost processes, against a small model driven by hand or at random."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rayagi.coordinator.sample_accounting import SampleAccounting, SampleCounts


class World:
    """Collectors with queues of rows and one learner, which take and release as channels do."""

    def __init__(self):
        self.accounting, self.next_origin = SampleAccounting(), 1
        self.collectors = [self.new(), self.new()]
        self.orphans = {}
        self.truly_lost = 0
        self.begin_learner()

    def new(self):
        self.next_origin += 1
        return {"origin": self.next_origin, "sent": 0, "unreleased": 0}

    def begin_learner(self):
        self.updater = {"taken": 0, "dropped": 0, "received": {}}
        self.reported = {"taken": 0, "dropped": 0, "received": {}}

    def send(self, who):
        self.collectors[who]["sent"] += 4
        self.collectors[who]["unreleased"] += 4

    def consume(self, who, name):
        """Take and release one of this collector's, or of a dead one's that had come."""
        book = self.collectors[who]
        if book["unreleased"]:
            book["unreleased"] -= 4
            origin = book["origin"]
        elif self.orphans:
            origin = next(iter(self.orphans))
            self.orphans[origin] -= 4
            if not self.orphans[origin]:
                del self.orphans[origin]
        else:
            return
        came, released = self.updater["received"].get(origin, (0, 0))
        self.updater["received"][origin] = (max(came, released + 4), released + 4)
        self.updater[name] += 4

    def report(self):
        self.reported = {**self.updater, "received": dict(self.updater["received"])}

    def kill_collector(self, who):
        """What it had posted is still read: it came."""
        book = self.collectors[who]
        _, released = self.updater["received"].get(book["origin"], (0, 0))
        if book["unreleased"]:
            self.orphans[book["origin"]] = book["unreleased"]
            self.updater["received"][book["origin"]] = (released + book["unreleased"], released)
        self.collectors[who] = self.new()
        self.report()

    def kill_learner(self):
        taken = self.updater["taken"] + self.updater["dropped"]
        self.truly_lost += (
            taken - self.reported["taken"] - self.reported["dropped"] + sum(self.orphans.values())
        )
        self.orphans = {}
        self.accounting.record_lost_learners(self.collectors, [self.reported])
        self.begin_learner()

    def sample_counts(self):
        return self.accounting.sample_counts(self.collectors, [self.updater])


moves = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 1)),
    st.tuples(st.just("consume"), st.integers(0, 1), st.sampled_from(["taken", "dropped"])),
    st.tuples(st.just("report")),
    st.tuples(st.just("kill_collector"), st.integers(0, 1)),
    st.tuples(st.just("kill_learner")),
)


@given(st.lists(moves, max_size=60))
def test_counts_add_up_whoever_dies(played):
    world = World()
    for name, *arguments in played:
        getattr(world, name)(*arguments)
    account = world.sample_counts()
    assert account.missing == 0, str(account)
    assert account.lost == world.truly_lost
    assert min(account.sent, account.taken, account.dropped, account.in_flight, account.lost) >= 0


def test_what_a_learner_released_and_never_reported_is_lost_and_said_so():
    world = World()
    for _ in range(3):
        world.send(0)
    world.consume(0, "taken")
    world.report()
    world.consume(0, "taken")
    world.kill_learner()
    world.consume(0, "taken")
    assert world.sample_counts() == SampleCounts(sent=12, taken=8, dropped=0, in_flight=0, lost=4)


def test_rows_that_vanish_are_missing():
    world = World()
    world.send(0)
    world.collectors[0]["unreleased"] = 0
    assert world.sample_counts().missing == 4
