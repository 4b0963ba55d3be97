"""Availability of MPS on a GPU, according to the inventory. Pure functions."""

from __future__ import annotations

from placement.backends.base import Availability
from placement.backends.mps_control import INSTALL
from placement.types import Gpu, Node


def mps_availability(node: Node, gpu: Gpu | None) -> Availability:
    """Usable from Volta on, if MPS is installed and no one else uses the GPU exclusively."""
    if gpu is None:
        return Availability(usable=False, reason="there is no GPU", hint="Use backend='cpu' and num_gmis")
    for rule in (_too_old, _control_missing, _in_mig_mode, _gpu_in_use):
        refusal = rule(node, gpu)
        if refusal is not None:
            return Availability(usable=False, reason=refusal[0], hint=refusal[1])
    return Availability(usable=True, reason="no other MPS server uses the GPU")


def _too_old(node: Node, gpu: Gpu) -> tuple[str, str] | None:
    if gpu.compute_capability is not None and gpu.compute_capability < (7, 0):
        version = ".".join(map(str, gpu.compute_capability))
        return f"{gpu.name} has compute capability {version}, and MPS shares need 7.0", "Use backend='direct'"
    return None


def _control_missing(node: Node, gpu: Gpu) -> tuple[str, str] | None:
    if node.mps_control is False:
        return f"node {node.name} has no nvidia-cuda-mps-control on PATH", INSTALL
    return None


def _in_mig_mode(node: Node, gpu: Gpu) -> tuple[str, str] | None:
    if gpu.mig_enabled:
        return (
            f"{gpu.uuid} is in MIG mode",
            f"Use backend='mig', or run `nvidia-smi -i {gpu.uuid} -mig 0` as root",
        )
    return None


def _gpu_in_use(node: Node, gpu: Gpu) -> tuple[str, str] | None:
    if gpu.mps_running:
        hint = (
            "Run `rayagi cleanup` if it was left by a run of yours; else its owner ends it with "
            "`echo quit | nvidia-cuda-mps-control`, or use backend='direct' inside of it"
        )
        return f"an MPS server that this run did not start uses {gpu.uuid}", hint
    if gpu.compute_mode == "prohibited":
        return (
            f"{gpu.uuid} admits no process (compute mode prohibited)",
            f"Run `nvidia-smi -i {gpu.uuid} -c DEFAULT` as root",
        )
    if gpu.compute_mode == "exclusive_process" and gpu.processes:
        pids = ", ".join(str(process.pid) for process in gpu.processes)
        return (
            f"process {pids} uses {gpu.uuid} exclusively (compute mode exclusive_process)",
            "Wait until it has ended",
        )
    return None
