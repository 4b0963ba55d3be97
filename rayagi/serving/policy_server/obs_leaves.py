"""Dict and tuple observations, as an environment gives them, to the flat rows that a policy takes. Needs numpy only.

A server describes the arrays of such an observation in ``/info``, in the order of the flat row:
``{"path": ["arm", 0], "shape": [3], "choices": [], "starts": []}``. With ``choices``, the array holds one whole number for
each of them, from its ``start`` on, which becomes a one-hot vector, as ``gymnasium.spaces.flatten`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

Leaf = Mapping[str, Any]
"""An array of an observation, as ``/info`` describes it."""
_MOST_TEXT = 200
"""Most characters of a dict's keys in an error."""


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
        columns.append(_columns(value.reshape(num_rows, -1), leaf, _name(leaf["path"])))
    return np.concatenate(columns, axis=1), is_single


def flat_row(obs: Any, leaves: Sequence[Leaf], name: str) -> NDArray[np.float32]:
    """Flatten one observation of JSON, in which tuples and arrays are lists, and all numbers are floats.

    Args:
        obs: dicts and lists that mirror the leaves
        leaves: of the server
        name: of the observation, for errors

    Returns:
        (obs_dim,)

    Raises:
        ValueError: keys, lengths or types differ from the leaves', or a number is not finite in float32.
    """
    _check_keys(obs, [tuple(leaf["path"]) for leaf in leaves], name)
    columns = []
    for leaf in leaves:
        part = _name(leaf["path"], name)
        values = _columns(_numbers(_at(obs, leaf["path"]), tuple(leaf["shape"]), part), leaf, part)
        if not np.isfinite(values).all():
            raise ValueError(f"{part} holds a number that is not finite in float32; expected finite numbers")
        columns.append(values[0])
    return np.concatenate(columns)


def vector_leaf(size: int) -> Leaf:
    """The one array of an observation that is a vector."""
    return {"path": (), "shape": (size,), "choices": ()}


def list_levels(leaves: Sequence[Leaf]) -> int:
    """Levels of lists of one observation in JSON, from the outside to its first dict or number."""
    path = leaves[0]["path"]
    tuples = len([*takewhile(lambda key: isinstance(key, int), path)])
    return tuples + (len(leaves[0]["shape"]) if tuples == len(path) else 0)


def _numbers(value: Any, shape: tuple[int, ...], name: str) -> NDArray[np.float64]:
    """(1, size) of nested lists of the shape."""
    level = [value]
    for dimension, size in enumerate(shape):
        if not ({*map(type, level)} <= {list} and {*map(len, level)} <= {size}):
            wrong = next(each for each in level if not isinstance(each, list) or len(each) != size)
            raise ValueError(
                f"{name} has {_described(wrong)} in dimension {dimension}; expected the shape {shape}"
            )
        level = [*chain.from_iterable(level)]
    if not {*map(type, level)} <= {float}:
        wrong = next(each for each in level if type(each) is not float)
        raise ValueError(f"{name} holds {_described(wrong)}; expected numbers of the shape {shape}")
    return np.array([level], np.float64)


def _columns(values: NDArray[Any], leaf: Leaf, name: str) -> NDArray[np.float32]:
    """(rows, size) of an array as columns of the flat row: its numbers, or one-hot vectors of its choices."""
    if values.dtype.kind not in "biuf":
        raise ValueError(f"{name} holds {values.dtype}; expected numbers")
    if not leaf["choices"]:
        with np.errstate(over="ignore"):  # the server rejects what becomes infinite
            return values.astype("<f4")
    hot = []
    for column, choices, start in zip(values.T, leaf["choices"], leaf["starts"], strict=True):
        options = np.arange(start, start + choices)
        if not np.isin(column, options).all():
            raise ValueError(
                f"{name} holds {column.tolist()}; expected whole numbers from {start} to {options[-1]}"
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


def _name(path: Sequence[str | int], obs: str = "obs") -> str:
    return obs + "".join(f"[{key!r}]" for key in path)


def _described(obs: Any) -> str:
    if isinstance(obs, Mapping):
        keys = ", ".join(map(str, obs))
        return f"a dict with the keys {keys if len(keys) <= _MOST_TEXT else keys[:_MOST_TEXT] + ' ...'}"
    if isinstance(obs, tuple | list):
        return f"a {type(obs).__name__} of {len(obs)}"
    return f"a value of the type {type(obs).__name__}"
