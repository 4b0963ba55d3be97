"""Benchmark members as Ray actors, on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.rendezvous import RemoteRendezvous, start_rendezvous_actor
from collectives.layout import Layout
from collectives.schedule import Primitive
from rayagi.benchmark.bench import Start
from rayagi.benchmark.measure import BenchmarkCase, BenchmarkError, MemberEndedError, Members
from rayagi.benchmark.member import BenchMember
from rayagi.benchmark.processes import ANSWER_LIMIT_S
from rayagi.coordinator.cluster import connected


class RayMember(BenchMember):
    """A member in an actor, which uses its node's address."""

    def __init__(self, rank: int, layout: Layout) -> None:
        super().__init__(rank, layout, address=ray.util.get_node_ip_address())
        self._rendezvous: RemoteRendezvous | None = None

    def join(self, rendezvous: Any, most_bytes: int) -> set[Primitive]:
        """Rendezvous with the others through the handle of a rendezvous actor."""
        self._rendezvous = RemoteRendezvous(rendezvous)
        return super().join(self._rendezvous, most_bytes)

    def close(self) -> None:
        """Leave all groups."""
        super().close()
        if self._rendezvous is not None:
            self._rendezvous.close()


class _RayMembers:
    """Handles of the members, by rank."""

    def __init__(self, handles: list[Any], rendezvous: Any) -> None:
        self._handles, self.rendezvous = handles, rendezvous

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on all members in parallel; returns the results, by rank.

        Raises:
            MemberEndedError: an actor died, or did not answer within ANSWER_LIMIT_S.
            Exception: raised by the method.
        """
        refs = [getattr(handle, method).remote(*arguments) for handle in self._handles]
        ray.wait(refs, num_returns=len(refs), timeout=ANSWER_LIMIT_S)
        for rank, ref in enumerate(refs):
            try:
                ray.get(ref, timeout=0)
            except ray.exceptions.GetTimeoutError:
                raise MemberEndedError(
                    rank, method, f"did not answer within {ANSWER_LIMIT_S:.0f} s"
                ) from None
            except ray.exceptions.RayActorError as error:
                raise MemberEndedError(rank, method, f"its actor died: {error}") from None
            except ray.exceptions.RayTaskError:
                continue  # the death of another actor may be its cause, and is raised first
        return list(ray.get(refs))


def on_cluster(address: str) -> Start:
    """Start members on the nodes of a cluster: each node of a layout on a separate Ray node.

    Raises at the start:
        ClusterUnreachableError: the address does not answer.
        BenchmarkError: the cluster has too few nodes.
    """

    @contextmanager
    def start(case: BenchmarkCase) -> Iterator[Members]:
        with connected(address):
            nodes = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
            if len(nodes) < len(case.layout.nodes):
                raise BenchmarkError(
                    f"layout {case.layout} has {len(case.layout.nodes)} nodes, and the cluster at {address} has "
                    f"{len(nodes)}"
                )
            rendezvous = start_rendezvous_actor(case.layout.world_size)
            handles = [
                _start(rank, case.layout, nodes[node])
                for rank, (node, _) in sorted(case.layout.places().items())
            ]
            try:
                yield _RayMembers(handles, rendezvous)
            finally:
                for handle in (*handles, rendezvous):
                    ray.kill(handle)

    return start


def _start(rank: int, layout: Layout, node_id: str) -> Any:
    # No CPU resources: a benchmark does not wait for cores that others have reserved.
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": strategy}
    return ray.remote(RayMember).options(**options).remote(rank, layout)
