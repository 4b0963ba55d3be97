"""Trajectories for the tests of imports and exports, and what a store has of them."""

from pathlib import Path

import numpy as np

from rayagi.replay.saved import store_source


def trajectories(seed=0, lengths=(3, 1, 5), ends="tuc", obs_shape=(2,), action=np.float32):
    """Trajectories that terminate (t), are truncated (u), or are cut by the end of a recording (c)."""
    rng = np.random.default_rng(seed)
    found = []
    for length, end in zip(lengths, ends, strict=True):
        last = np.arange(length) == length - 1
        discrete = np.issubdtype(action, np.integer)
        found.append(
            {
                "obs": rng.standard_normal((length + 1, *obs_shape)).astype(np.float32),
                "action": rng.integers(0, 3, length).astype(action)
                if discrete
                else rng.uniform(-1, 1, (length, 2)).astype(action),
                "reward": rng.standard_normal(length).astype(np.float32),
                "terminated": last & (end == "t"),
                "truncated": last & (end == "u"),
            }
        )
    return found


def content(store):
    """A store's trajectories."""
    return list(store_source(store, Path("store")).read())


def assert_equal(found, expected):
    """Same trajectories, with the same types, in the same order."""
    assert len(found) == len(expected)
    for own, wanted in zip(found, expected, strict=True):
        assert own.keys() == wanted.keys()
        for name, values in wanted.items():
            assert own[name].dtype == values.dtype, name
            np.testing.assert_array_equal(own[name], values, err_msg=name)
