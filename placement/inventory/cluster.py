"""Inventory of the connected Ray cluster: a task on each node reads its hardware."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from placement.errors import InventoryError
from placement.inventory.local import local_node
from placement.types import Machine, Node

KEEP_VISIBLE_DEVICES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Makes the node's GPUs visible to a task without GPU resources; Ray hides them otherwise."""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def cluster_machine(timeout_s: float = 60.0, prepare: Callable[[], None] = lambda: None) -> Machine:
    """Read every live node with CPUs or GPUs, limited to Ray's resources.

    Nodes on the same host (containers, or a simulated cluster) get disjoint cores and GPUs as far as possible. Logical GPUs
    without hardware, as in ``ray.init(num_gpus=8)``, are left out. The limit is generous, since the first process on a new
    node starts slowly.

    Args:
        timeout_s: for all nodes
        prepare: called on each node before it is read

    Raises:
        InventoryError: Ray is not connected, has no node with CPUs or GPUs, or a node did not respond in time.
    """
    if not ray.is_initialized():
        raise InventoryError(
            "Ray",
            "this process is not connected to a cluster",
            "Call ray.init() first, or use local_machine()",
        )
    entries, answers = _read_nodes(timeout_s, prepare)
    hosts = Counter(entry["NodeManagerHostname"] for entry in entries)
    nodes = []
    for entry, (node, _) in zip(entries, answers, strict=True):
        resources, host = entry["Resources"], entry["NodeManagerHostname"]
        nodes.append(
            replace(
                node,
                name=host if hosts[host] == 1 else f"{host}-{entry['NodeID'][:6]}",
                ray_node_id=entry["NodeID"],
                ray_cpus=float(resources.get("CPU", 0.0)),
                ray_gpus=float(resources.get("GPU", 0.0)),
            )
        )
    return Machine(nodes=divide_hosts(nodes, [boot_id for _, boot_id in answers]), origin="ray")


def _read_nodes(
    timeout_s: float, prepare: Callable[[], None]
) -> tuple[list[dict[str, Any]], list[tuple[Node, str]]]:
    """Ray's entries of the live nodes with CPUs or GPUs, and their answers; again if one leaves the cluster meanwhile."""
    while True:
        alive = _alive()
        entries = _in_order(
            each for each in alive.values() if each["Resources"].get("CPU") or each["Resources"].get("GPU")
        )
        if not entries:
            raise InventoryError(
                "Ray", "no live node has a CPU or a GPU", "Start Ray with --num-cpus of at least 1"
            )
        try:
            return entries, _ask(entries, timeout_s, prepare)
        except InventoryError:
            if _alive().keys() >= {entry["NodeID"] for entry in entries}:
                raise


def _alive() -> dict[str, dict[str, Any]]:
    """Ray's entries of the live nodes, by id."""
    return {entry["NodeID"]: entry for entry in ray.nodes() if entry["Alive"]}


def divide_hosts(nodes: list[Node], host_ids: list[str]) -> tuple[Node, ...]:
    """Divide the cores and GPUs of one host among its nodes, in order, each as many as Ray grants it.

    If too few cores are left for a node, it keeps all its cores but is not pinnable.
    """
    taken_cores: dict[str, set[int]] = {}
    taken_gpus: set[str] = set()
    divided = []
    for node, host_id in zip(nodes, host_ids, strict=True):
        taken = taken_cores.setdefault(host_id, set())
        own = tuple(core for core in node.cores if core not in taken)
        enough = len(own) >= len(node.usable_cores)
        gpus = tuple(gpu for gpu in node.gpus if gpu.uuid not in taken_gpus)
        uuids = {gpu.uuid for gpu in gpus}
        mine = replace(
            node,
            cores=own if enough else node.cores,
            pinnable=node.pinnable and enough,
            gpus=gpus,
            gpu_links=tuple(link for link in node.gpu_links if uuids.issuperset(link.gpus)),
        )
        taken.update(mine.usable_cores)
        taken_gpus.update(gpu.uuid for gpu in mine.usable_gpus)
        divided.append(mine)
    return tuple(divided)


def _in_order(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nodes by name of their host. Ray lists them by a hash that differs from one start of the cluster to the next, and a
    plan counts its GMIs by node: gmi.left_out of a resumed run has to mean the same ones."""
    return sorted(entries, key=lambda entry: (entry["NodeManagerHostname"], entry["NodeID"]))


def _read_node(prepare: Callable[[], None]) -> tuple[Node, str]:
    """Runs on the node: its hardware, and the boot id that identifies its host."""
    prepare()
    return local_node(), BOOT_ID.read_text().strip()


def _ask(
    entries: list[dict[str, Any]], timeout_s: float, prepare: Callable[[], None]
) -> list[tuple[Node, str]]:
    started = time.monotonic()
    pending = {}
    for entry in entries:
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_retries": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(entry["NodeID"], soft=False),
        }
        if entry["Resources"].get("GPU"):
            options["runtime_env"] = {"env_vars": KEEP_VISIBLE_DEVICES}
        pending[entry["NodeID"]] = ray.remote(_read_node).options(**options).remote(prepare)
    refs = list(pending.values())
    _, late = ray.wait(refs, num_returns=len(refs), timeout=timeout_s)
    if late:
        silent = [entry["NodeManagerHostname"] for entry in entries if pending[entry["NodeID"]] in late]
        for ref in late:
            ray.cancel(ref, force=True)
        raise InventoryError(
            f"Ray node {', '.join(silent)}",
            f"did not respond within {time.monotonic() - started:.1f} s",
            "See `ray status` and the load of the node: Ray could not run a zero-CPU task on it in that time",
        )
    return [_answer(entry, pending[entry["NodeID"]]) for entry in entries]


def _answer(entry: dict[str, Any], ref: ray.ObjectRef) -> tuple[Node, str]:
    try:
        answer: tuple[Node, str] = ray.get(ref)
    except (RayError, InventoryError) as error:
        # A RayTaskError wraps the task's own error in ``cause``.
        cause = getattr(error, "cause", None) or error
        last_line = str(cause).strip().splitlines()[-1]
        raise InventoryError(
            f"Ray node {entry['NodeManagerHostname']}",
            f"could not be read: {last_line}",
            "See `ray status` for the node",
        ) from error
    return answer
