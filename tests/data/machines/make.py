"""Writes the recorded machines beside it: `python -m tests.data.machines.make`. What no source says is left unknown.

Names, memory and MIG instances are NVIDIA's for the models; 128 cores on two sockets are the DGX-A100 of GMI-DRL §4;
an A100 has 12 NVLinks, through NVSwitch in that machine (NVIDIA's A100 white paper). Other hosts are made up.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

from placement.inventory import dump_machine
from placement.types import Gpu, GpuLink, GpuProcess, Machine, MigInstance, Node, NumaNode

GIB = 2**30
A100_40 = ("NVIDIA A100-SXM4-40GB", 40 * GIB, (8, 0), "Ampere", 108)
A100_80 = ("NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0), "Ampere", 108)
H100 = ("NVIDIA H100 80GB HBM3", 80 * GIB, (9, 0), "Hopper", 132)
H200 = ("NVIDIA H200", 141 * 10**9, (9, 0), "Hopper", 132)
A30 = ("NVIDIA A30", 24 * GIB, (8, 0), "Ampere", 56)
V100 = ("Tesla V100-SXM2-16GB", 16 * GIB, (7, 0), "Volta", None)
RTX4090 = ("NVIDIA GeForce RTX 4090", 24 * GIB, (8, 9), "Ada", None)
WITHOUT_MIG = (V100, RTX4090)


def gpus(model: tuple, count: int, number: int) -> tuple[Gpu, ...]:
    name, memory, capability, architecture, sms = model
    mig = None if model in WITHOUT_MIG else False
    return tuple(
        Gpu(
            index=index,
            uuid=f"GPU-{number:04x}{index:04x}-0000-4000-8000-000000000000",
            name=name,
            memory_total_bytes=memory,
            memory_free_bytes=memory,
            sm_count=sms,
            compute_capability=capability,
            architecture=architecture,
            mig_enabled=mig,
            mig_pending=mig,
            compute_mode="default",
            mps_running=False,
        )
        for index in range(count)
    )


def host(name: str, devices: tuple[Gpu, ...], cores: int = 16, **more) -> Node:
    known = {"mps_control": True, "may_configure_mig": True, "cuda_version": (13, 1)} | more
    return Node(
        name=name, cores=tuple(range(cores)), memory_total_bytes=8 * cores * GIB, gpus=devices, **known
    )


def dgx(name: str, devices: tuple[Gpu, ...]) -> Node:
    """Two sockets of 64 cores, four GPUs on each, every GPU on NVSwitch."""
    near = tuple(tuple(range(64 * socket, 64 * socket + 64)) for socket in (0, 1))
    placed = tuple(replace(gpu, numa_node=gpu.index // 4, cores=near[gpu.index // 4]) for gpu in devices)
    links = tuple(GpuLink(gpus=(one.uuid, other.uuid), nvlinks=12) for one, other in combinations(devices, 2))
    sockets = tuple(NumaNode(index=i, cores=cores, memory_bytes=512 * GIB) for i, cores in enumerate(near))
    return host(name, placed, cores=128, gpu_links=links, numa_nodes=sockets)


def instance(number: int, profile: str, start: int, size: int, sms: int, in_use: bool) -> MigInstance:
    return MigInstance(
        uuid=f"MIG-{number:08x}-0000-5000-8000-000000000000",
        profile=profile,
        start=start,
        size=size,
        sm_count=sms,
        memory_bytes=size * 5 * GIB,
        in_use=in_use,
    )


def mig_cut() -> Node:
    """Cut by an administrator into 3g + 2g + 1g, the 3g in use; our user may not change it."""
    (gpu,) = gpus(A100_40, 1, 10)
    there = (
        instance(1, "3g.20gb", 0, 4, 42, True),
        instance(2, "2g.10gb", 4, 2, 28, False),
        instance(3, "1g.5gb", 6, 1, 14, False),
    )
    cut = replace(gpu, mig_enabled=True, mig_pending=True, mig_instances=there)
    return host("mig-cut", (cut,), may_configure_mig=False)


def mps_taken() -> Node:
    """Somebody's MPS server has the GPU."""
    (gpu,) = gpus(A100_40, 1, 11)
    server = GpuProcess(pid=4001, memory_used_bytes=30 * 2**20)
    taken = replace(gpu, compute_mode="exclusive_process", mps_running=True, processes=(server,))
    return host("mps-taken", (taken,), may_configure_mig=False)


def in_use() -> Node:
    """Two of four GPUs run other people's programs; one lets nobody in."""
    free, light, full, closed = gpus(A100_80, 4, 12)
    light = replace(
        light,
        processes=(GpuProcess(pid=5001, memory_used_bytes=2 * GIB),),
        memory_free_bytes=78 * GIB,
    )
    full = replace(
        full,
        processes=(GpuProcess(pid=5002, memory_used_bytes=79 * GIB),),
        memory_free_bytes=GIB,
    )
    return host("in-use", (free, light, full, replace(closed, compute_mode="prohibited")), cores=32)


NODES = {
    "a100_40x1": host("a100-40", gpus(A100_40, 1, 1)),
    "a100_40x8": dgx("dgx-a100-40", gpus(A100_40, 8, 2)),
    "a100_80x1": host("a100-80", gpus(A100_80, 1, 3)),
    "a100_80x8": dgx("dgx-a100-80", gpus(A100_80, 8, 4)),
    "h100x1": host("h100", gpus(H100, 1, 5)),
    "h200x1": host("h200", gpus(H200, 1, 6)),
    "h200x8": host("h200", gpus(H200, 8, 7), cores=192),
    "a30x1": host("a30", gpus(A30, 1, 8)),
    "a30x8": host("a30", gpus(A30, 8, 14), cores=64),
    "v100x1": host("v100", gpus(V100, 1, 9), may_configure_mig=None),
    "v100x8": host("v100", gpus(V100, 8, 15), cores=64, may_configure_mig=None),
    "rtx4090x1": host("workstation-4090", gpus(RTX4090, 1, 13), may_configure_mig=None),
    "rtx4090x8": host("server-4090", gpus(RTX4090, 8, 16), cores=64, may_configure_mig=None),
    "a100_40x1_mig_cut": mig_cut(),
    "a100_40x1_mps_taken": mps_taken(),
    "a100_80x4_in_use": in_use(),
}


def main(folder: Path = Path(__file__).parent) -> None:
    for name, node in NODES.items():
        dump_machine(Machine(nodes=(node,), origin="made"), folder / f"{name}.json")


if __name__ == "__main__":
    main()
