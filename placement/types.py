"""Values that describe machines and shares of them. Frozen; units are in the names; no driver handles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

BackendName = Literal["cpu", "direct", "mps", "mig", "green"]
"""How a device is shared. ``cpu``: slices are sets of cores. ``direct``: processes share a GPU, no limits.
``mps``: a daemon schedules them side by side, each with a share of the SMs. ``mig``: the driver cuts the GPU
into instances with SMs and memory of their own. ``green``: SM partitions inside one process."""

ComputeMode = Literal["default", "exclusive_process", "prohibited"]
"""How many contexts the driver lets into a GPU: any number, one process (with its MPS clients), none."""

FRACTION_STEP = 1e-4
"""Ray counts fractions of a GPU in steps of this size and refuses finer ones."""

PciePath = Literal["PIX", "PXB", "PHB", "NODE", "SYS"]
"""What lies between two GPUs on the host, as `nvidia-smi topo -m` names it: one PCIe switch, several, the host
bridge, bridges of one NUMA node, the link between NUMA nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MigInstance:
    """A MIG instance that exists: a GPU instance with one compute instance that fills it, unless said."""

    uuid: str
    """As CUDA_VISIBLE_DEVICES takes it: ``MIG-...``."""
    profile: str
    """As `nvidia-smi` names it: ``2g.10gb``, ``1g.10gb+me``; ``1c.3g.20gb`` for a part of a GPU instance."""
    memory_bytes: int
    start: int | None = None
    """First memory slice of the GPU that it occupies; None where this process may not ask."""
    size: int | None = None
    """Memory slices that it occupies."""
    sm_count: int | None = None
    gpu_instance_id: int | None = None
    in_use: bool = False
    """Whether a compute process runs on it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that has a compute context on a GPU."""

    pid: int
    memory_used_bytes: int | None = None
    """None where the driver does not tell, as in a container or on a GPU in MIG mode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One physical GPU. None: not read, or the device does not tell."""

    index: int
    uuid: str
    name: str
    memory_total_bytes: int
    memory_free_bytes: int | None = None
    """None where it was not read, as in a hand-written machine file."""
    sm_count: int | None = None
    """Multiprocessors of the whole GPU, outside of MIG mode."""
    compute_capability: tuple[int, int] | None = None
    architecture: str | None = None
    """``Volta``, ``Ampere``, ``Hopper``, ..."""
    mig_enabled: bool | None = None
    """None also where the GPU has no MIG."""
    mig_pending: bool | None = None
    """The mode after the next reset of the GPU; differs from ``mig_enabled`` while a reset is due."""
    mig_instances: tuple[MigInstance, ...] = ()
    compute_mode: ComputeMode | None = None
    processes: tuple[GpuProcess, ...] = ()
    """Compute processes of everybody, as far as this process may see them."""
    mps_running: bool | None = None
    """Whether an MPS server has this GPU."""
    numa_node: int | None = None
    cores: tuple[int, ...] = ()
    """Cores of the host near the GPU; empty: not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLink:
    """How two GPUs of a node reach each other."""

    gpus: tuple[str, str]
    """UUIDs, in the node's order."""
    nvlinks: int = 0
    """Active NVLinks on the path: straight, or through NVSwitch, where all of a GPU's links count."""
    path: PciePath | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NumaNode:
    """Cores and memory that are near each other."""

    index: int
    cores: tuple[int, ...]
    """All that exist, whether or not this process may use them."""
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
    """False where a quota or a neighbour, not a set of cores, limits the node: cores then only count."""
    ray_node_id: str | None = None
    """Set when the inventory came from a Ray cluster."""
    ray_cpus: float | None = None
    """CPUs that Ray can grant here; None where Ray was not asked. May exceed the cores that exist."""
    ray_gpus: float | None = None
    """GPUs that Ray can grant here; None where Ray was not asked."""
    numa_nodes: tuple[NumaNode, ...] = ()
    gpu_links: tuple[GpuLink, ...] = ()
    """One per pair of GPUs: the topology matrix without its symmetric half."""
    driver_version: str | None = None
    """Of NVIDIA's driver, as in ``580.65.06``."""
    cuda_version: tuple[int, int] | None = None
    """Newest CUDA that the driver runs."""
    mps_control: bool | None = None
    """Whether nvidia-cuda-mps-control is on PATH there."""
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
        """How two GPUs, by UUID, reach each other; None where that was not read."""
        return next((link for link in self.gpu_links if set(link.gpus) == {one, other}), None)


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
class Share:
    """What a backend made on a GPU, with all that a process needs to get into it."""

    kind: BackendName
    gpu_uuid: str
    fraction: float
    """Of the GPU, in (0, 1], as asked for; what was made is at least that large, or says so in its limits."""
    sm_count: int | None = None
    """SMs that it is limited to; None: no limit, or the backend does not know before a process is inside."""
    memory_bytes: int | None = None
    """Device memory that it is limited to; None: no limit."""
    mig_uuid: str | None = None
    """``mig``: the instance."""
    pipe_directory: str | None = None
    """``mps``: where the daemon listens."""
    thread_percentage: float | None = None
    """``mps``: cap on the SMs that a client may use, in percent; unused with a static partition."""
    sm_partition: str | None = None
    """``mps``: name of the static partition."""


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
    share: Share | None = None
    """What was carved for it; None before carving, and where the backend carves nothing."""
    num_cpus: float | None = None
    """What Ray is asked for where other slices have the same cores; None: its cores are its own, one CPU per thread."""

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
