"""Which machine a command is about."""

from __future__ import annotations

import os

from placement.inventory import cluster_machine, local_machine
from placement.types import Machine


def machine_of_run() -> Machine:
    """What `rayagi train` would run on: the cluster at RAY_ADDRESS, else this machine.

    Raises:
        ClusterUnreachableError: nothing answers there.
        InventoryError: a node could not be read.
    """
    if os.environ.get("RAY_ADDRESS", "local") in ("", "local"):
        return local_machine()
    # Imported here: without a cluster there is no need to wait for Ray.
    from rayagi.coordinator.cluster import connected

    with connected():
        return cluster_machine()
