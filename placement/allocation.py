"""Allocation: replaces the planned nodes, cores and GPUs of a plan by those that Ray allocated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import fsum

from placement.backends import get_backend
from placement.errors import PlanError, counted
from placement.plan import PlacementPlan, bundle_of
from placement.types import FRACTION_STEP, Gpu, Machine, Node, Share, Slice, core_ranges


def assign_allocated_nodes(
    plan: PlacementPlan, bundle_node_ids: Sequence[str], *, pinned: bool = True
) -> PlacementPlan:
    """Move the GMIs to the nodes of their Ray bundles; slices get new, disjoint cores there.

    Args:
        plan: the plan before reservation
        bundle_node_ids: Ray's node id of each GMI's bundle, in slice order
        pinned: False if other jobs use the nodes too, since two runs would pin to the same first cores. Slices then have
            threads but no cores.

    Raises:
        PlanError: a node is not in the plan's machine, or has too few cores or GPUs.
    """
    nodes = [_node_of(plan.machine, node_id, bundle_node_ids) for node_id in bundle_node_ids]
    if any(gmi_slice.num_cpus is not None for gmi_slice in plan.slices):
        return replace(plan, slices=tuple(_assign_shared_cores(plan, nodes, pinned=pinned)))
    free: dict[str, _FreeNode] = {}
    slices = []
    for index, (gmi_slice, node) in enumerate(zip(plan.slices, nodes, strict=True)):
        if node.name not in free:
            free[node.name] = _FreeNode(node, pinned=pinned)
        slices.append(free[node.name].take(gmi_slice, index))
    return replace(plan, slices=tuple(slices))


def _assign_shared_cores(plan: PlacementPlan, nodes: Sequence[Node], *, pinned: bool) -> list[Slice]:
    """Colocated GMIs stay colocated if planned nodes map one to one to allocated nodes; otherwise no GMI is pinned."""
    moves = {(gmi_slice.node, node.name) for gmi_slice, node in zip(plan.slices, nodes, strict=True)}
    # One to one: each planned node maps to one allocated node, and each allocated node comes from one planned node.
    whole = len(moves) == len({old for old, _ in moves}) == len({new for _, new in moves})
    slices = []
    for gmi_slice, node in zip(plan.slices, nodes, strict=True):
        asked = fsum(
            bundle_of(other)["CPU"] for other, place in zip(plan.slices, nodes, strict=True) if place == node
        )
        have, planned = node.usable_cores, plan.machine.node(gmi_slice.node).usable_cores
        if asked > len(have) + FRACTION_STEP / 2:
            raise PlanError(
                f"{asked:g} cores for {counted(nodes.count(node), 'GMI')} on node {node.name}",
                f"it has {counted(len(have), 'core')}",
                "Ray placed more GMIs there than planned: set num_gmis lower, or plan again",
            )
        places = [planned.index(core) for core in gmi_slice.cores]
        stays = pinned and node.pinnable and whole and max(places, default=-1) < len(have)
        cores = tuple(have[place] for place in places) if stays else ()
        moved = replace(gmi_slice, node=node.name, cores=cores)
        slices.append(replace(moved, environment=get_backend(moved.backend).environment(moved)))
    return slices


def assign_allocated_gpus(plan: PlacementPlan, gpu_ids: Sequence[Sequence[str]]) -> PlacementPlan:
    """Replace the planned GPUs by those that Ray allocated, which may differ.

    Args:
        plan: the plan after ``assign_allocated_nodes``
        gpu_ids: Ray's GPU ids as each GMI reports them, in slice order: indices, or UUIDs of GPUs or MIG instances if Ray
            was started with those in CUDA_VISIBLE_DEVICES

    Raises:
        PlanError: a GMI got no GPU, an unknown one or one that cannot be used, or a GPU is oversubscribed.
    """
    slices = [
        gmi_slice
        if gmi_slice.gpu_uuid is None
        else replace(gmi_slice, gpu_uuid=_allocated_gpu(plan, index, gmi_slice, ids).uuid)
        for index, (gmi_slice, ids) in enumerate(zip(plan.slices, gpu_ids, strict=True))
    ]
    for (node, gpu_uuid), sizes in shares_per_gpu(slices).items():
        if fsum(sizes) > 1 + FRACTION_STEP / 2:
            raise PlanError(
                f"shares {', '.join(f'{size:g}' for size in sizes)} of {gpu_uuid} on node {node}",
                "Ray gave more of it than there is",
                "Start Ray with as many GPUs as the node has",
            )
    return replace(plan, slices=tuple(slices))


def assign_moved(plan: PlacementPlan, index: int, node_id: str, gpu_ids: Sequence[str] = ()) -> PlacementPlan:
    """The plan with GMI ``index`` where Ray has started it again; unchanged if that is its node.

    On another node it has as many threads, and no cores of its own: GMIs of this run or of others may be pinned to any.

    Args:
        plan: the plan of the running GMIs
        index: the GMI
        node_id: Ray's id of the node that it is on
        gpu_ids: Ray's GPU ids there, as for ``assign_allocated_gpus``

    Raises:
        PlanError: the node is not in the plan's machine, the GMI got no GPU that can be used, or GPUs are partitioned.
    """
    old = plan.slices[index]
    if plan.machine.node(old.node).ray_node_id in (None, node_id):
        return plan
    node, backend = _node_of(plan.machine, node_id, [node_id]), get_backend(plan.backend)
    if backend.changes_host:
        raise PlanError(
            f"a share of a GPU for GMI {index} on node {node.name}",
            f"the run began on other nodes, and {plan.backend} partitions GPUs before that",
            "Resume the run, which plans anew",
        )
    new = replace(old, node=node.name, cores=())
    if old.gpu_uuid is not None:
        gpu = _allocated_gpu(plan, index, new, gpu_ids)
        (limits,) = backend.predict_limits(node, gpu, [old.gpu_fraction])
        share = Share(kind=plan.backend, gpu_uuid=gpu.uuid, sm_count=limits.sm_count)
        new = replace(new, gpu_uuid=gpu.uuid, share=share)
    new = replace(new, environment=backend.environment(new))
    return replace(plan, slices=(*plan.slices[:index], new, *plan.slices[index + 1 :]))


def shares_per_gpu(slices: Iterable[Slice]) -> dict[tuple[str, str], list[float]]:
    """(node, GPU) -> the fractions of the slices on it, in slice order."""
    shares: dict[tuple[str, str], list[float]] = {}
    for gmi_slice in slices:
        if gmi_slice.gpu_uuid is not None:
            shares.setdefault((gmi_slice.node, gmi_slice.gpu_uuid), []).append(gmi_slice.gpu_fraction)
    return shares


def _allocated_gpu(plan: PlacementPlan, index: int, gmi_slice: Slice, ids: Sequence[str]) -> Gpu:
    gpus = plan.machine.node(gmi_slice.node).gpus
    found = next((gpu for gpu in gpus for given in ids[:1] if gpu.is_called(given)), None)
    if found is None:
        known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
        raise PlanError(
            f"a GPU for GMI {index} on node {gmi_slice.node}",
            f"Ray gave {', '.join(ids) or 'none'}, and the inventory has {known}",
            "Start Ray with GPUs that exist, and plan again",
        )
    for unused in plan.unused:
        if unused.uuid == found.uuid:
            raise PlanError(
                f"a GPU for GMI {index} on node {gmi_slice.node}",
                f"Ray gave GPU {unused.index}, which cannot be used: {unused.reason}",
                "Start Ray with CUDA_VISIBLE_DEVICES set to the other GPUs",
            )
    return found


def _node_of(machine: Machine, node_id: str, all_ids: Sequence[str]) -> Node:
    for node in machine.nodes:
        if node.ray_node_id == node_id:
            return node
    # A machine read without Ray has no ids: if Ray used a single node, it is the machine's single node.
    if len(machine.nodes) == 1 and machine.nodes[0].ray_node_id is None and len(set(all_ids)) == 1:
        return machine.nodes[0]
    known = ", ".join(f"{node.name} ({node.ray_node_id or 'not from Ray'})" for node in machine.nodes)
    raise PlanError(
        f"a GMI on Ray node {node_id}",
        f"the plan's machine has {known}",
        "Plan again from placement.inventory.cluster_machine()",
    )


class _FreeNode:
    """Unallocated cores and GPU shares of one node."""

    def __init__(self, node: Node, *, pinned: bool) -> None:
        self._node = node
        self._pinned = pinned and node.pinnable
        self._cores = list(node.usable_cores)
        self._gpus = {gpu.uuid: 1.0 for gpu in node.usable_gpus}

    def take(self, gmi_slice: Slice, index: int) -> Slice:
        """Allocate the slice on this node and return it."""
        moved = replace(
            gmi_slice,
            node=self._node.name,
            cores=self._take_cores(gmi_slice, index),
            gpu_uuid=self._take_gpu(gmi_slice, index),
        )
        return replace(moved, environment=get_backend(moved.backend).environment(moved))

    def _take_cores(self, gmi_slice: Slice, index: int) -> tuple[int, ...]:
        if len(self._cores) < gmi_slice.num_threads:
            raise PlanError(
                f"{counted(gmi_slice.num_threads, 'core')} for GMI {index} on node {self._node.name}",
                f"{len(self._cores)} of {core_ranges(self._node.usable_cores) or 'no cores'} are left",
                "Ray placed more GMIs there than planned: set threads_per_gmi lower, or plan again",
            )
        # The planned cores first, as with GPUs below: cores of GMIs that were left out stay unused.
        planned = gmi_slice.cores if gmi_slice.node == self._node.name else ()
        free = planned and set(planned) <= set(self._cores)
        taken = planned if free else tuple(self._cores[: gmi_slice.num_threads])
        self._cores = [core for core in self._cores if core not in taken]
        return taken if self._pinned else ()

    def _take_gpu(self, gmi_slice: Slice, index: int) -> str | None:
        if gmi_slice.gpu_uuid is None:
            return None
        # The planned GPU first, so that a plan stays unchanged if Ray allocated it as planned.
        for uuid in sorted(self._gpus, key=lambda uuid: uuid != gmi_slice.gpu_uuid):
            # Sums of fractions like 0.05 miss 1 by a rounding error.
            if self._gpus[uuid] >= gmi_slice.gpu_fraction - FRACTION_STEP / 2:
                self._gpus[uuid] -= gmi_slice.gpu_fraction
                return uuid
        raise PlanError(
            f"{gmi_slice.gpu_fraction:g} of a GPU for GMI {index} on node {self._node.name}",
            f"it has {counted(len(self._gpus), 'GPU')}, all taken",
            "Ray placed more GMIs there than planned: plan again",
        )
