"""Recorded machines: writes an inventory to a JSON file and reads it, to plan for the machine elsewhere."""

from __future__ import annotations

import json
import math
import types
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from placement.errors import InventoryError
from placement.types import Machine, Node

T = TypeVar("T")
SCHEMA = 1
"""Version of the file's layout. Increase it when a field changes its meaning. A new field with a default needs no new
version: older files keep their meaning."""

REWRITE_HINT = "Rewrite the file with `rayagi info --json FILE`"


def machine_to_dict(machine: Machine) -> dict[str, Any]:
    """The machine as JSON-ready values. ``origin`` is left out: a file's origin is its path."""
    nodes = [asdict(node) for node in machine.nodes]
    return {"schema": SCHEMA, "nodes": nodes}


def machine_text(machine: Machine) -> str:
    """The machine as the text of a JSON file."""
    return pretty(json.loads(json.dumps(machine_to_dict(machine)))) + "\n"


def dump_machine(machine: Machine, path: str | Path) -> None:
    """Write the machine to a JSON file.

    Raises:
        InventoryError: the file cannot be written.
    """
    try:
        Path(path).write_text(machine_text(machine))
    except OSError as error:
        raise InventoryError(
            str(path), f"cannot be written ({error.strerror})", "Give a path in a folder that exists"
        ) from error


def load_machine(path: str | Path) -> Machine:
    """Read a machine from a JSON file.

    Raises:
        InventoryError: the file does not exist, is not JSON, has another schema, or a field is missing, unknown or invalid.
    """
    source = str(path)
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise InventoryError(
            source, f"cannot be read ({error.strerror})", "Give the path of a machine file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InventoryError(source, f"is not JSON ({error})", REWRITE_HINT) from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise InventoryError(source, f"has schema {found}, this version reads {SCHEMA}", REWRITE_HINT)
    entries = content.get("nodes")
    if not isinstance(entries, list) or not entries:
        raise InventoryError(source, "has no list of nodes", REWRITE_HINT)
    try:
        nodes = tuple(decode(Node, entry, f"nodes[{i}]") for i, entry in enumerate(entries))
        for i, node in enumerate(nodes):
            _check(node, f"nodes[{i}]")
    except DecodingError as error:
        raise InventoryError(source, str(error), REWRITE_HINT) from error
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        raise InventoryError(source, f"has two nodes of one name among {', '.join(names)}", "Rename one")
    return Machine(nodes=nodes, origin=source)


def _check(node: Node, where: str) -> None:
    """Constraints beyond the field types."""
    if any(core < 0 for core in node.cores) or len(set(node.cores)) < len(node.cores):
        raise DecodingError(f"{where}.cores is {list(node.cores)!r}, not a list of different core ids")
    for name, granted in (("ray_cpus", node.ray_cpus), ("ray_gpus", node.ray_gpus)):
        if granted is not None and not 0 <= granted < math.inf:  # NaN neither
            raise DecodingError(f"{where}.{name} is {granted!r}, not a finite number of at least 0")
    uuids = [gpu.uuid for gpu in node.gpus]
    if len(set(uuids)) < len(uuids):
        raise DecodingError(f"{where}.gpus has two of one uuid among {', '.join(uuids)}")
    strangers = {uuid for link in node.gpu_links for uuid in link.gpus} - set(uuids)
    if strangers:
        raise DecodingError(
            f"{where}.gpu_links names GPUs that are not in it: {', '.join(sorted(strangers))}"
        )


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
