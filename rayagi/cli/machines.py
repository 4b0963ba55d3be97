"""The machine that a command plans for."""

from __future__ import annotations

import os

from placement.inventory import cluster_machine, local_machine
from placement.types import Machine


def machine_of_run() -> Machine:
    """What `rayagi train` would run on: the cluster at RAY_ADDRESS, else this machine.

    Raises:
        ClusterUnreachableError: no cluster answers there.
        InventoryError: a node could not be read.
    """
    if os.environ.get("RAY_ADDRESS", "local") in ("", "local"):
        return local_machine()
    # Imported here: without a cluster Ray is not needed.
    from rayagi.coordinator.cluster import connected

    with connected():
        return cluster_machine()
