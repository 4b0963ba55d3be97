"""Inventory of the machine on which this process runs."""

from __future__ import annotations

import shutil
import socket
from dataclasses import replace

from placement.inventory.limits import (
    allowed_cores,
    may_configure_mig,
    memory_bytes,
    mps_is_given,
    numa_nodes,
)
from placement.inventory.nvml import read_driver
from placement.types import Machine, Node


def local_machine() -> Machine:
    """One node: the cores, memory and GPUs that this process may use.

    Raises:
        InventoryError: the GPU driver returns an error.
    """
    return Machine(nodes=(local_node(),), origin="local")


def local_node() -> Node:
    """The same as a single node, for the tasks of ``cluster_machine``."""
    cores, pinnable = allowed_cores()
    memory = memory_bytes()
    reading = read_driver(host_memory_bytes=memory)
    instances = [one for gpu in reading.gpus for one in gpu.mig_instances]
    # In a container root may lack the permission: the driver then does not say where an instance is placed.
    may_configure = may_configure_mig() and all(one.start is not None for one in instances)
    gpus = reading.gpus
    if mps_is_given():
        gpus = tuple(replace(gpu, mps_running=True) for gpu in gpus)
    return Node(
        name=socket.gethostname(),
        cores=cores,
        pinnable=pinnable,
        memory_total_bytes=memory,
        gpus=gpus,
        numa_nodes=numa_nodes(),
        gpu_links=reading.gpu_links,
        driver_version=reading.driver_version,
        cuda_version=reading.cuda_version,
        mps_control=shutil.which("nvidia-cuda-mps-control") is not None if reading.gpus else None,
        may_configure_mig=may_configure if reading.gpus else None,
    )
