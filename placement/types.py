"""Data types for machines, GPUs and slices. Immutable; no driver handles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from placement.errors import counted

BackendName = str
"""How a device is shared: a name in ``placement.backends.BACKENDS``."""

ComputeMode = Literal["default", "exclusive_process", "prohibited"]
"""CUDA compute mode: any number of contexts, one process (with its MPS clients), or none."""

FRACTION_STEP = 1e-4
"""Granularity of Ray's fractional GPUs; Ray rejects finer fractions."""

PciePath = Literal["PIX", "PXB", "PHB", "NODE", "SYS"]
"""PCIe path between two GPUs, as in `nvidia-smi topo -m`: one PCIe switch, several, the host bridge, bridges of one NUMA
node, the link between NUMA nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MigInstance:
    """An existing MIG instance: a compute instance, which usually fills its GPU instance."""

    uuid: str
    """Identifier for CUDA_VISIBLE_DEVICES: ``MIG-...``."""
    profile: str
    """As `nvidia-smi` names it: ``2g.10gb``, ``1g.10gb+me``; ``1c.3g.20gb`` for a part of a GPU instance."""
    memory_bytes: int
    start: int | None = None
    """First memory slice of the GPU that it occupies; None without the permission to read it."""
    size: int | None = None
    """Memory slices that it occupies."""
    sm_count: int | None = None
    in_use: bool = False
    """Whether a compute process runs on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that has a compute context on a GPU."""

    pid: int
    memory_used_bytes: int | None = None
    """None if the driver does not report it, as in a container or on a GPU in MIG mode."""
    of_ray: bool = False
    """Whether it is a worker of Ray, which counts the fractions of GPUs that its workers have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One physical GPU. None: not read, or not reported by the device."""

    index: int
    uuid: str
    name: str
    memory_total_bytes: int
    memory_free_bytes: int | None = None
    """None if it was not read, as in a hand-written machine file."""
    sm_count: int | None = None
    """Multiprocessors of the whole GPU, outside of MIG mode."""
    compute_capability: tuple[int, int] | None = None
    architecture: str | None = None
    """``Volta``, ``Ampere``, ``Hopper``, ..."""
    mig_enabled: bool | None = None
    """None also if the GPU has no MIG."""
    mig_pending: bool | None = None
    """The mode after the next reset of the GPU; differs from ``mig_enabled`` while a reset is due."""
    mig_instances: tuple[MigInstance, ...] = ()
    compute_mode: ComputeMode | None = None
    processes: tuple[GpuProcess, ...] = ()
    """Compute processes of all users, as far as this process may see them."""
    mps_running: bool | None = None
    """Whether an MPS server uses this GPU."""
    numa_node: int | None = None
    cores: tuple[int, ...] = ()
    """Cores of the host near the GPU; empty: not read."""

    def is_called(self, name: str) -> bool:
        """Whether CUDA_VISIBLE_DEVICES may call it so: by its index, or by its UUID or the beginning of that."""
        name = name.strip()
        return name == str(self.index) or (name != "" and not name.isdecimal() and self.uuid.startswith(name))

    @property
    def available_bytes(self) -> int:
        """Memory that is free or that Ray's workers have; all if that was not read, or where instances divide it (MIG).

        The memory of Ray's workers is that of their own fractions, or of a run that is just ending.
        """
        if self.memory_free_bytes is None or self.mig_enabled:
            return self.memory_total_bytes
        of_ray = sum(process.memory_used_bytes or 0 for process in self.processes if process.of_ray)
        return min(self.memory_total_bytes, self.memory_free_bytes + of_ray)

    def share_bytes(self, fraction: float, planned: float) -> int:
        """Memory of a share: its fraction of the GPU's, or less if the ``planned`` shares together have less available."""
        return int(min(self.memory_total_bytes, self.available_bytes / planned) * fraction)


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLink:
    """Interconnect between two GPUs of a node."""

    gpus: tuple[str, str]
    """UUIDs, in the node's order."""
    nvlinks: int = 0
    """Active NVLinks on the path: direct, or through NVSwitch, where all of a GPU's links count."""
    path: PciePath | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NumaNode:
    """Cores and memory of one NUMA node."""

    index: int
    cores: tuple[int, ...]
    """All cores of the node, whether or not this process may use them."""
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One host: its cores, memory and GPUs."""

    name: str
    cores: tuple[int, ...]
    """Ids of the logical cores that a process here may use (affinity, CPU quota), not all that exist."""
    memory_total_bytes: int
    gpus: tuple[Gpu, ...] = ()
    pinnable: bool = True
    """False if a CPU quota or another node on the same host limits the node: only the number of cores counts then."""
    ray_node_id: str | None = None
    """Set when the inventory came from a Ray cluster."""
    ray_cpus: float | None = None
    """CPUs that Ray can grant here; None without Ray. May exceed the cores that exist."""
    ray_gpus: float | None = None
    """GPUs that Ray can grant here; None without Ray."""
    numa_nodes: tuple[NumaNode, ...] = ()
    gpu_links: tuple[GpuLink, ...] = ()
    """One per pair of GPUs: the topology matrix without its symmetric half."""
    driver_version: str | None = None
    """Version of NVIDIA's driver, such as ``580.65.06``."""
    cuda_version: tuple[int, int] | None = None
    """Newest CUDA version that the driver supports."""
    mps_control: bool | None = None
    """Whether nvidia-cuda-mps-control is on the node's PATH."""
    may_configure_mig: bool | None = None
    """Whether the process that read the node may create and destroy MIG instances on it."""

    @property
    def usable_cores(self) -> tuple[int, ...]:
        """Cores that exist and that Ray can grant."""
        return self.cores if self.ray_cpus is None else self.cores[: int(self.ray_cpus)]

    @property
    def usable_gpus(self) -> tuple[Gpu, ...]:
        """GPUs that exist and that Ray can grant."""
        return self.gpus if self.ray_gpus is None else self.gpus[: int(self.ray_gpus)]

    def link(self, one: str, other: str) -> GpuLink | None:
        """The interconnect between two GPUs, by UUID; None if it was not read."""
        return next((link for link in self.gpu_links if set(link.gpus) == {one, other}), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The nodes for which a plan is made."""

    nodes: tuple[Node, ...]
    origin: str
    """Source of the inventory: 'local', 'ray', or the path of a recorded JSON file."""

    @property
    def num_cores(self) -> int:
        """Usable cores of all nodes."""
        return sum(len(node.usable_cores) for node in self.nodes)

    @property
    def num_gpus(self) -> int:
        """Usable GPUs of all nodes."""
        return sum(len(node.usable_gpus) for node in self.nodes)

    def node(self, name: str) -> Node:
        """The node of that name. Raises KeyError if there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A partition of a GPU, with the parameters that a process needs to enter it."""

    kind: BackendName
    gpu_uuid: str
    sm_count: int | None = None
    """SM limit; None: no limit, or unknown until a process has entered."""
    memory_bytes: int | None = None
    """Device memory limit; None: no limit."""
    mig_uuid: str | None = None
    """``mig``: UUID of the instance."""
    pipe_directory: str | None = None
    """``mps``: the daemon's pipe directory."""
    thread_percentage: float | None = None
    """``mps``: cap on the SMs that a client may use, in percent; unused with a static partition."""
    sm_partition: str | None = None
    """``mps``: name of the static partition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A share of one device on one node, as planned. ``WorkerInfo`` has what Ray allocated."""

    node: str
    backend: BackendName
    cores: tuple[int, ...] = ()
    """Cores that the slice's process is pinned to; empty: not pinned."""
    num_threads: int = 1
    """Threads for torch, the physics engine and OpenMP."""
    gpu_uuid: str | None = None
    """The planned GPU; after allocation, the one that Ray gave. None without a GPU."""
    gpu_fraction: float = 0.0
    """Share of one GPU, in (0, 1]; 0 without a GPU."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that must be set before the process imports torch or CUDA."""
    share: Share | None = None
    """The slice's partition of the GPU; None before partitioning, and without a GPU."""
    num_cpus: float | None = None
    """CPUs of the Ray bundle if slices share cores; None: the cores are its own, one CPU per thread."""

    def label(self) -> str:
        """Short text for tables and actor names: ``cpu[0-1]``, ``direct[GPU-12ab34cd x0.50]``.

        In a GMI the GPU is Ray's id, usually an index: ``direct[GPU 0 x0.50]``.
        """
        if self.gpu_uuid is not None:
            gpu = f"GPU {self.gpu_uuid}" if self.gpu_uuid.isdigit() else self.gpu_uuid[:12]
            return f"{self.backend}[{gpu} x{self.gpu_fraction:.2f}]"
        return f"{self.backend}[{core_ranges(self.cores) if self.cores else counted(self.num_threads, 'thread')}]"


def core_ranges(cores: Iterable[int]) -> str:
    """Cores as ranges: ``0-3,6``."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
