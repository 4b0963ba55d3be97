"""Recorded machines: writes an inventory to a JSON file and reads it, to plan for the machine elsewhere."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from placement.errors import InventoryError
from placement.inventory.decoding import DecodingError, decode, pretty
from placement.types import Machine, Node

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
    uuids = [gpu.uuid for gpu in node.gpus]
    if len(set(uuids)) < len(uuids):
        raise DecodingError(f"{where}.gpus has two of one uuid among {', '.join(uuids)}")
    strangers = {uuid for link in node.gpu_links for uuid in link.gpus} - set(uuids)
    if strangers:
        raise DecodingError(
            f"{where}.gpu_links names GPUs that are not in it: {', '.join(sorted(strangers))}"
        )
