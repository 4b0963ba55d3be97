"""Shuffled windows for torch's DataLoader: each once an epoch, in the same order for any number of workers."""

import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from actors.replay import Column, ReplayError, ReplaySchema, ReplayStore, Subscription
from rayagi.replay.batches import ShuffledWindows
from rayagi.replay.ray_data import ReplayDatasource

WINDOWS = (
    Subscription(column="step", length=3),
    Subscription(column="obs"),
    Subscription(column="obs", offset=1, name="next_obs"),
)
LENGTHS = (4, 2, 6, 3)


@pytest.fixture(scope="module")
def store():
    """Step t of row r is 10 r + t."""
    columns = (Column(name="step", dtype="int64"), Column(name="obs", dtype="float32", shape=(2,), extra=1))
    store = ReplayStore.create(ReplaySchema(columns, 6), 4)
    for row, length in enumerate(LENGTHS):
        steps = 10 * row + np.arange(length + 1)
        obs = np.stack([steps, -steps], 1).astype(np.float32)
        store.insert({"step": steps[None, :-1], "obs": obs[None]})
    return store


def epoch(store, workers, epoch=0, seed=5, **settings):
    batches = ShuffledWindows(store, WINDOWS, batch=3, seed=seed, length=3, **settings)
    batches.set_epoch(epoch)
    return list(DataLoader(batches, batch_size=None, num_workers=workers))


def test_each_window_comes_once(store):
    found = epoch(store, 0)
    steps = torch.cat([batch["step"] for batch in found]).tolist()
    expected = [[10 * row + t + i for i in range(3)] for row, n in enumerate(LENGTHS) for t in range(n - 2)]
    assert sorted(steps) == expected
    assert steps != expected
    assert [len(batch["step"]) for batch in found] == [3, 3, 1]
    for batch in found:
        assert batch["obs"][:, 0].tolist() == batch["step"][:, 0].tolist()
        assert batch["next_obs"][:, 0].tolist() == batch["step"][:, 1].tolist()
        assert batch["step_mask"].all()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_make_the_same_batches_in_the_same_order(store, workers):
    for own, expected in zip(epoch(store, workers), epoch(store, 0), strict=True):
        for name, values in expected.items():
            assert own[name].equal(values)


def test_a_copy_in_another_process_attaches_to_the_store(store):
    batches = ShuffledWindows(store, WINDOWS, batch=3, seed=5, length=3)
    copy = pickle.loads(pickle.dumps(batches))
    assert [batch["step"].tolist() for batch in copy] == [batch["step"].tolist() for batch in batches]


def test_the_seed_and_the_epoch_decide_the_order(store):
    def order(**settings):
        return torch.cat([batch["step"][:, 0] for batch in epoch(store, 0, **settings)]).tolist()

    assert order() == order()
    assert len({tuple(order(epoch=number)) for number in range(4)} | {tuple(order(seed=6))}) == 5


def test_a_stride_leaves_windows_out(store):
    starts = sorted(int(batch) for part in epoch(store, 0, stride=2) for batch in part["step"][:, 0])
    assert starts == [0, 20, 22, 30]


def test_overwritten_rows_are_left_out():
    store = ReplayStore.create(ReplaySchema((Column(name="step", dtype="int64"),), 1), 2)
    store.insert({"step": np.arange(2)})
    batches = ShuffledWindows(store, [Subscription(column="step")], batch=2, seed=0)
    store.insert({"step": np.array([7])})
    (batch,) = batches
    assert batch["step"].tolist() == [1]


def test_bad_settings(store):
    with pytest.raises(ReplayError, match="no trajectory of the store has 7 steps"):
        ShuffledWindows(store, WINDOWS, batch=3, seed=0, length=7)
    with pytest.raises(ReplayError, match="use positive numbers"):
        ShuffledWindows(store, WINDOWS, batch=0, seed=0)
    with pytest.raises(ReplayError, match="seed -1: use 0 or a positive number"):
        ShuffledWindows(store, WINDOWS, batch=3, seed=-1)


@pytest.mark.parametrize("name", ["row", "step", "next_obs"])
def test_ray_data_s_own_columns_are_refused(name):
    columns = (Column(name=name, dtype="int64"), Column(name="obs", dtype="float32", extra=1))
    with pytest.raises(
        ReplayError, match=f"the store has the columns {name}, names of columns that are added"
    ):
        ReplayDatasource(ReplayStore.create(ReplaySchema(columns, 1), 1))


def test_ray_data_of_observations_without_the_one_after_the_last_step():
    columns = (Column(name="obs", dtype="float32", shape=(2,)), Column(name="goal", dtype="int64", extra=2))
    store = ReplayStore.create(ReplaySchema(columns, 3), 2)
    for row, length in enumerate((2, 3)):
        obs = np.full((1, length, 2), row, np.float32)
        store.insert({"obs": obs, "goal": 10 * row + np.arange(length + 2)[None]})
    (task,) = ReplayDatasource(store).get_read_tasks(1)
    (block,) = task()
    assert block.column_names == ["obs", "goal", "row", "step"]
    assert block["goal"].to_pylist() == [0, 1, 10, 11, 12]
    assert block["row"].to_pylist() == [0, 0, 1, 1, 1]
    assert block["step"].to_pylist() == [0, 1, 0, 1, 2]
    store.close()
