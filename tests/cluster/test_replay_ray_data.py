"""A replay store as a dataset of Ray Data."""

import numpy as np
import pytest
import ray

from actors.replay import Column, ReplaySchema, ReplayStore
from rayagi.replay.ray_data import read_replay

pytestmark = pytest.mark.cluster
LENGTHS = (3, 1, 4, 2, 5)


@pytest.fixture(scope="module")
def local_ray():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def store():
    """Observation t of row r is (10 r + t, 0)."""
    columns = (
        Column(name="obs", dtype="float32", shape=(2,), extra=1),
        Column(name="action", dtype="int64"),
        Column(name="terminated", dtype="bool"),
    )
    store = ReplayStore.create(ReplaySchema(columns, 5), 8)
    for row, length in enumerate(LENGTHS):
        count = 10 * row + np.arange(length + 1)
        obs = np.stack([count, 0 * count], 1).astype(np.float32)
        last = np.arange(length) == length - 1
        store.insert({"obs": obs[None], "action": count[None, :-1], "terminated": last[None]})
    return store


@pytest.mark.parametrize(
    "blocks", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(50, marks=pytest.mark.slow)]
)
def test_each_step_is_a_row(local_ray, store, blocks):
    rows = read_replay(store, override_num_blocks=blocks).take_all()
    expected = [(row, step) for row, length in enumerate(LENGTHS) for step in range(length)]
    assert sorted((row["row"], row["step"]) for row in rows) == expected
    for row in rows:
        place = 10 * row["row"] + row["step"]
        assert row["obs"].tolist() == [place, 0]
        assert row["next_obs"].tolist() == [place + 1, 0]
        assert row["action"] == place
        assert row["terminated"] == (row["step"] == LENGTHS[row["row"]] - 1)
