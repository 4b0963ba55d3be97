"""The directory of the rendezvous actor: the latest incarnation of an announcer wins."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors import rendezvous_actor
from actors.rendezvous_actor import RendezvousActor


def test_announcements_are_found_by_key_prefix():
    collective = RendezvousActor(1)
    collective.announce("consumers/experience/1", "b")
    collective.announce("consumers/experience/0", "a")
    collective.announce("parameters/0", "c")
    assert collective.announced("consumers/experience/") == {
        "consumers/experience/0": "a",
        "consumers/experience/1": "b",
    }
    assert collective.announced("") == {**collective.announced("consumers/"), "parameters/0": "c"}
    assert collective.announced("consumers/serving/") == {}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1), st.randoms(use_true_random=False)
)
def test_the_latest_incarnation_wins_in_any_order(said, random):
    """(incarnation, value) of one key; each incarnation announces one value, repeatedly."""
    values = dict(said)
    repeated = [(incarnation, values[incarnation]) for incarnation in values for _ in range(3)]
    random.shuffle(repeated)
    collective = RendezvousActor(1)
    for incarnation, value in repeated:
        collective.announce("key", str(value), incarnation)
    assert collective.announced("key") == {"key": str(values[max(values)])}


def test_a_successor_s_announcement_counts_though_the_clock_was_set_back(monkeypatch):
    collective = RendezvousActor(1)
    first = collective.announce("parameters/0", "of the dead")
    monkeypatch.setattr(rendezvous_actor.time, "time_ns", lambda: first - 3600 * 10**9)
    second = collective.announce("parameters/0", "of its successor")
    assert collective.announced("") == {"parameters/0": "of its successor"}
    # After a restart of the actor both are announced again, by whoever comes first.
    restarted = RendezvousActor(1)
    restarted.announce("parameters/0", "of its successor", second)
    restarted.announce("parameters/0", "of the dead", first)
    assert restarted.announced("") == {"parameters/0": "of its successor"}
