"""Inventory: the hardware of this machine, of a recorded machine, or of a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.inventory.local import local_machine
from placement.inventory.recorded import dump_machine, load_machine, machine_text, machine_to_dict

if TYPE_CHECKING:
    from collections.abc import Callable

    from placement.types import Machine


def cluster_machine(timeout_s: float = 60.0, prepare: Callable[[], None] = lambda: None) -> Machine:
    """The connected Ray cluster; see ``placement.inventory.cluster.cluster_machine``."""
    # Imported here: planning for a recorded machine needs no Ray.
    from placement.inventory import cluster

    return cluster.cluster_machine(timeout_s, prepare)


__all__ = [
    "cluster_machine",
    "dump_machine",
    "load_machine",
    "local_machine",
    "machine_text",
    "machine_to_dict",
]
