"""Compositions of primitives into an all-reduce for a layout (GMI-DRL §3.2.1, Figure 7; the preprint §4.1, Figure 4).

All are trees of levels. On each level disjoint groups reduce to their first member, the leader, which goes on to the next
level. The top level, one group, all-reduces. The levels then broadcast back in reverse order; the papers' figures omit
this final broadcast. Hosts are the outermost level: one leader per host reduces by ``net``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from collectives.errors import CompositionError
from collectives.layout import Layout
from collectives.schedule import CollectiveSchedule, Primitive, Step, ranks_text

Groups = Sequence[tuple[int, ...]]
Devices = tuple[tuple[int, ...], ...]
"""Ranks of each device of one node."""


def ip_only(layout: Layout) -> CollectiveSchedule:
    """All GMIs of a host in one step through shared memory (Figure 7a). Applies to every layout."""
    return _tree("ip_only", layout, ("ip", layout.hosts))


def rp_only(layout: Layout) -> CollectiveSchedule:
    """m rings over the devices, then one more ring across, over one GMI of each ring (Figure 7b).

    With unequal devices, ring j runs over the devices that have a j-th GMI.

    Raises:
        CompositionError: the ring across would hold two GMIs of one device: m > n in a host, where devices are equal.
    """
    # Level 1: ring j over the j-th GMI of each device reduces to its root.
    rings = [_rings(node) for node in layout.nodes]
    # Level 2: a ring over the m roots, all on different devices of the host.
    roots = [
        _distinct_roots("rp_only", layout, node, ring) for node, ring in zip(layout.nodes, rings, strict=True)
    ]
    led = [_led(ring, root) for ring, root in zip(chain(*rings), chain(*roots), strict=True)]
    return _tree("rp_only", layout, ("rp", led), ("rp", roots))


def hybrid(layout: Layout, k: int) -> CollectiveSchedule:
    """k GMIs per device reduce in k rings; the ring roots and all other GMIs by shared memory (Figure 7c).

    The second step has n(m - k) + k members, as in the paper's cost. ``k`` = 0 is ``ip_only``. A device with fewer
    than k GMIs has them all in rings.

    Raises:
        CompositionError: k is not in 0..m, or no host has two devices to make a ring of.
    """
    name = f"hybrid({k})"
    most = max(map(len, layout.devices))
    if not 0 <= k <= most:
        raise CompositionError(name, str(layout), f"k must be in 0..{most}, the number of GMIs on one device")
    if k and max(map(len, layout.nodes)) == 1:
        raise CompositionError(name, str(layout), "a ring needs at least two devices in a host")
    led: list[tuple[int, ...]] = []
    by_memory: list[tuple[int, ...]] = []
    for node in layout.nodes:
        # Level 1: k rings. Their roots rotate over the devices, so that no device copies all of them to the host.
        rings = [_led(ring, ring[j % len(ring)]) for j, ring in enumerate(_rings(node)[:k])]
        # Level 2: shared memory among the k roots and the n(m - k) GMIs outside of the rings.
        rest = [rank for device in node for rank in device[k:]]
        led += rings
        by_memory.append(tuple(sorted([*(ring[0] for ring in rings), *rest])))
    return _tree(name, layout, ("rp", led), ("ip", by_memory))


def har(layout: Layout) -> CollectiveSchedule:
    """Shared memory inside each device, then a ring over one leader per device (preprint, Figure 4c).

    The leader is the device's first GMI. With M GMIs on each device, numbered device after device, this is the preprint's
    rule GMI_id % M == t for t = 0; it also applies to unequal devices, where M is undefined.
    """
    return _hierarchical("har", layout, "ip", "rp")


def device_rp(layout: Layout) -> CollectiveSchedule:
    """``device`` inside each device, then a ring over the leaders (beyond the papers: no copy through the host).

    Raises:
        CompositionError: no device has two GMIs.
    """
    return _on_device("device_rp", layout, "rp")


def device_ip(layout: Layout) -> CollectiveSchedule:
    """``device`` inside each device, then shared memory among the leaders (beyond the papers).

    Raises:
        CompositionError: no device has two GMIs.
    """
    return _on_device("device_ip", layout, "ip")


def mpr(layout: Layout) -> CollectiveSchedule:
    """The preprint's Multi-Process Reduction (Figure 4a): the steps of ``ip_only``."""
    return replace(ip_only(layout), composition="mpr")


def mrr(layout: Layout) -> CollectiveSchedule:
    """The preprint's Multi-Ring Reduction (Figure 4b): the steps of ``rp_only``, on equal devices only.

    Raises:
        CompositionError: devices hold different numbers of GMIs, or more than there are devices in a host.
    """
    if layout.m is None:
        raise CompositionError("mrr", str(layout), "it needs the same number of GMIs on every device")
    try:
        return replace(rp_only(layout), composition="mrr")
    except CompositionError as error:
        raise CompositionError("mrr", str(layout), error.reason) from None


def select_preprint(mpl: Sequence[Sequence[int]]) -> str:
    """Algorithm 1 of the preprint, line by line: ``mpr``, ``mrr`` or ``har`` for a GMI-to-GPU mapping list."""
    gmis_per_gpu = set()
    if len(mpl) <= 1:  # all GMIs are on one GPU
        return "mpr"
    for gmi_list in mpl:
        gmis_per_gpu.add(len(gmi_list))
    if len(gmis_per_gpu) > 1:  # GPUs have different numbers of GMIs
        return "har"
    if gmis_per_gpu.pop() > len(mpl):  # more GMIs on a GPU than there are GPUs
        return "har"
    return "mrr"


