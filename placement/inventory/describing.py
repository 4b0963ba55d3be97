"""Text description of a machine, for `rayagi info`."""

from __future__ import annotations

from placement.errors import counted
from placement.text import aligned
from placement.types import Gpu, Machine, MigInstance, Node, core_ranges

UNKNOWN = "?"


def describe(machine: Machine) -> str:
    """Describe every node: cores, NUMA nodes, driver, GPUs with MIG instances and processes, and interconnects."""
    return "\n\n".join("\n".join(_node_lines(node)) for node in machine.nodes)


def _granted(amount: float, noun: str) -> str:
    return f"{amount:g} {noun}{'' if amount == 1 else 's'}"


def _node_lines(node: Node) -> list[str]:
    pinned = core_ranges(node.cores) if node.pinnable else "counted, not pinned to"
    lines = [
        f"node {node.name}: {counted(len(node.cores), 'core')} ({pinned}), {_gib(node.memory_total_bytes)}, "
        f"{counted(len(node.gpus), 'GPU')}"
    ]
    if node.ray_cpus is not None:
        lines.append(f"Ray grants {_granted(node.ray_cpus, 'CPU')} and {_granted(node.ray_gpus or 0, 'GPU')}")
    lines += [
        f"NUMA node {one.index}: cores {core_ranges(one.cores) or 'none'}, {_gib(one.memory_bytes)}"
        for one in node.numa_nodes
    ]
    if not node.gpus:
        return lines
    cuda = UNKNOWN if node.cuda_version is None else "{}.{}".format(*node.cuda_version)
    lines.append(
        f"NVIDIA driver {node.driver_version or UNKNOWN}, CUDA up to {cuda}; "
        f"MPS control program: {_yes(node.mps_control)}; may create MIG instances: {_yes(node.may_configure_mig)}"
    )
    lines += ["", *aligned([_HEADS, *(_gpu_row(gpu) for gpu in node.gpus)])]
    for gpu in node.gpus:
        lines += _details(gpu)
    if node.gpu_links:
        lines += ["", "links, as NVLinks and PCIe path:", *aligned(_matrix(node))]
    return lines


_HEADS = ("GPU", "name", "capability", "SMs", "memory", "free", "compute mode", "MIG", "MPS", "NUMA", "uuid")


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    capability = UNKNOWN if gpu.compute_capability is None else "{}.{}".format(*gpu.compute_capability)
    return (
        str(gpu.index),
        gpu.name,
        f"{capability} {gpu.architecture or ''}".rstrip(),
        UNKNOWN if gpu.sm_count is None else str(gpu.sm_count),
        _gib(gpu.memory_total_bytes),
        UNKNOWN if gpu.memory_free_bytes is None else _gib(gpu.memory_free_bytes),
        gpu.compute_mode or UNKNOWN,
        _mig(gpu),
        {True: "running", False: "no", None: UNKNOWN}[gpu.mps_running],
        UNKNOWN if gpu.numa_node is None else str(gpu.numa_node),
        gpu.uuid,
    )


def _mig(gpu: Gpu) -> str:
    if gpu.mig_enabled is None:
        return "-"
    state = "on" if gpu.mig_enabled else "off"
    if gpu.mig_pending is None or gpu.mig_pending == gpu.mig_enabled:
        return state
    return f"{state}, {'on' if gpu.mig_pending else 'off'} after reset"


def _details(gpu: Gpu) -> list[str]:
    lines = []
    if gpu.processes:
        each = (
            f"{one.pid} ({UNKNOWN if one.memory_used_bytes is None else _gib(one.memory_used_bytes)})"
            for one in gpu.processes
        )
        lines.append(f"GPU {gpu.index} is used by process {', '.join(each)}")
    if gpu.mig_instances:
        lines += ["", f"MIG instances of GPU {gpu.index}:"]
        heads = ("profile", "memory slices", "SMs", "memory", "in use", "uuid")
        lines += aligned([heads, *(_instance_row(one) for one in gpu.mig_instances)])
    return lines


def _instance_row(one: MigInstance) -> tuple[str, ...]:
    known = one.start is not None and one.size is not None
    return (
        one.profile,
        core_ranges(range(one.start or 0, (one.start or 0) + (one.size or 0))) if known else UNKNOWN,
        UNKNOWN if one.sm_count is None else str(one.sm_count),
        _gib(one.memory_bytes),
        _yes(one.in_use),
        one.uuid,
    )


def _matrix(node: Node) -> list[tuple[str, ...]]:
    """Topology matrix as in `nvidia-smi topo -m`: the interconnect between the row's and the column's GPU."""
    rows = [("", *(f"GPU {gpu.index}" for gpu in node.gpus))]
    for one in node.gpus:
        cells = [_cell(node, one.uuid, other.uuid) for other in node.gpus]
        rows.append((f"GPU {one.index}", *cells))
    return rows


def _cell(node: Node, one: str, other: str) -> str:
    if one == other:
        return "-"
    link = node.link(one, other)
    if link is None:
        return UNKNOWN
    path = link.path or UNKNOWN
    return f"NV{link.nvlinks} {path}" if link.nvlinks else path


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "no", None: UNKNOWN}[value]


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
