"""Unequal slices: slices of the requested sizes, and environments in proportion to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor
from typing import TypeVar

from placement.errors import PlanError, counted
from placement.types import FRACTION_STEP, BackendName, Gpu, Machine, Node, Slice

_T = TypeVar("_T")


def without(items: Sequence[_T], left_out: Sequence[int]) -> tuple[_T, ...]:
    """The items whose index is not in ``left_out``."""
    return tuple(item for index, item in enumerate(items) if index not in left_out)


def env_counts(
    num_envs: int, num_gmis: int, sizes: Sequence[float], left_out: Sequence[int] = ()
) -> tuple[int, ...]:
    """Environments of each GMI: ``num_envs`` each, or ``num_envs * num_gmis`` in total in proportion to ``sizes``.

    Rounds by largest remainder, the earlier GMI on a tie. Every GMI gets at least one. Those in ``left_out`` count for the
    total and are dropped from the result, so that the others have as many with and without them.
    """
    return without(_in_proportion(num_envs * num_gmis, sizes) if sizes else [num_envs] * num_gmis, left_out)


def _in_proportion(total: int, sizes: Sequence[float]) -> list[int]:
    quotas = [total * size / sum(sizes) for size in sizes]
    counts = [floor(quota) for quota in quotas]
    # Largest remainder: the GMIs with the largest fractional parts get one more.
    by_remainder = sorted(range(len(sizes)), key=lambda i: (counts[i] - quotas[i], i))
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return counts


def reject_conflicting_counts(counts: Mapping[str, int | None], num_sizes: int, *, on_cores: bool) -> None:
    """Reject counts that contradict the sizes.

    Raises:
        PlanError: names the first such count.
    """
    others = {"num_gmis": num_sizes, "gmis_per_gpu": None}
    for name, agreeing in (others | {"threads_per_gmi": None} if on_cores else others).items():
        if counts[name] not in (None, agreeing):
            raise PlanError(
                f"{name}={counts[name]} with slices for {counted(num_sizes, 'GMI')}",
                "the slices determine the number and the sizes of the GMIs",
                f"Leave {name} out",
            )


def unequal_core_slices(machine: Machine, sizes: Sequence[float]) -> tuple[list[Slice], str]:
    """One slice per size, in whole cores; nodes are filled in order. Returns the slices and the reason as a clause.

    Raises:
        PlanError: a size is no whole number of cores, or the nodes have too few cores.
    """
    slices: list[Slice] = []
    nodes = iter(machine.nodes)
    node: Node | None = None
    used = 0
    for index, size in enumerate(sizes):
        width = int(size)
        if width != size or width < 1:
            raise PlanError(
                f"slices={_text(sizes)}",
                f"GMI {index} has {size:g} cores",
                "On the cpu backend, give whole numbers of cores from 1",
            )
        while node is None or used + width > len(node.usable_cores):
            node, used = next(nodes, None), 0
            if node is None:
                raise _too_much(sizes, index, f"{counted(width, 'core')}", _cores_text(machine))
        cores = node.usable_cores[used : used + width] if node.pinnable else ()
        slices.append(Slice(node=node.name, backend="cpu", cores=cores, num_threads=width))
        used += width
    return slices, f"{counted(int(sum(sizes)), 'core')} split as requested, {_text(sizes)}"


def unequal_gpu_slices(
    machine: Machine, backend: BackendName, sizes: Sequence[float], threads: int | None
) -> tuple[list[Slice], str]:
    """One slice per size, a share of one GPU; GPUs are filled in order. A node's cores are divided evenly among its GMIs.

    Raises:
        PlanError: a size is not in (0, 1], or there are too few GPUs or cores.
    """
    placed: list[tuple[Node, Gpu, float]] = []
    gpus = ((node, gpu) for node in machine.nodes for gpu in node.usable_gpus)
    place: tuple[Node, Gpu] | None = None
    free = 0.0
    for index, size in enumerate(sizes):
        share = int(size / FRACTION_STEP + 1e-9) * FRACTION_STEP
        if not 0 < share <= 1:
            raise PlanError(
                f"slices={_text(sizes)}",
                f"GMI {index} has {size:g} of a GPU",
                f"On GPUs, give shares from {FRACTION_STEP:g} to 1",
            )
        while place is None or free < share - FRACTION_STEP / 2:
            place, free = next(gpus, None), 1.0
            if place is None:
                raise _too_much(sizes, index, f"{size:g} of a GPU", counted(machine.num_gpus, "GPU"))
        placed.append((*place, round(share, 4)))
        free -= share
    slices: list[Slice] = []
    for node in dict.fromkeys(node.name for node, _, _ in placed):
        slices += gpu_slices_of_node([entry for entry in placed if entry[0].name == node], backend, threads)
    return (
        slices,
        f"shares of {counted(len({gpu.uuid for _, gpu, _ in placed}), 'GPU')} as requested, {_text(sizes)}",
    )


def gpu_slices_of_node(
    placed: Sequence[tuple[Node, Gpu, float]], backend: BackendName, threads: int | None
) -> list[Slice]:
    """The slices of one node, with equal numbers of its cores; ``placed``: node, GPU and share of each.

    Raises:
        PlanError: the node has too few cores.
    """
    if not placed:
        return []
    node, count = placed[0][0], len(placed)
    cores = len(node.usable_cores)
    width = threads or cores // count
    if width == 0 or width * count > cores:
        each = max(width, 1)
        raise PlanError(
            f"{counted(count, 'GMI')} of {counted(each, 'core')} each on node {node.name}",
            f"it has {counted(cores, 'core')}",
            f"Use at most {cores // each} GMIs on the node"
            if cores >= each
            else f"Set threads_per_gmi to {cores} or less",
        )
    return [
        Slice(
            node=node.name,
            backend=backend,
            cores=node.usable_cores[index * width : (index + 1) * width] if node.pinnable else (),
            num_threads=width,
            gpu_uuid=gpu.uuid,
            gpu_fraction=share,
        )
        for index, (_, gpu, share) in enumerate(placed)
    ]


def _too_much(sizes: Sequence[float], index: int, wanted: str, limit: str) -> PlanError:
    return PlanError(
        f"slices={_text(sizes)}",
        f"GMI {index} needs {wanted}; too little is left of {limit}, filled in order",
        "Ask for less, or put the large ones first",
    )


def _cores_text(machine: Machine) -> str:
    return " and ".join(f"{counted(len(node.usable_cores), 'core')} on {node.name}" for node in machine.nodes)


def _text(sizes: Sequence[float]) -> str:
    return "+".join(f"{size:g}" for size in sizes)
