"""Machines as JSON files: record one where it stands, plan for it anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from placement.errors import InventoryError
from placement.types import Gpu, Machine, Node

SCHEMA = 1
"""Version of the file's layout. Raise it when a field changes its meaning."""

WRITE_ANEW = "Write the file anew with placement.inventory.dump_machine"


def machine_to_dict(machine: Machine) -> dict[str, Any]:
    """The machine as JSON-ready values. ``origin`` is left out: a file's origin is its path."""
    nodes = [asdict(node) for node in machine.nodes]
    return {"schema": SCHEMA, "nodes": nodes}


def dump_machine(machine: Machine, path: str | Path) -> None:
    """Write the machine to a JSON file."""
    Path(path).write_text(json.dumps(machine_to_dict(machine), indent=2) + "\n")


def load_machine(path: str | Path) -> Machine:
    """Read a machine from a JSON file.

    Raises:
        InventoryError: no such file, not JSON, another schema, or a field missing, unknown or of wrong type.
    """
    source = str(path)
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise InventoryError(
            source, f"cannot be read ({error.strerror})", "Give the path of a machine file"
        ) from error
    except ValueError as error:
        raise InventoryError(source, f"is not JSON ({error})", WRITE_ANEW) from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise InventoryError(source, f"has schema {found}, this version reads {SCHEMA}", WRITE_ANEW)
    nodes = content.get("nodes")
    if not isinstance(nodes, list) or not nodes:
        raise InventoryError(source, "has no list of nodes", WRITE_ANEW)
    machine = Machine(
        nodes=tuple(_node(source, f"nodes[{i}]", entry) for i, entry in enumerate(nodes)), origin=source
    )
    names = [node.name for node in machine.nodes]
    if len(set(names)) < len(names):
        raise InventoryError(source, f"has two nodes of one name among {', '.join(names)}", "Rename one")
    return machine


def _node(source: str, where: str, entry: object) -> Node:
    values = _checked(source, where, entry, Node)
    cores = values["cores"]
    if (
        not isinstance(cores, list)
        or any(type(core) is not int or core < 0 for core in cores)
        or len(set(cores)) < len(cores)
    ):
        raise InventoryError(
            source, f"{where}.cores is {cores!r}, not a list of different core ids", WRITE_ANEW
        )
    gpus = values.get("gpus", [])
    if not isinstance(gpus, list):
        raise InventoryError(source, f"{where}.gpus is not a list", WRITE_ANEW)
    values["cores"] = tuple(cores)
    values["gpus"] = tuple(_gpu(source, f"{where}.gpus[{i}]", gpu) for i, gpu in enumerate(gpus))
    return Node(**values)


def _gpu(source: str, where: str, entry: object) -> Gpu:
    values = _checked(source, where, entry, Gpu)
    capability = values.get("compute_capability")
    if capability is not None:
        if not isinstance(capability, list) or [type(part) for part in capability] != [int, int]:
            raise InventoryError(
                source, f"{where}.compute_capability is {capability!r}, not [major, minor]", WRITE_ANEW
            )
        values["compute_capability"] = (capability[0], capability[1])
    return Gpu(**values)


SCALARS: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "uuid": (str,),
    "index": (int,),
    "memory_total_bytes": (int,),
    "memory_free_bytes": (int, type(None)),
    "sm_count": (int, type(None)),
    "pinnable": (bool,),
    "ray_node_id": (str, type(None)),
    "ray_cpus": (int, float, type(None)),
    "ray_gpus": (int, float, type(None)),
}
"""Types of the fields that JSON holds as they are."""


def _checked(source: str, where: str, entry: object, kind: type[Node] | type[Gpu]) -> dict[str, Any]:
    """The entry's values, after its keys and simple types were checked against the dataclass."""
    if not isinstance(entry, dict):
        raise InventoryError(source, f"{where} is not an object", WRITE_ANEW)
    known = {field.name for field in fields(kind)}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise InventoryError(
            source, f"{where} has unknown keys {', '.join(unknown)}", f"Known are {', '.join(sorted(known))}"
        )
    needed = (
        {"name", "cores", "memory_total_bytes"}
        if kind is Node
        else {"index", "uuid", "name", "memory_total_bytes"}
    )
    missing = sorted(needed - set(entry))
    if missing:
        raise InventoryError(source, f"{where} lacks {', '.join(missing)}", WRITE_ANEW)
    for key, value in entry.items():
        if key in SCALARS and type(value) not in SCALARS[key]:
            wanted = " or ".join(one.__name__ for one in SCALARS[key])
            raise InventoryError(source, f"{where}.{key} is {value!r}, not {wanted}", WRITE_ANEW)
    return dict(entry)
