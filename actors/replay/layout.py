"""Sizes and places of a store's parts within its files."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Any

from actors.replay import kernel, memory
from actors.replay.errors import ReplayError
from actors.replay.kernel import TreeStruct, WarmthStruct
from actors.replay.rows import TreeSpec
from actors.replay.schema import ReplaySchema
from placement.errors import counted

META_AT = 4096
"""Byte of the first file at which the table's description begins, as JSON."""
MOST_ROWS = kernel.FANOUT ** (kernel.MAX_LEVELS - 1)
"""Of a table, all shards together: more have no root in a tree of MAX_LEVELS."""


def check_sizes(capacity: int, max_times_sampled: int, shard: int, num_shards: int, incarnation: int) -> None:
    """Raise ReplayError if one of ``ReplayStore.create``'s numbers is outside its range."""
    if not (0 < capacity < 2**31 and capacity == int(capacity)):
        raise ReplayError(f"capacity is {capacity}: use 1 to {2**31 - 1} rows")
    if max_times_sampled < 0:
        raise ReplayError(
            f"max_times_sampled is {max_times_sampled}: use 0 for no limit, or a positive number"
        )
    if not 0 <= shard < num_shards:
        raise ReplayError(f"shard {shard} of {counted(num_shards, 'shard')}: use 0 to num_shards - 1")
    if capacity * num_shards > MOST_ROWS:
        raise ReplayError(
            f"{counted(num_shards, 'shard')} of {counted(capacity, 'row')}: use at most {MOST_ROWS} rows together"
        )
    if not 0 <= incarnation < 2**20:
        raise ReplayError(f"incarnation is {incarnation}: use 0 to {2**20 - 1}")


def tree_specs(selectors: Sequence[Any], removal: str) -> list[TreeSpec]:
    """Trees that selectors and removal need; that of rows is always there."""
    specs = [TreeSpec(kernel.ROWS), *(selector.spec for selector in selectors if selector.spec is not None)]
    if removal in kernel.TREES_OF_REMOVALS:
        specs.append(TreeSpec(kernel.TREES_OF_REMOVALS[removal]))
    return list(dict.fromkeys(specs))


def lay_out_tree(struct: TreeStruct, spec: TreeSpec, at: int | None, meta: Mapping[str, Any]) -> int:
    """Set a tree's leaves and levels. Returns its bytes."""
    capacity = int(meta["capacity"])
    struct.kind, struct.exponent, struct.window, struct.stride = spec
    found: int = kernel.library().replay_tree_layout(
        ctypes.addressof(struct), at, capacity * meta["shard"], capacity, capacity * meta["num_shards"]
    )
    return found


def layout_of(meta: Mapping[str, Any]) -> dict[str, int]:
    """Byte at which each part of the first file begins, and its size."""
    capacity, parts = int(meta["capacity"]), dict[str, int]()
    at = memory.page_aligned(META_AT + len(json.dumps(meta)) + 64)
    sizes = {
        "rows": capacity * kernel.ROW.itemsize,
        "slot_rows": 4 * int(meta.get("slots", 0)) if meta["spills"] else 0,
        "warmth": capacity * ctypes.sizeof(WarmthStruct) if meta["spills"] else 0,
        "trees": sum(lay_out_tree(TreeStruct(), TreeSpec(*spec), None, meta) for spec in meta["trees"]),
    }
    for name, size in sizes.items():
        parts[name], at = at, _lines(at + size)
    return {**parts, "size": memory.page_aligned(at)}


def file_sizes(meta: Mapping[str, Any], schema: ReplaySchema) -> list[int]:
    """Bytes of each file of a store: status, blocks in memory, and spilled rows if there are any."""
    rows = [int(meta["slots"])] + ([int(meta["capacity"])] if meta["spills"] else [])
    return [layout_of(meta)["size"], *(count * schema.row_bytes for count in rows)]


def slots_in_memory(
    meta: Mapping[str, Any],
    schema: ReplaySchema,
    memory_bytes: int | None,
    folder: str | os.PathLike[str] | None,
) -> int:
    """Rows that are in memory at a time."""
    capacity = int(meta["capacity"])
    if memory_bytes is None:
        return capacity
    status = layout_of({**meta, "spills": True, "slots": capacity})["size"]
    slots = (memory_bytes - status - mmap.PAGESIZE) // schema.row_bytes
    if slots >= capacity:
        return capacity
    if folder is None or slots < 1:
        needed = status + schema.row_bytes * (capacity if folder is None else 1) + mmap.PAGESIZE
        raise ReplayError(
            f"memory_bytes is {memory_bytes:,} where this table needs {needed:,}: "
            + (
                "give a folder for the rows beyond it"
                if folder is None
                else "its status table must be in memory"
            )
        )
    return int(slots)


def _lines(size: int) -> int:
    """In whole cache lines."""
    return -(-size // 64) * 64