def preprint(layout: Layout) -> CollectiveSchedule:
    """The schedule that the preprint's Algorithm 1 selects for this layout.

    Raises:
        CompositionError: the selected composition does not apply to this layout.
    """
    return compose(select_preprint(layout.mpl), layout)


def composition_names(layout: Layout) -> tuple[str, ...]:
    """Names of the compositions to try on ``layout``, whether they apply or not.

    Omitted are those with the steps of another one: mpr, mrr, hybrid(0), and hybrid(k) where no host has two devices with
    k GMIs.
    """
    most = max(sorted((0, *map(len, node)))[-2] for node in layout.nodes)
    return (
        "ip_only",
        "rp_only",
        *(f"hybrid({k})" for k in range(1, most + 1)),
        "har",
        "device_rp",
        "device_ip",
    )


def compose(name: str, layout: Layout) -> CollectiveSchedule:
    """The schedule of the composition of that name, e.g. ``ip_only`` or ``hybrid(2)``; ``hybrid:2`` needs no shell quotes.

    Raises:
        CompositionError: unknown name, or the composition does not apply to the layout.
    """
    found = _HYBRID.fullmatch(name)
    if found is not None:
        return hybrid(layout, int(found[1] or found[2]))
    if not is_composition_name(name):
        raise CompositionError(name, str(layout), f"there is no such composition; there are {KNOWN_NAMES}")
    return _BY_NAME[name](layout)


def is_composition_name(text: str) -> bool:
    """Whether this is the name of a composition, whether or not it applies to any layout."""
    return text in _BY_NAME or _HYBRID.fullmatch(text) is not None


_BY_NAME = {
    "ip_only": ip_only,
    "rp_only": rp_only,
    "har": har,
    "device_rp": device_rp,
    "device_ip": device_ip,
    "mpr": mpr,
    "mrr": mrr,
    "preprint": preprint,
}
_HYBRID = re.compile(r"hybrid(?:\((\d{1,5})\)|:(\d{1,5}))")

KNOWN_NAMES = ", ".join([*_BY_NAME, "hybrid(K)"])
"""For error messages."""


def _tree(name: str, layout: Layout, *levels: tuple[Primitive, Groups]) -> CollectiveSchedule:
    """Reduce level by level, all-reduce on the top one, broadcast back. The last of ``levels`` has a group per host."""
    # The outermost level: one leader per host, by net.
    leaders = tuple(group[0] for group in levels[-1][1])
    full: list[tuple[Primitive, tuple[tuple[int, ...], ...]]] = []
    for primitive, groups in (*levels, ("net", [leaders])):
        several = tuple(group for group in groups if len(group) > 1)
        if several:  # a group of one goes on with its own contents
            full.append((primitive, several))
    if not full:
        return CollectiveSchedule(name, layout, ())
    # Up: reduce to the leaders. Top: all-reduce. Down: broadcast over the same groups in reverse order.
    *inner, (top, groups) = full
    up = [Step("reduce", primitive, groups) for primitive, groups in inner]
    down = [Step("broadcast", primitive, groups) for primitive, groups in reversed(inner)]
    return CollectiveSchedule(name, layout, (*up, Step("all_reduce", top, groups), *down))


def _hierarchical(name: str, layout: Layout, inside: Primitive, across: Primitive) -> CollectiveSchedule:
    leaders = [tuple(device[0] for device in node) for node in layout.nodes]
    return _tree(name, layout, (inside, layout.devices), (across, leaders))


def _on_device(name: str, layout: Layout, across: Primitive) -> CollectiveSchedule:
    if max(map(len, layout.devices)) == 1:
        raise CompositionError(name, str(layout), "no device has two GMIs that could reduce on it")
    return _hierarchical(name, layout, "device", across)


def _rings(node: Devices) -> list[tuple[int, ...]]:
    """Ring j runs over the j-th GMI of every device that has one."""
    most = max(map(len, node))
    return [tuple(device[j] for device in node if j < len(device)) for j in range(most)]


def _distinct_roots(
    name: str, layout: Layout, node: Devices, rings: list[tuple[int, ...]]
) -> tuple[int, ...]:
    """One GMI of each ring, no two on one device; ring j's on the j-th device if possible.

    The devices of ring j include those of ring j + 1. So a greedy choice from the last, smallest ring on finds roots if any
    exist.
    """
    device_of = {rank: index for index, device in enumerate(node) for rank in device}
    taken: set[int] = set()
    roots: list[int] = []
    for j in reversed(range(len(rings))):
        free = [rank for rank in rings[j] if device_of[rank] not in taken]
        if not free:
            raise CompositionError(
                name,
                str(layout),
                f"m = {len(rings)} rings need a ring across with one GMI of each on distinct devices, and the host of "
                f"ranks {ranks_text(sorted(device_of))} has n = {len(node)}"
                + (" with unequal numbers of GMIs" if len(set(map(len, node))) > 1 else ""),
            )
        root = next((rank for rank in free if device_of[rank] == j), free[0])
        taken.add(device_of[root])
        roots.append(root)
    return tuple(reversed(roots))


def _led(group: tuple[int, ...], leader: int) -> tuple[int, ...]:
    """The group with its leader first, the others in their order."""
    return (leader, *(rank for rank in group if rank != leader))
