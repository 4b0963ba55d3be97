"""Backend selection: the papers' rule, checked against the machine and the permissions. Pure functions.

GMI-DRL §3.3 and §4.3, and §3.1 of the preprint: MPS for training, since MIG makes the exchange of gradients slow; MIG for
serving, for its isolation; only MPS before compute capability 8.0. Without a GPU: CPU cores.
"""

from __future__ import annotations

from placement.backends import BACKENDS, get_backend
from placement.errors import PlanError
from placement.types import BackendName, Gpu, Machine, Node

BackendCandidate = tuple[BackendName, str]
"""A backend and the reason to choose it."""

MPS_FOR_TRAINING = "mps for training: processes run side by side and exchange gradients freely"
MIG_FOR_SERVING = "mig for serving: its isolation pays where nothing is exchanged"


def choose_backend(
    machine: Machine, asked: str, *, roles: tuple[str, ...], gmis_per_gpu: int
) -> tuple[BackendName, str]:
    """Choose the backend; returns it with the reason as a clause.

    Args:
        machine: inventory of the nodes
        asked: a backend's name, or ``auto``
        roles: all roles of the template; without ``trainer`` and ``program`` it is serving
        gmis_per_gpu: number of GMIs that share one GPU

    Raises:
        PlanError: there is no such backend, or the machine does not allow it.
    """
    if asked != "auto":
        return _requested_backend(machine, get_backend(asked).name)
    if machine.num_gpus == 0:
        return "cpu", "cpu since there is no GPU"
    # If every GPU is in MIG mode, only its instances can be used.
    cut = all(gpu.mig_enabled for _, gpu in _gpus(machine))
    instances: list[BackendCandidate] = [("mig", "mig since the GPUs are in MIG mode")] if cut else []
    plain: BackendCandidate = ("direct", "direct: plain sharing")
    if not {"trainer", "program"} & set(roles):
        return _first_usable(machine, [("mig", MIG_FOR_SERVING), ("mps", "mps for serving"), plain])
    if gmis_per_gpu == 1:
        return _first_usable(machine, [("direct", "direct: each GMI has a GPU to itself"), *instances])
    return _first_usable(machine, [("mps", MPS_FOR_TRAINING), *instances, plain])


def _requested_backend(machine: Machine, name: BackendName) -> tuple[BackendName, str]:
    if name != "cpu":
        if machine.num_gpus == 0:
            raise PlanError(f"backend={name!r}", "there is no GPU", "Use backend='cpu' and num_gmis")
        problem = _unavailable_reason(machine, name)
        if problem is not None:
            raise PlanError(f"backend={name!r}", *problem)
    return name, f"{name} as asked"


def _first_usable(machine: Machine, candidates: list[BackendCandidate]) -> tuple[BackendName, str]:
    """The first candidate that every GPU allows, with the reasons against the ones before it."""
    passed: list[str] = []
    hint = ""
    for name, why in candidates:
        problem = _unavailable_reason(machine, name)
        if problem is None:
            return name, "; ".join([why, *passed])
        hint = problem[1]
        passed.append(f"not {name}, since {problem[0]}")
    raise PlanError("backend='auto'", "; ".join(passed), hint)


def _unavailable_reason(machine: Machine, name: BackendName) -> tuple[str, str] | None:
    """Why the backend is unavailable, and a hint; None if every GPU allows it, since Ray may allocate any of them."""
    for node, gpu in _gpus(machine):
        found = BACKENDS[name].availability(node, gpu)
        if not found.usable:
            return found.reason, found.hint or "Use another backend"
    return None


def _gpus(machine: Machine) -> list[tuple[Node, Gpu]]:
    return [(node, gpu) for node in machine.nodes for gpu in node.usable_gpus]
