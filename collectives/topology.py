"""Which ranks share a GPU and which a node. All layout arithmetic is here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Where each rank is. Devices are numbered within their node; a set of cores counts as device 0."""

    nodes: tuple[int, ...]
    """Node of each rank."""
    devices: tuple[int, ...]
    """Device of each rank, within its node."""

    def __post_init__(self) -> None:
        if len(self.nodes) != len(self.devices):
            raise ValueError(
                f"{len(self.nodes)} ranks have a node and {len(self.devices)} a device; each needs both"
            )

    @classmethod
    def regular(cls, *, num_nodes: int, devices_per_node: int, gmis_per_device: int) -> Self:
        """The papers' layout: every node and device alike, GMIs of one device next to each other.

        Rank = (node * devices_per_node + device) * gmis_per_device + slice.
        """
        counts = {
            "num_nodes": num_nodes,
            "devices_per_node": devices_per_node,
            "gmis_per_device": gmis_per_device,
        }
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name}={count}: at least 1 is needed")
        devices = [rank // gmis_per_device for rank in range(num_nodes * devices_per_node * gmis_per_device)]
        return cls(
            nodes=tuple(device // devices_per_node for device in devices),
            devices=tuple(device % devices_per_node for device in devices),
        )

    @property
    def world_size(self) -> int:
        """How many ranks."""
        return len(self.nodes)

    def ranks_on_node(self, node: int) -> tuple[int, ...]:
        """Ranks of one node, ascending; none where there is no such node."""
        return tuple(rank for rank, own in enumerate(self.nodes) if own == node)

    def ranks_on_device(self, node: int, device: int) -> tuple[int, ...]:
        """Ranks that share one device, ascending."""
        return tuple(rank for rank in self.ranks_on_node(node) if self.devices[rank] == device)
