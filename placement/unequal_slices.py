"""Unequal slices: slices of the requested sizes, and environments in proportion to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


def reject_conflicting_counts(counts: Mapping[str, int | None], num_sizes: int) -> None:
    """Reject counts that contradict the sizes: any that is given, but ``num_gmis`` as many as there are sizes.

    Raises:
        PlanError: names the first such count.
    """
    for name, value in counts.items():
        if value is not None and (name, value) != ("num_gmis", num_sizes):
            raise PlanError(
                f"{name}={value} with slices for {counted(num_sizes, 'GMI')}",
                "the slices determine the number and the sizes of the GMIs",
                f"Leave {name} out",
            )


def unequal_core_slices(machine: Machine, sizes: Sequence[float]) -> tuple[list[Slice], str]:
    """One slice per size, in whole cores, placed by ``pack``. Returns the slices and the reason as a clause.

    Raises:
        PlanError: a size is no whole number of cores, or the nodes have too few cores.
    """
    for index, size in enumerate(sizes):
        if int(size) != size or size < 1:
            raise PlanError(
                f"slices={_text(sizes)}",
                f"GMI {index} has {size:g} cores",
                "On the cpu backend, give whole numbers of cores from 1",
            )
    widths = [int(size) for size in sizes]
    places = pack(widths, [len(node.usable_cores) for node in machine.nodes])
    if places is None:
        there = " and ".join(
            f"{counted(len(node.usable_cores), 'core')} on {node.name}" for node in machine.nodes
        )
        raise _too_much(sizes, counted(sum(widths), "core"), "node", there)
    slices: list[Slice] = []
    used = [0] * len(machine.nodes)
    for width, place in zip(widths, places, strict=True):
        node = machine.nodes[place]
        cores = node.usable_cores[used[place] : used[place] + width] if node.pinnable else ()
        slices.append(Slice(node=node.name, backend="cpu", cores=cores, num_threads=width))
        used[place] += width
    return slices, f"{counted(sum(widths), 'core')} split as requested, {_text(sizes)}"


def unequal_gpu_slices(
    machine: Machine, backend: BackendName, sizes: Sequence[float], threads: int | None
) -> tuple[list[Slice], str]:
    """One slice per size, a share of one GPU, placed by ``pack``. A node's cores are divided evenly among its GMIs.

    Raises:
        PlanError: a size is not in (0, 1], or there are too few GPUs or cores.
    """
    whole = round(1 / FRACTION_STEP)
    shares = [int(size / FRACTION_STEP + 1e-9) for size in sizes]
    for index, share in enumerate(shares):
        if not 0 < share <= whole:
            raise PlanError(
                f"slices={_text(sizes)}",
                f"GMI {index} has {sizes[index]:g} of a GPU",
                f"On GPUs, give shares from {FRACTION_STEP:g} to 1",
            )
    gpus = [(node, gpu) for node in machine.nodes for gpu in node.usable_gpus]
    places = pack(shares, [whole] * len(gpus))
    if places is None:
        raise _too_much(sizes, f"{sum(sizes):g} GPUs", "GPU", counted(len(gpus), "GPU"))
    placed = [
        (*gpus[place], round(share * FRACTION_STEP, 4)) for share, place in zip(shares, places, strict=True)
    ]
    slices: dict[int, Slice] = {}
    for node in dict.fromkeys(node.name for node, _, _ in placed):
        here = [index for index, entry in enumerate(placed) if entry[0].name == node]
        cut = gpu_slices_of_node([placed[index] for index in here], backend, threads)
        slices |= zip(here, cut, strict=True)
    reason = f"shares of {counted(len(set(places)), 'GPU')} as requested, {_text(sizes)}"
    return [slices[index] for index in range(len(sizes))], reason


MAX_PACKING_STEPS = 20_000
"""Sizes that ``pack`` places before it gives up, a size that is placed again included. Bin packing is NP-hard."""


def pack(sizes: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    """The index of the room of each size, so that the sizes in a room are no more than it has; None: none was found.

    In order if that fits: each room is filled before the next. Else depth-first, where the first descent is best fit
    decreasing: the largest size first, each in the fullest room that still has enough. Up to ``MAX_PACKING_STEPS`` it finds
    every packing, since rooms with equally much left are alike.
    """
    in_order = _next_fit(sizes, rooms)
    if in_order is not None or sum(sizes) > sum(rooms):
        return in_order
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    free, chosen = list(rooms), list[int]()
    tries = [_fullest_first(free, sizes[order[0]])]
    for _ in range(MAX_PACKING_STEPS):
        room = next(tries[-1], None)
        if room is not None:
            free[room] -= sizes[order[len(chosen)]]
            chosen.append(room)
            if len(chosen) == len(sizes):
                found = dict(zip(order, chosen, strict=True))
                return [found[index] for index in range(len(sizes))]
            tries.append(_fullest_first(free, sizes[order[len(chosen)]]))
            continue
        # No room is left to try for this size: take the one before it back.
        tries.pop()
        if not chosen:
            return None
        last = chosen.pop()
        free[last] += sizes[order[len(chosen)]]
    return None


def _next_fit(sizes: Sequence[int], rooms: Sequence[int]) -> list[int] | None:
    places: list[int] = []
    room, free = 0, rooms[0] if rooms else 0
    for size in sizes:
        while size > free:
            room += 1
            if room >= len(rooms):
                return None
            free = rooms[room]
        places.append(room)
        free -= size
    return places


def _fullest_first(free: Sequence[int], size: int) -> Iterator[int]:
    """Rooms with enough left, the one with the least first; of those with equally much left, the first one."""
    first = {left: room for room, left in reversed(list(enumerate(free))) if left >= size}
    return iter([first[left] for left in sorted(first)])


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


def _too_much(sizes: Sequence[float], wanted: str, device: str, there: str) -> PlanError:
    return PlanError(
        f"slices={_text(sizes)}",
        f"they need {wanted}, each GMI on one {device}; no way to place them was found on {there}",
        f"Ask for less, or for sizes that fill a {device} together",
    )


def _text(sizes: Sequence[float]) -> str:
    return "+".join(f"{size:g}" for size in sizes)
