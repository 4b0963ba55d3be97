"""Columns of Arrow as arrays, those of Ray Data and of RLlib's compression too."""

from __future__ import annotations

import base64
import io
import json
import pickle
from collections.abc import Mapping
from typing import Any

import lz4.frame
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from placement.errors import counted


def shape_in(field: pa.Field) -> tuple[int, ...] | None:
    """Shape that a tensor extension type's metadata has; None without. Ray need not be imported to register the type."""
    if isinstance(field.type, pa.BaseExtensionType):
        found = getattr(field.type, "shape", None)
        return None if found is None else tuple(found)
    text = (field.metadata or {}).get(b"ARROW:extension:metadata", b"")
    try:
        stored = json.loads(text)
    except ValueError:
        return None
    found = stored.get("shape") if isinstance(stored, Mapping) else stored
    return tuple(map(int, found)) if isinstance(found, list) else None


def as_array(column: pa.Array, shape: tuple[int, ...] | None = None) -> NDArray[Any]:
    """A column without nulls as (rows, *shape).

    Args:
        column: numbers, lists of equal lengths to any depth, tensors, or arrays that RLlib has compressed
        shape: of one row; None: as the lists are nested

    Raises:
        ValueError: it has nulls, or lists of different lengths.
        TypeError: it has other values than numbers.
    """
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if column.null_count:
        raise ValueError(f"null in {counted(column.null_count, 'row')}")
    rows, sizes = len(column), []
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return np.stack([unpacked(text) for text in column.to_pylist()])
    while hasattr(column.type, "value_type") and not pa.types.is_dictionary(column.type):
        inner = column.flatten()
        sizes.append(len(inner) // max(1, len(column)))
        if len(inner) != sizes[-1] * len(column) or not _has_equal_lists(column):
            raise ValueError("its lists have different lengths")
        if inner.null_count:
            raise ValueError(f"null in {counted(inner.null_count, 'value')} of its lists")
        column = inner
    if not (
        pa.types.is_integer(column.type)
        or pa.types.is_floating(column.type)
        or pa.types.is_boolean(column.type)
    ):
        raise TypeError(f"{column.type} is no type of numbers")
    return column.to_numpy(zero_copy_only=False).reshape(rows, *(sizes if shape is None else shape))


def _has_equal_lists(column: pa.Array) -> bool:
    if pa.types.is_fixed_size_list(column.type):
        return True
    sizes = column.value_lengths().to_numpy()
    return bool((sizes == sizes[:1]).all())


class _ArraysOnly(pickle.Unpickler):
    """Unpickles arrays of NumPy, and nothing else: a pickle of another kind could run any code."""

    _ALLOWED = frozenset(
        {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy.core.multiarray", "scalar"),
            ("numpy._core.multiarray", "scalar"),
            ("numpy.core.numeric", "_frombuffer"),
            ("numpy._core.numeric", "_frombuffer"),
            ("_codecs", "encode"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED:
            raise pickle.UnpicklingError(
                f"{module}.{name} in a compressed column, where only arrays are read"
            )
        return super().find_class(module, name)


def unpacked(text: str) -> NDArray[Any]:
    """An array that ``ray.rllib.utils.compression.pack`` wrote: pickle, LZ4, base64."""
    content = lz4.frame.decompress(base64.b64decode(text, validate=True))
    found = _ArraysOnly(io.BytesIO(content)).load()
    # A pickle may make an array of any size, without values.
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "biuf" or found.nbytes > len(content):
        raise TypeError("a compressed column has no arrays of numbers")
    return found
