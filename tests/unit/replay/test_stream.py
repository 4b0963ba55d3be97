"""Batches made ahead: the same as by hand, in order, and intact while the trainer has them."""

import multiprocessing
import threading

import numpy as np
import pytest
import torch
from replay_tables import SCHEMA, content

from actors.replay import BatchStream, ReplayError, ReplayStore, Subscription, SubSequences, gather, select
from tests.waiting import until

WANTED = [Subscription(column="obs", length=3)]


@pytest.fixture
def store():
    store = ReplayStore.create(SCHEMA, 10, selectors=(SubSequences(3),))
    store.insert(content(range(10)))
    return store


@pytest.mark.parametrize("ahead", [1, 3])
def test_batches_are_those_made_by_hand_and_stay_until_the_next(store, ahead):
    with BatchStream(store, SubSequences(3), WANTED, 6, seed=4, first_draw=5, ahead=ahead) as stream:
        for draw, (selection, batch) in zip(range(5, 25), stream, strict=False):
            expected = select(store, SubSequences(3), 6, seed=4, draw=draw)
            np.testing.assert_array_equal(selection.keys.indices, expected.keys.indices)
            np.testing.assert_array_equal(batch.values["obs"], gather(store, expected, WANTED).values["obs"])
            assert batch.current.all()


def test_the_callers_tensors_are_filled_in_turn(store):
    made = []

    def make_out():
        made.append(torch.empty((6, 3, 3)))
        return {"obs": made[-1]}

    with BatchStream(store, SubSequences(3), WANTED, 6, seed=0, ahead=2, make_out=make_out) as stream:
        seen = [next(stream)[1].values["obs"] for _ in range(7)]
    assert {id(tensor) for tensor in seen} == {id(tensor) for tensor in made}
    assert len(made) == 3


def test_an_error_reaches_the_trainer_and_ends_the_stream(store):
    empty = ReplayStore.create(SCHEMA, 4, selectors=(SubSequences(3),))
    stream = BatchStream(empty, SubSequences(3), WANTED, 6, seed=0)
    with pytest.raises(ReplayError, match="nothing can be selected"):
        next(stream)
    assert list(stream) == []
    with pytest.raises(ReplayError, match="0 batches ahead"):
        BatchStream(store, SubSequences(3), WANTED, 6, seed=0, ahead=0)


def test_closing_ends_the_thread(store):
    stream = BatchStream(store, SubSequences(3), WANTED, 6, seed=0)
    next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "replay-stream"]


def test_batches_that_nobody_took_do_not_use_rows_up():
    store = ReplayStore.create(SCHEMA, 10, selectors=(SubSequences(3),), max_times_sampled=2)
    store.insert(content(range(10)))
    tree = store.tree(SubSequences(3).spec)
    stream = BatchStream(store, SubSequences(3), WANTED, 4, seed=0, ahead=3)
    selection, _ = next(stream)
    until(lambda: store.counters()["selected"] == 4 + 12)
    stream.close()
    assert store.counters()["selected"] == 4
    assert store.draws_left(tree, 100) == 20 - 4
    assert store.status()["sampled"].tolist() == np.bincount(selection.keys.indices, minlength=10).tolist()


def test_a_forked_child_is_told_to_open_its_own(store):
    stream = BatchStream(store, SubSequences(3), WANTED, 6, seed=0)
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def ask():
        try:
            next(stream)
        except ReplayError as error:
            sender.send(str(error))
        stream.close()  # does not wait for a thread that is not there

    child = multiprocessing.get_context("fork").Process(target=ask)
    child.start()
    assert receiver.poll(30)
    assert "open a stream here" in receiver.recv()
    child.join(30)
    assert child.exitcode == 0
    next(stream)
    stream.close()
