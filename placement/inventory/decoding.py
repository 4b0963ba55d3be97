"""JSON decoding to frozen dataclasses, with the field types as schema; and compact pretty-printing."""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

LINE_WIDTH = 110
"""Values up to this width are written on one line, and lists of scalars always."""


class DecodingError(ValueError):
    """A value that does not match its field's type; the message names its place in the file."""


def decode(kind: type[T], value: object, where: str) -> T:
    """An instance of a dataclass from JSON-ready values.

    Args:
        kind: the dataclass; its fields may be scalars, literals, unions, tuples and other dataclasses
        value: the parsed JSON value
        where: its place in the file, for messages

    Raises:
        DecodingError: a field is missing, unknown or of another type.
    """
    if not isinstance(value, dict):
        raise DecodingError(f"{where} is not an object")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise DecodingError(
            f"{where} has unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    needed = {
        name for name, field in known.items() if field.default is MISSING and field.default_factory is MISSING
    }
    missing = sorted(needed - set(value))
    if missing:
        raise DecodingError(f"{where} lacks {', '.join(missing)}")
    hints = get_type_hints(kind)
    return kind(**{key: _decode(hints[key], one, f"{where}.{key}") for key, one in value.items()})


def _decode(hint: Any, value: object, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _decode_optional(hint, value, where)
    if origin is tuple:
        return _decode_tuple(hint, value, where)
    if is_dataclass(hint):
        return decode(hint, value, where)  # type: ignore[arg-type]
    # A float field also accepts an int, but no field accepts a bool as a number.
    fitting = (float, int) if hint is float else (hint,)
    fits = value in get_args(hint) if origin is Literal else type(value) in fitting
    if not fits:
        raise DecodingError(f"{where} is {value!r}, not {_text(hint)}")
    return value


def _decode_optional(hint: Any, value: object, where: str) -> Any:
    if value is None:
        return None
    (inner,) = (one for one in get_args(hint) if one is not type(None))
    try:
        return _decode(inner, value, where)
    except DecodingError as error:
        raise DecodingError(f"{error} or null") from None


def _decode_tuple(hint: Any, value: object, where: str) -> tuple[Any, ...]:
    inner = get_args(hint)
    if not isinstance(value, list):
        raise DecodingError(f"{where} is {value!r}, not {_text(hint)}")
    if inner[-1] is Ellipsis:
        return tuple(_decode(inner[0], one, f"{where}[{i}]") for i, one in enumerate(value))
    if len(value) != len(inner):
        raise DecodingError(f"{where} is {value!r}, not {_text(hint)}")
    pairs = zip(inner, value, strict=True)
    return tuple(_decode(one, part, f"{where}[{i}]") for i, (one, part) in enumerate(pairs))


def _text(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        return "a list" if inner[-1] is Ellipsis else f"a list of {len(inner)}"
    return str(hint.__name__)


def pretty(value: Any, indent: str = "") -> str:
    """JSON text, indented by 2; values that fit are on one line, and lists of scalars always."""
    line = json.dumps(value)
    plain = not isinstance(value, dict | list) or (
        isinstance(value, list) and not any(isinstance(one, dict | list) for one in value)
    )
    if plain or (indent and len(indent) + len(line) <= LINE_WIDTH):
        return line
    deeper = indent + "  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {pretty(one, deeper)}" for key, one in value.items()]
        opening, closing = "{", "}"
    else:
        parts, opening, closing = [pretty(one, deeper) for one in value], "[", "]"
    body = ",\n".join(deeper + part for part in parts)
    return f"{opening}\n{body}\n{indent}{closing}"
