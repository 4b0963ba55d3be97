"""Core colocation: GMIs that share CPU cores, because they alternate or because there are more GMIs than cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from placement.errors import counted
from placement.role_layout import Roles, served_simulators, worker_type_name
from placement.types import FRACTION_STEP, Slice


def colocate_on_cores(
    hosts: Sequence[Slice], worker_types: Sequence[Roles], counts: Sequence[int], *, overlapped: bool
) -> tuple[list[Slice], list[Roles], str]:
    """Place the GMIs without a simulator on the cores of those with one.

    - Alternating types: a GMI gets the cores of the simulators that it serves, and as many threads.
    - Overlapped types: a GMI may run on every core of the node, with the threads of one simulator.

    Each core is requested from Ray as one CPU, divided evenly among the GMIs that share it.

    Args:
        hosts: slices of the GMIs with a simulator, by node, with disjoint cores
        worker_types: roles of each type, that of ``hosts`` first
        counts: GMIs of each type
        overlapped: whether the types work at the same time

    Returns:
        The slices of all GMIs by node, the roles of each, and the reason as a clause.
    """
    placed: list[tuple[Roles, tuple[int, ...]]] = [(worker_types[0], (index,)) for index in range(len(hosts))]
    for roles, number in zip(worker_types[1:], counts[1:], strict=True):
        for index in range(number):
            served = served_simulators(index, number, len(hosts))
            node = hosts[served[0]].node
            shared = range(len(hosts)) if overlapped else served
            placed.append((roles, tuple(other for other in shared if hosts[other].node == node)))
    users = [sum(host in covered for _, covered in placed) for host in range(len(hosts))]
    nodes = list(dict.fromkeys(host.node for host in hosts))
    placed.sort(key=lambda entry: nodes.index(hosts[entry[1][0]].node))  # stable: by type within a node
    slices = [
        _colocated_slice([hosts[i] for i in covered], [users[i] for i in covered], overlapped)
        for _, covered in placed
    ]
    return slices, [roles for roles, _ in placed], _colocation_text(worker_types, counts, overlapped)


def _colocated_slice(hosts: Sequence[Slice], users: Sequence[int], overlapped: bool) -> Slice:
    """A slice with the cores of ``hosts``; ``users[i]`` GMIs share the cores of ``hosts[i]``."""
    cpus = sum(host.num_threads / number for host, number in zip(hosts, users, strict=True))
    return replace(
        hosts[0],
        cores=tuple(core for host in hosts for core in host.cores),
        num_threads=(max if overlapped else sum)(host.num_threads for host in hosts),
        num_cpus=round(int(cpus / FRACTION_STEP + 1e-6) * FRACTION_STEP, 4),
    )


def _colocation_text(worker_types: Sequence[Roles], counts: Sequence[int], overlapped: bool) -> str:
    others = " and ".join(
        counted(number, worker_type_name(roles))
        for roles, number in zip(worker_types[1:], counts[1:], strict=True)
    )
    several = sum(counts[1:]) > 1
    name = f"{worker_type_name(worker_types[0])}s"
    if overlapped:
        return f"{others} on the same cores, concurrent with the {name}"
    return f"{others} on the same cores, which {'alternate' if several else 'alternates'} with the {name}"
