"""Checks at load time that structs and constants of a C program equal their ctypes definitions in Python.

A table is appended to the C source: every struct's size, every field's offset, size and kind, and every constant's value,
as the C compiler sees them. A field or constant that was changed on one side only raises an error that names it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from types import MappingProxyType

Mirrors = Mapping[str, "type[ctypes.Structure] | int"]
"""By C name: the ctypes definition of a struct, or the value of an integer constant expression."""

NOTHING: Mirrors = MappingProxyType({})
FILE = "rayagi_mirrors"
"""File name of the table in the compiler's messages."""
_INTEGER, _POINTER, _REAL, _STRUCT = 1, 5, 8, 12
"""Of __builtin_classify_type."""


class MirrorError(Exception):
    """A C program and Python disagree about a struct or a constant: a bug in rayagi."""


def table(mirrors: Mirrors) -> str:
    """C source of the table, to be appended to the program."""
    lines = [
        f'#line 1 "{FILE}"',
        "#include <stddef.h>",
        "#include <stdint.h>",
        f"const int64_t {FILE}[] = {{",
    ]
    for name, mirror in mirrors.items():
        if isinstance(mirror, int):
            lines.append(f"(int64_t)({name}),")
            continue
        lines.append(f"sizeof({name}),")
        for field, _ in _fields(mirror):
            at = f"(({name} *)0)->{field}"
            lines.append(f"offsetof({name}, {field}), sizeof({at}), __builtin_classify_type({at}),")
    return "\n".join([*lines, "0};"])


def check(library: ctypes.CDLL, mirrors: Mirrors) -> None:
    """Compare the table of a loaded program with Python's definitions.

    Raises:
        MirrorError: all differences, with the values in C and in Python.
    """
    expected = list(_expected(mirrors))
    compiled = (ctypes.c_int64 * len(expected)).in_dll(library, FILE)
    different = [
        f"{what} is {c} in C and {python} in Python"
        for (what, python), c in zip(expected, compiled, strict=True)
        if c != python
    ]
    if different:
        raise MirrorError("; ".join(different))


def _expected(mirrors: Mirrors) -> Iterator[tuple[str, int]]:
    for name, mirror in mirrors.items():
        if isinstance(mirror, int):
            yield name, mirror
            continue
        yield f"the size of {name} in bytes", ctypes.sizeof(mirror)
        for field, kind in _fields(mirror):
            where = getattr(mirror, field)
            yield f"the place of {name}.{field} in bytes", where.offset
            yield f"the size of {name}.{field} in bytes", where.size
            yield f"the kind of {name}.{field} (of __builtin_classify_type)", _kind(kind)


def _fields(mirror: type[ctypes.Structure]) -> Iterator[tuple[str, type[ctypes._CData]]]:
    for field in mirror._fields_:
        yield field[0], field[1]


def _kind(kind: type[ctypes._CData]) -> int:
    if issubclass(kind, ctypes.Structure):
        return _STRUCT
    if kind in (ctypes.c_float, ctypes.c_double):
        return _REAL
    return _POINTER if kind is ctypes.c_void_p or issubclass(kind, ctypes.Array) else _INTEGER
