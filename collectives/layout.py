"""Layout of ranks: the node and the device of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from collectives.errors import LayoutError

MAX_RANKS = 1024
"""Upper limit, so that a typing error such as 4000x3000 is rejected instead of being planned for hours."""

_HOW_TO_WRITE = (
    "write 4x3 for 4 devices of 3 GMIs, 2x4x3 for two such nodes, 3+2 for devices of 3 and 2 GMIs, "
    "'3+2|4' for a second node with one device of 4"
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks by node, device and GMI. A node without GPUs is one device.

    Attributes:
        nodes: ranks of each device of each node: ``nodes[node][device][gmi]``; every rank occurs once

    Raises:
        LayoutError: a rank is missing or occurs twice, or a node or device is empty.
    """

    nodes: tuple[tuple[tuple[int, ...], ...], ...]

    def __post_init__(self) -> None:
        ranks = [rank for device in self.devices for rank in device]
        if not ranks or not all(node and all(node) for node in self.nodes):
            raise LayoutError(str(self.nodes), "a layout needs a node, a node a device, a device a GMI")
        if sorted(ranks) != list(range(len(ranks))):
            raise LayoutError(
                str(self.nodes), f"each of the ranks 0 to {len(ranks) - 1} must occur exactly once"
            )

    @classmethod
    def from_counts(cls, counts: Sequence[Sequence[int]]) -> Self:
        """The layout of ``counts[node][device]`` GMIs, numbered through nodes, devices, GMIs in this order."""
        nodes, first = [], 0
        for node in counts:
            devices = []
            for count in node:
                devices.append(tuple(range(first, first + count)))
                first += count
            nodes.append(tuple(devices))
        return cls(tuple(nodes))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``4x3``, ``2x4x3``, ``3+2``, ``3+2|4``; nodes may differ, as in ``4x3|2x2``.

        Raises:
            LayoutError: invalid text, or more than ``MAX_RANKS`` GMIs.
        """
        compact = re.sub(r"\s+", "", text)
        nodes = re.fullmatch(r"(\d{1,5})x(\d{1,5}x\d{1,5})", compact, re.ASCII)
        many, each = (int(nodes[1]), [nodes[2]]) if nodes else (1, compact.split("|"))
        if many > MAX_RANKS:
            raise LayoutError(text, f"more than {MAX_RANKS} nodes")
        counts = [_node_counts(node, text) for node in each] * many
        if sum(map(sum, counts)) > MAX_RANKS:
            raise LayoutError(text, f"more than {MAX_RANKS} GMIs")
        return cls.from_counts(counts)

    @classmethod
    def from_placement(cls, places: Sequence[tuple[str, str | None]]) -> Self:
        """The layout of members with these node ids and GPU uuids (None: one device of its node, without a GPU), by rank.

        Nodes and devices are ordered by their lowest rank.
        """
        nodes: dict[str, dict[str | None, list[int]]] = {}
        for rank, (node, gpu) in enumerate(places):
            nodes.setdefault(node, {}).setdefault(gpu, []).append(rank)
        return cls(tuple(tuple(map(tuple, devices.values())) for devices in nodes.values()))

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each device, through all nodes."""
        return tuple(device for node in self.nodes for device in node)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each node, device after device."""
        return tuple(tuple(rank for device in node for rank in device) for node in self.nodes)

    @property
    def world_size(self) -> int:
        """GMIs in all."""
        return sum(map(len, self.devices))

    @property
    def n(self) -> int:
        """Devices in all: the papers' n (GMI-DRL §3.2.1) and g (preprint, Table 2)."""
        return len(self.devices)

    @property
    def m(self) -> int | None:
        """GMIs per device: the papers' m and t; None where devices hold different numbers."""
        counts = set(map(len, self.devices))
        return counts.pop() if len(counts) == 1 else None

    @property
    def mpl(self) -> list[list[int]]:
        """The preprint's GMI-to-GPU mapping list (Algorithm 1), e.g. [[0, 1, 2], [3, 4, 5]]."""
        return [list(device) for device in self.devices]

    def places(self) -> dict[int, tuple[int, int]]:
        """Node and device of each rank; devices are numbered through all nodes."""
        where = [(index, device) for index, node in enumerate(self.nodes) for device in node]
        return {
            rank: (node_index, device_index)
            for device_index, (node_index, device) in enumerate(where)
            for rank in device
        }

    def __str__(self) -> str:
        texts = [_node_text(node) for node in self.nodes]
        text = "|".join(texts)
        if len(set(texts)) == 1 and "+" not in text:
            node = texts[0] if "x" in texts[0] else f"1x{texts[0]}"
            text = node if len(texts) == 1 else f"{len(texts)}x{node}"
        in_order = [rank for host in self.hosts for rank in host] == list(range(self.world_size))
        return text if in_order else f"{text} with ranks {self.mpl}"


def _node_counts(node: str, whole: str) -> list[int]:
    """GMIs of each device of ``3+2`` or ``4x3``."""
    counts: list[int] = []
    for term in node.split("+"):
        found = re.fullmatch(r"(?:(\d{1,5})x)?(\d{1,5})", term, re.ASCII)
        if found is None:
            raise LayoutError(whole, f"'{term}' is not a number of GMIs; {_HOW_TO_WRITE}")
        devices, gmis = int(found[1] or 1), int(found[2])
        if not devices or not gmis:
            raise LayoutError(whole, f"nothing in '{term}'; devices and GMIs are at least 1")
        counts += [gmis] * min(devices, MAX_RANKS + 1)  # enough to exceed the limit
    return counts


def _node_text(node: tuple[tuple[int, ...], ...]) -> str:
    counts = [len(device) for device in node]
    if len(counts) > 1 and len(set(counts)) == 1:
        return f"{len(counts)}x{counts[0]}"
    return "+".join(map(str, counts))
