"""Values that describe machines and shares of them. Frozen; units are in the names; no driver handles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

BackendName = Literal["cpu", "direct"]
"""How a device is shared. ``cpu``: slices are sets of cores. ``direct``: processes share a GPU, no limits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One physical GPU."""

    index: int
    uuid: str
    name: str
    memory_total_bytes: int
    memory_free_bytes: int | None = None
    """None where it was not read, as in a hand-written machine file."""
    sm_count: int | None = None
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One host: its cores, memory and GPUs."""

    name: str
    cores: tuple[int, ...]
    """Ids of the logical cores that a process here may use (affinity, CPU quota), not all that exist."""
    memory_total_bytes: int
    gpus: tuple[Gpu, ...] = ()
    pinnable: bool = True
    """False where a quota or a neighbour, not a set of cores, limits the node: cores then only count."""
    ray_node_id: str | None = None
    """Set when the inventory came from a Ray cluster."""
    ray_cpus: float | None = None
    """CPUs that Ray can grant here; None where Ray was not asked. May exceed the cores that exist."""
    ray_gpus: float | None = None
    """GPUs that Ray can grant here; None where Ray was not asked."""

    @property
    def usable_cores(self) -> tuple[int, ...]:
        """Cores that exist and that Ray can grant."""
        return self.cores if self.ray_cpus is None else self.cores[: int(self.ray_cpus)]

    @property
    def usable_gpus(self) -> tuple[Gpu, ...]:
        """GPUs that exist and that Ray can grant."""
        return self.gpus if self.ray_gpus is None else self.gpus[: int(self.ray_gpus)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One or more nodes; what a plan is made for."""

    nodes: tuple[Node, ...]
    origin: str
    """Where this was read: 'local', 'ray', or the path of a recorded JSON."""

    @property
    def num_cores(self) -> int:
        """Usable cores of all nodes."""
        return sum(len(node.usable_cores) for node in self.nodes)

    @property
    def num_gpus(self) -> int:
        """Usable GPUs of all nodes."""
        return sum(len(node.usable_gpus) for node in self.nodes)

    def node(self, name: str) -> Node:
        """The node of that name. Raises KeyError where there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A share of one device on one node, as planned. What Ray really gave is in the GMI's Landing."""

    node: str
    backend: BackendName
    cores: tuple[int, ...] = ()
    """Cores that the slice's process is pinned to; empty: not pinned."""
    num_threads: int = 1
    """Threads for torch, the physics engine and OpenMP."""
    gpu_uuid: str | None = None
    """The GPU as planned; once the GMIs have landed, the one that Ray gave. None without a GPU."""
    gpu_fraction: float = 0.0
    """Share of one GPU, in (0, 1]; 0 without a GPU."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that must be set before the process imports torch or CUDA."""

    def label(self) -> str:
        """Short text for tables and actor names, e.g. ``cpu[0-1]`` or ``direct[GPU-12ab34cd x0.50]``.

        A GMI knows its GPU by Ray's id, mostly an index: ``direct[GPU 0 x0.50]``.
        """
        if self.gpu_uuid is not None:
            gpu = f"GPU {self.gpu_uuid}" if self.gpu_uuid.isdigit() else self.gpu_uuid[:12]
            return f"{self.backend}[{gpu} x{self.gpu_fraction:.2f}]"
        return f"{self.backend}[{core_ranges(self.cores) if self.cores else f'{self.num_threads} threads'}]"


def core_ranges(cores: Iterable[int]) -> str:
    """Cores as text, runs joined: ``0-3,6``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
