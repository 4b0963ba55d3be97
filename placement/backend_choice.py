"""Backend selection: the papers' rule, checked against the machine and the permissions. Pure functions.

GMI-DRL §3.3 and §4.3, and §3.1 of the preprint: MPS for training, since MIG makes the exchange of gradients slow; MIG for
serving, for its isolation; only MPS before compute capability 8.0. Without a GPU: CPU cores.

GPUs that the chosen backend cannot use are left out of the plan, each with the reason. ``auto`` takes the backend that can
use the most of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from placement.backends import BACKENDS, get_backend
from placement.errors import PlanError
from placement.types import BackendName, Gpu, Machine, Node

BackendCandidate = tuple[BackendName, str]
"""A backend and the reason to choose it."""

MPS_FOR_TRAINING = "mps for training: processes run side by side and exchange gradients freely"
MIG_FOR_SERVING = "mig for serving: its isolation pays where nothing is exchanged"
MIN_FREE_SHARE = 0.1
"""Least free share of a GPU's memory with which it is used: others' processes that hold more are busy on it."""
MIN_SIZE = 0.25
"""Least part of the largest GPU's SMs with which `auto` uses another one beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnusedGpu:
    """A GPU that a plan leaves out."""

    node: str
    index: int
    uuid: str
    reason: str
    """As a clause."""
    hint: str
    """What the user can do."""

    def text(self) -> str:
        """One line for plans and messages."""
        return f"Without GPU {self.index} of {self.node}: {self.reason}. {self.hint}."


def unused_gpu(node: Node, gpu: Gpu, reason: str, hint: str) -> UnusedGpu:
    """A GPU of a node that a plan leaves out."""
    return UnusedGpu(node=node.name, index=gpu.index, uuid=gpu.uuid, reason=reason, hint=hint)


def without_gpus(machine: Machine, unused: Collection[UnusedGpu]) -> Machine:
    """The machine without these GPUs."""
    gone = {gpu.uuid for gpu in unused}
    nodes = []
    for node in machine.nodes:
        kept = tuple(gpu for gpu in node.usable_gpus if gpu.uuid not in gone)
        nodes.append(replace(node, gpus=kept, ray_gpus=None if node.ray_gpus is None else float(len(kept))))
    return replace(machine, nodes=tuple(nodes))


def choose_backend(
    machine: Machine, asked: str, *, roles: tuple[str, ...], gmis_per_gpu: int
) -> tuple[BackendName, str, tuple[UnusedGpu, ...]]:
    """Choose the backend; returns it with the reason as a clause, and the GPUs that it cannot use.

    Args:
        machine: inventory of the nodes
        asked: a backend's name, or ``auto``
        roles: all roles of the template; without ``trainer`` and ``program`` it is serving
        gmis_per_gpu: number of GMIs that share one GPU

    Raises:
        PlanError: there is no such backend, or no GPU of the machine allows it.
    """
    name = asked if asked == "auto" else get_backend(asked).name
    if name == "cpu":
        return name, "cpu as asked", ()
    if machine.num_gpus == 0:
        if name == "auto":
            return "cpu", "cpu since there is no GPU", ()
        raise PlanError(f"backend={name!r}", "there is no GPU", "Use backend='cpu' and num_gmis")
    if name != "auto":
        return _most_usable(machine, [(name, f"{name} as asked")], asked)
    # In MIG mode, only a GPU's instances can be used.
    cut = any(gpu.mig_enabled for _, gpu in _gpus(machine))
    instances: list[BackendCandidate] = [("mig", "mig since GPUs are in MIG mode")] if cut else []
    plain: BackendCandidate = ("direct", "direct: plain sharing")
    if not {"trainer", "program"} & set(roles):
        candidates = [("mig", MIG_FOR_SERVING), ("mps", "mps for serving"), plain]
    elif gmis_per_gpu == 1:
        candidates = [("direct", "direct: each GMI has a GPU to itself"), *instances]
    else:
        candidates = [("mps", MPS_FOR_TRAINING), *instances, plain]
    best, why, unused = _most_usable(machine, candidates, asked)
    return best, why, unused or _much_smaller(machine)


def _much_smaller(machine: Machine) -> tuple[UnusedGpu, ...]:
    """GPUs that would keep the others waiting, such as one that a workstation has for its display."""
    counts = {gpu.uuid: gpu.sm_count for _, gpu in _gpus(machine) if not gpu.uuid.startswith("MIG-")}
    most = max((count or 0 for count in counts.values()), default=0)
    return tuple(
        unused_gpu(
            node,
            gpu,
            f"it has {gpu.sm_count} SMs, another one {most}, and GMIs wait for the slowest",
            "To use it, set CUDA_VISIBLE_DEVICES to GPUs of its size",
        )
        for node, gpu in _gpus(machine)
        if (counts.get(gpu.uuid) or most) < MIN_SIZE * most
    )


def _most_usable(
    machine: Machine, candidates: list[BackendCandidate], asked: str
) -> tuple[BackendName, str, tuple[UnusedGpu, ...]]:
    """The candidate that the most GPUs allow, the first one if equally many do; the reasons against those before it."""
    refused = {
        name: [found for node, gpu in _gpus(machine) if (found := _refusal(name, node, gpu)) is not None]
        for name, _ in candidates
    }
    best, why = min(candidates, key=lambda candidate: len(refused[candidate[0]]))
    if len(refused[best]) == machine.num_gpus:
        firsts = [(name, refused[name][0]) for name, _ in candidates]
        limit = "; ".join(f"not {name}, since {first.reason}" for name, first in firsts)
        last = firsts[-1][1]
        if asked != "auto":
            raise PlanError(f"backend={asked!r}", last.reason, last.hint)
        raise PlanError(f"backend={asked!r}", limit, f"{last.hint}, or use backend='cpu'")
    passed = []
    for name, _ in candidates[: candidates.index((best, why))]:
        # What keeps it from GPUs that the chosen one can use.
        own = next(one for one in refused[name] if one.uuid not in {each.uuid for each in refused[best]})
        passed.append(f"not {name}, since {own.reason}")
    return best, "; ".join([why, *passed]), tuple(refused[best])


def _refusal(name: BackendName, node: Node, gpu: Gpu) -> UnusedGpu | None:
    """Why a backend cannot use a GPU; None if it can."""
    found = BACKENDS[name].availability(node, gpu)
    problem = None if found.usable else (found.reason, found.hint or "Use another backend")
    if problem is None and gpu.available_bytes < MIN_FREE_SHARE * gpu.memory_total_bytes:
        sizes = f"{gpu.available_bytes / 2**30:.1f} of {gpu.memory_total_bytes / 2**30:.1f} GiB"
        pids = ", ".join(str(process.pid) for process in gpu.processes)
        users = f" (process {pids})" if pids else ""
        problem = f"others use its memory{users}, {sizes} are free", "Wait until they have ended"
    return None if problem is None else unused_gpu(node, gpu, *problem)


def _gpus(machine: Machine) -> list[tuple[Node, Gpu]]:
    return [(node, gpu) for node in machine.nodes for gpu in node.usable_gpus]
