"""The machine on which this process runs."""

from __future__ import annotations

import socket

from placement.inventory.limits import allowed_cores, memory_bytes
from placement.inventory.nvml import visible_gpus
from placement.types import Machine, Node


def local_machine() -> Machine:
    """One node: the cores, memory and GPUs that this process may use.

    Raises:
        InventoryError: a GPU driver is there and does not answer properly.
    """
    return Machine(nodes=(local_node(),), origin="local")


def local_node() -> Node:
    """The same as a node, as a cluster's tasks report it."""
    cores, pinnable = allowed_cores()
    memory = memory_bytes()
    return Node(
        name=socket.gethostname(),
        cores=cores,
        pinnable=pinnable,
        memory_total_bytes=memory,
        gpus=visible_gpus(host_memory_bytes=memory),
    )
