"""One carver per node: cuts the GPUs that Ray really gave, on their own hosts, and undoes it before they are given back."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.gmi import Landing
from placement.backends import get_backend
from placement.backends.base import Health
from placement.binding import shares_per_gpu
from placement.carver import Carver
from placement.errors import CarvingError, PlacementError
from placement.plan import Plan
from placement.types import Gpu, Share, Slice

CARVE_LIMIT_S = 120.0
"""For all nodes to cut their GPUs, a process start included."""
RESTORE_LIMIT_S = 90.0
"""For all nodes to undo it: clients get time to leave, and daemons to end."""
ANSWER_LIMIT_S = 30.0
"""For a question to a carver."""

KEEP_VISIBLE_DEVICES = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""Lets a carver, which holds no GPU itself, see those of its node; Ray hides them otherwise."""

LOG = logging.getLogger(__name__)


class Carvers:
    """The carvers of a run. Nothing starts before ``carve``, and nothing at all where the backend carves nothing."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._handles: dict[str, Any] = {}
        self._plan: Plan | None = None
        self._pids: list[int] = []

    def carve(self, plan: Plan, landings: Sequence[Landing]) -> Plan:
        """Cut every GPU as its slices want it; the plan with the shares, and with the environment to enter them.

        Args:
            plan: bound, with the GPUs that Ray gave
            landings: where each GMI's process is, in GMI order

        Raises:
            CarvingError: a GPU could not be cut, or a node did not answer in time. ``restore`` undoes what was done.
        """
        backend = get_backend(plan.backend)
        wanted = _wanted(plan)
        if not wanted:
            return plan
        if backend.carves:
            node_ids = {
                piece.node: landing.node_id for piece, landing in zip(plan.slices, landings, strict=True)
            }
            self._start({node: node_ids[node] for node in wanted}, plan.backend)
            shares = self._ask("carve", wanted, f"carving by {plan.backend}")
        else:
            # Nothing is done on the host: the shares can be made anywhere.
            shares = {node: Carver(plan.backend, self._run).carve(gpus) for node, gpus in wanted.items()}
        self._pids = [landing.pid for landing in landings]
        self._plan = replace(plan, slices=tuple(_with_shares(plan, wanted, shares)))
        return self._plan

    def health(self) -> list[Health]:
        """How each slice is, by the carver on its host, in GMI order; empty where nothing was carved."""
        if self._plan is None or not self._handles:
            return []
        indices: dict[str, list[int]] = {node: [] for node in self._handles}
        for index, piece in enumerate(self._plan.slices):
            indices[piece.node].append(index)
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

    def moved(self, index: int, pid: int) -> None:
        """GMI ``index`` was started anew, in process ``pid``."""
        if self._pids:
            self._pids[index] = pid

    def evict(self, index: int) -> None:
        """Detach GMI ``index``, which does not answer, from its share. Best effort: it is killed in any case."""
        if self._plan is None or not self._handles:
            return
        piece = self._plan.slices[index]
        with contextlib.suppress(PlacementError, ray.exceptions.RayError):
            ray.get(self._handles[piece.node].evict.remote(piece, self._pids[index]), timeout=ANSWER_LIMIT_S)

    def restore(self) -> None:
        """Undo every carving and end the carvers. Safe to call twice. What is left behind is logged, with the way out."""
        handles, self._handles = self._handles, {}
        if not handles or not ray.is_initialized():
            return
        refs = {node: handle.restore.remote() for node, handle in handles.items()}
        deadline = time.monotonic() + RESTORE_LIMIT_S
        for node, ref in refs.items():
            try:
                ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
            except (PlacementError, ray.exceptions.RayError) as error:
                cause = getattr(error, "cause", None) or error
                LOG.warning("%s was not undone: %s. Run `rayagi cleanup` there.", node, cause)
        for handle in handles.values():
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(handle, no_restart=True)

    def _start(self, node_ids: dict[str, str], backend: str) -> None:
        for node, node_id in node_ids.items():
            actor = ray.remote(Carver).options(
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                runtime_env={"env_vars": KEEP_VISIBLE_DEVICES},
            )
            self._handles[node] = actor.remote(backend, self._run)

    def _ask(self, method: str, arguments: dict[str, Any], asked: str) -> dict[str, Any]:
        """One call to every carver, by node."""
        limit_s = CARVE_LIMIT_S if method == "carve" else ANSWER_LIMIT_S
        refs = {node: getattr(self._handles[node], method).remote(value) for node, value in arguments.items()}
        deadline = time.monotonic() + limit_s
        answers = {}
        for node, ref in refs.items():
            try:
                answers[node] = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.GetTimeoutError as error:
                problem = f"did not answer within {limit_s:.0f} s"
                raise CarvingError(f"{asked} on node {node}", problem, "See the node's load") from error
            except ray.exceptions.RayError as error:
                last = str(error).strip().splitlines()[-1]
                problem = f"the carver was lost ({last.rstrip('.')})"
                raise CarvingError(
                    f"{asked} on node {node}", problem, "Run `rayagi cleanup` there"
                ) from error
        return answers


def _wanted(plan: Plan) -> dict[str, list[tuple[Gpu, tuple[float, ...]]]]:
    """Per node, each GPU that slices have and the sizes of their shares."""
    wanted: dict[str, list[tuple[Gpu, tuple[float, ...]]]] = {}
    for (node, uuid), sizes in shares_per_gpu(plan.slices).items():
        gpu = next(gpu for gpu in plan.machine.node(node).gpus if gpu.uuid == uuid)
        wanted.setdefault(node, []).append((gpu, tuple(sizes)))
    return wanted


def _with_shares(
    plan: Plan,
    wanted: dict[str, list[tuple[Gpu, tuple[float, ...]]]],
    shares: dict[str, list[tuple[Share, ...]]],
) -> list[Slice]:
    backend = get_backend(plan.backend)
    left = {
        (node, gpu.uuid): iter(carved)
        for node, gpus in wanted.items()
        for (gpu, _), carved in zip(gpus, shares[node], strict=True)
    }

    def shared(piece: Slice) -> Slice:
        if piece.gpu_uuid is None:
            return piece
        carved = replace(piece, share=next(left[piece.node, piece.gpu_uuid]))
        return replace(carved, environment=backend.environment(carved))

    return [shared(piece) for piece in plan.slices]
