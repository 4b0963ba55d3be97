"""Partitioners: one Ray actor per node partitions the GPUs that Ray allocated, and undoes it before they are released."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.gmi import WorkerInfo
from actors.raylet_watch import end_with_raylet
from placement.allocation import shares_per_gpu
from placement.backends import get_backend
from placement.backends.base import SliceHealth
from placement.errors import PartitionError, PlacementError
from placement.partitioner import Partitioner
from placement.plan import PlacementPlan
from placement.types import Gpu, Share, Slice

PARTITION_TIMEOUT_S = 120.0
"""Time limit for each GPU of a node to be partitioned, one after another; the start of the actors is included."""
RESTORE_TIMEOUT_S = 90.0
"""Time limit for each GPU of a node to be undone; MPS clients have to disconnect and daemons to end."""
CALL_TIMEOUT_S = 30.0
"""Time limit for any other call."""

KEEP_VISIBLE_DEVICES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Makes the node's GPUs visible to an actor without GPU resources; Ray hides them otherwise."""

LOG = logging.getLogger(__name__)


class PartitionerActor(Partitioner):
    """A partitioner as a Ray actor. It ends with its raylet: while it lives, nobody may undo what its ledger has."""

    def __init__(self, backend_name: str, run: str) -> None:
        end_with_raylet()
        super().__init__(backend_name, run)


class Partitioners:
    """The partitioner actors of a run. ``partition`` starts them, and only if the backend changes the host."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._handles: dict[str, Any] = {}
        self._plan: PlacementPlan | None = None
        self._pids: list[int] = []
        self._most_gpus = 1
        """On one node."""

    def partition(self, plan: PlacementPlan, workers: Sequence[WorkerInfo]) -> PlacementPlan:
        """Partition every GPU for its slices; returns the plan with shares and environment variables.

        ``plan``: with the GPUs that Ray allocated; ``workers``: in GMI order.

        Raises:
            PartitionError: a GPU could not be partitioned, or a node did not respond in time; call ``restore``.
        """
        backend = get_backend(plan.backend)
        wanted = _requested_shares(plan)
        if not wanted:
            return plan
        if backend.changes_host:
            node_ids = {
                gmi_slice.node: worker.node_id for gmi_slice, worker in zip(plan.slices, workers, strict=True)
            }
            self._most_gpus = max(map(len, wanted.values()))
            self._start({node: node_ids[node] for node in wanted}, plan.backend)
            shares = self._ask("partition", wanted, f"partitioning by {plan.backend}")
        else:
            # The host is not changed: the shares can be created in this process.
            shares = {
                node: Partitioner(plan.backend, self._run).partition(gpus) for node, gpus in wanted.items()
            }
        self._pids = [worker.pid for worker in workers]
        self._plan = replace(plan, slices=tuple(_with_shares(plan, wanted, shares)))
        return self._plan

    def health(self) -> list[SliceHealth]:
        """Health of each slice, from the partitioner on its host, in GMI order; empty without partitioners."""
        if self._plan is None or not self._handles:
            return []
        indices: dict[str, list[int]] = {node: [] for node in self._handles}
        for index, gmi_slice in enumerate(self._plan.slices):
            indices[gmi_slice.node].append(index)
        asked = {
            node: [(self._plan.slices[index], self._pids[index]) for index in those]
            for node, those in indices.items()
        }
        answers = self._ask("health", asked, "the health of the slices")
        found = {
            index: health
            for node, those in indices.items()
            for index, health in zip(those, answers[node], strict=True)
        }
        return [found[index] for index in range(len(found))]

    def update_pid(self, index: int, pid: int) -> None:
        """Record the new process of GMI ``index`` after a restart."""
        if self._pids:
            self._pids[index] = pid

    def evict(self, index: int) -> None:
        """Detach the unresponsive GMI ``index`` from its share. Best effort: it is killed in any case."""
        if self._plan is None or not self._handles:
            return
        gmi_slice = self._plan.slices[index]
        with contextlib.suppress(PlacementError, ray.exceptions.RayError):
            ray.get(
                self._handles[gmi_slice.node].evict.remote(gmi_slice, self._pids[index]),
                timeout=CALL_TIMEOUT_S,
            )

    def restore(self) -> None:
        """Undo the partitions and stop the actors. Idempotent. Logs what could not be undone, with a hint."""
        handles, self._handles = self._handles, {}
        if not handles or not ray.is_initialized():
            return
        refs = {node: handle.restore.remote() for node, handle in handles.items()}
        deadline = time.monotonic() + self._most_gpus * RESTORE_TIMEOUT_S
        for node, ref in refs.items():
            try:
                ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
            except (PlacementError, ray.exceptions.RayError) as error:
                cause = getattr(error, "cause", None) or error
                LOG.warning(
                    "Node %s: the partition was not undone: %s. Run `rayagi cleanup` there.", node, cause
                )
        for handle in handles.values():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(handle, no_restart=True)

    def _start(self, node_ids: dict[str, str], backend: str) -> None:
        for node, node_id in node_ids.items():
            actor = ray.remote(PartitionerActor).options(
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                runtime_env={"env_vars": KEEP_VISIBLE_DEVICES},
            )
            self._handles[node] = actor.remote(backend, self._run)

    def _ask(self, method: str, arguments: dict[str, Any], asked: str) -> dict[str, Any]:
        """Call a method of every partitioner in parallel; returns the results by node."""
        limit_s = self._most_gpus * PARTITION_TIMEOUT_S if method == "partition" else CALL_TIMEOUT_S
        refs = {node: getattr(self._handles[node], method).remote(value) for node, value in arguments.items()}
        deadline = time.monotonic() + limit_s
        answers = {}
        for node, ref in refs.items():
            try:
                answers[node] = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.GetTimeoutError as error:
                problem = f"did not respond within {limit_s:.0f} s"
                raise PartitionError(f"{asked} on node {node}", problem, "See the node's load") from error
            except ray.exceptions.RayError as error:
                last = str(error).strip().splitlines()[-1]
                problem = f"the partitioner was lost ({last.rstrip('.')})"
                raise PartitionError(
                    f"{asked} on node {node}", problem, "Run `rayagi cleanup` there"
                ) from error
        return answers


def _requested_shares(plan: PlacementPlan) -> dict[str, list[tuple[Gpu, tuple[float, ...]]]]:
    """node -> pairs of a GPU and the sizes of its shares."""
    wanted: dict[str, list[tuple[Gpu, tuple[float, ...]]]] = {}
    for (node, uuid), sizes in shares_per_gpu(plan.slices).items():
        gpu = next(gpu for gpu in plan.machine.node(node).gpus if gpu.uuid == uuid)
        wanted.setdefault(node, []).append((gpu, tuple(sizes)))
    return wanted


def _with_shares(
    plan: PlacementPlan,
    wanted: dict[str, list[tuple[Gpu, tuple[float, ...]]]],
    shares: dict[str, list[tuple[Share, ...]]],
) -> list[Slice]:
    backend = get_backend(plan.backend)
    left = {
        (node, gpu.uuid): iter(partitioned)
        for node, gpus in wanted.items()
        for (gpu, _), partitioned in zip(gpus, shares[node], strict=True)
    }

    def shared(gmi_slice: Slice) -> Slice:
        if gmi_slice.gpu_uuid is None:
            return gmi_slice
        partitioned = replace(gmi_slice, share=next(left[gmi_slice.node, gmi_slice.gpu_uuid]))
        return replace(partitioned, environment=backend.environment(partitioned))

    return [shared(gmi_slice) for gmi_slice in plan.slices]
