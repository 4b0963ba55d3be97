"""Dict and tuple observations, as an environment gives them, to the flat rows that a policy takes. Needs numpy only.

A server describes the arrays of such an observation in ``/info``, in the order of the flat row:
``{"path": ["arm", 0], "shape": [3], "choices": [], "starts": []}``. With ``choices``, the array holds one whole number for
each of them, from its ``start`` on, which becomes a one-hot vector, as ``gymnasium.spaces.flatten`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Leaf = Mapping[str, Any]
"""An array of an observation, as ``/info`` describes it."""


def flat_rows(obs: Any, leaves: Sequence[Leaf]) -> tuple[NDArray[np.float32], bool]:
    """Flatten an observation.

    Args:
        obs: dicts and tuples of arrays of the leaves' shapes, or all of (rows, *shape)
        leaves: of the server; empty: its policy takes no dicts or tuples

    Returns:
        (rows, obs_dim), and whether ``obs`` is one observation, without the dimension of rows.

    Raises:
        ValueError: keys or shapes differ from the leaves'.
    """
    _check_keys(obs, [tuple(leaf["path"]) for leaf in leaves], "obs")
    values = [np.asarray(_at(obs, leaf["path"])) for leaf in leaves]
    is_single = values[0].ndim == len(leaves[0]["shape"])
    num_rows = 1 if is_single else len(values[0]) if values[0].ndim else 0
    columns = []
    for value, leaf in zip(values, leaves, strict=True):
        shape = tuple(leaf["shape"])
        if not num_rows or value.shape != (shape if is_single else (num_rows, *shape)):
            raise ValueError(
                f"{_name(leaf['path'])} has the shape {value.shape}; expected {shape}, or in every array the same number "
                "of rows before it"
            )
        columns.append(_columns(value.reshape(num_rows, -1), leaf))
    return np.concatenate(columns, axis=1), is_single


def _columns(values: NDArray[Any], leaf: Leaf) -> NDArray[np.float32]:
    """(rows, size) of an array as columns of the flat row: its numbers, or one-hot vectors of its choices."""
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{_name(leaf['path'])} holds {values.dtype}; expected numbers")
    if not leaf["choices"]:
        return values.astype("<f4")
    hot = []
    for column, choices, start in zip(values.T, leaf["choices"], leaf["starts"], strict=True):
        options = np.arange(start, start + choices)
        if not np.isin(column, options).all():
            raise ValueError(
                f"{_name(leaf['path'])} holds {column.tolist()}; expected whole numbers from {start} to {options[-1]}"
            )
        hot.append(column[:, None] == options)
    return np.concatenate(hot, axis=1).astype("<f4")


def _check_keys(obs: Any, paths: Sequence[tuple[str | int, ...]], name: str) -> None:
    """Check the keys of dicts and the lengths of tuples, from the outside to the inside."""
    keys = list(dict.fromkeys(path[0] for path in paths if path))
    if not keys:
        return
    if isinstance(keys[0], int):
        if not isinstance(obs, tuple | list) or len(obs) != len(keys):
            raise ValueError(f"{name} is {_described(obs)}; expected a tuple of {len(keys)}")
    elif not isinstance(obs, Mapping) or set(obs) != set(keys):
        raise ValueError(
            f"{name} is {_described(obs)}; expected a dict with the keys {', '.join(map(str, keys))}"
        )
    for key in keys:
        _check_keys(obs[key], [path[1:] for path in paths if path and path[0] == key], f"{name}[{key!r}]")


def _at(obs: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        obs = obs[key]
    return obs


def _name(path: Sequence[str | int]) -> str:
    return "obs" + "".join(f"[{key!r}]" for key in path)


def _described(obs: Any) -> str:
    if isinstance(obs, Mapping):
        return f"a dict with the keys {', '.join(map(str, obs))}"
    if isinstance(obs, tuple | list):
        return f"a {type(obs).__name__} of {len(obs)}"
    return f"of the type {type(obs).__name__}"
