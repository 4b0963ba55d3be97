"""Default layout on GPUs: the numbers of a run that gives none.

On cores a plan has one GMI per core and the preset's environments. On GPUs the numbers come from the first source that there
is and that the machine can hold: a recorded search on this machine, then on the same GPU model, then a published layout: the
papers' own, and for MuJoCo Warp one GMI per GPU, whose rollouts are one CUDA graph and leave little of the GPU idle. It is a
default with a source, not a ranking.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from placement.errors import PlanError, counted
from placement.plan import PlacementPlan
from placement.types import Machine
from rayagi.config.presets import preset
from rayagi.config.spec import RunSpec
from rayagi.coordinator.cluster_forecast import CONTEXT_BYTES, GPU_ENGINES
from rayagi.coordinator.memory_need import reject_insufficient_memory, rollout_memory
from rayagi.coordinator.search_store import SearchStore
from rayagi.planning import plan_of, uses_gpus

PAPER_GMIS_PER_GPU = 3
"""GMI-DRL (ATC'25), Table 6: three trainers per GPU, on two and on four A100."""
PAPER_ENVS_PER_GPU = 4096
"""Preprint §6.2, Figure 10: from 4,096 to 8,192 environments on a GPU, throughput hardly grows, and memory sharply."""
_PAPERS = "the papers' layout: GMI-DRL Table 6, preprint Figure 10"
_ONE_PROCESS = (
    "with MuJoCo Warp one process was faster than 2 or 4 on an H200; environments: preprint Figure 10"
)
"""experiments/gpu_sharing."""
_HERE = "by a search on this machine"
_SEARCH = "search throughput gmis=auto num_envs=auto"
"""Note of a search of both numbers (SearchSettings.name)."""
_DAMAGED = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError)
"""What reading a recorded search raises that is of another version, or damaged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    gmis_per_gpu: int
    num_envs: int
    source: str


def takes_default(spec: RunSpec) -> bool:
    """Whether a spec gives no layout of GMIs: ``dp_only`` on any backend, without numbers of GMIs and sizes."""
    gmi = spec.gmi
    return (gmi.template, gmi.backend) == ("dp_only", "auto") and not (
        gmi.num_gmis
        or gmi.gmis_per_gpu
        or gmi.slices
        or gmi.left_out
        or gmi.threads_per_gmi
        or gmi.wants_search
    )


def with_default_layout(
    spec: RunSpec,
    machine: Machine,
    *,
    log: Callable[[str], None],
    keep_envs: bool = False,
) -> RunSpec:
    """The spec with the default numbers on GPUs, with their source logged; the spec itself if it gives its own, or on cores.

    Args:
        spec: the run; a number of environments other than its preset's counts as given
        machine: the machine of the run
        log: called with one sentence
        keep_envs: whether the number of environments was given
    """
    if not takes_default(spec) or not uses_gpus(spec, machine):
        return spec
    own = preset(spec.env.id, spec.algorithm).gmi.num_envs
    kept = spec.gmi.envs if keep_envs or spec.gmi.num_envs != own else None
    for candidate in _candidates(spec, machine):
        num_envs = kept or candidate.num_envs
        found = spec.with_gmi(gmis_per_gpu=candidate.gmis_per_gpu, num_envs=num_envs)
        with suppress(PlanError):
            plan = plan_of(found, machine)
            reject_insufficient_memory(found, plan)
            if not _holds_contexts(found, plan):
                continue
            if plan.backend == "direct" and candidate.gmis_per_gpu > 1 and candidate.source != _HERE:
                continue  # without MPS and MIG, GMIs take turns on a GPU: neither source measured that
            log(
                f"Default layout: {counted(candidate.gmis_per_gpu, 'GMI')} per GPU of {counted(num_envs, 'environment')}, "
                f"{_origin(spec, candidate)}."
            )
            return found
    return spec


def _holds_contexts(spec: RunSpec, plan: PlacementPlan) -> bool:
    """Whether each share holds a CUDA context besides the rollouts."""
    need = CONTEXT_BYTES + rollout_memory(spec, spec.env.info(), on_gpu=True).bytes_at(spec.gmi.envs)
    return all(plan.memory_bytes(index) >= need for index in range(plan.num_gmis))


def _origin(spec: RunSpec, candidate: _Candidate) -> str:
    """Whether it was measured here, where it comes from, and what measures it."""
    if candidate.source == _HERE:
        return _HERE
    offer = f"; `rayagi search {spec.env.id}` measures it" if spec.algorithm == "ppo" else ""
    return f"not measured on this machine ({candidate.source}){offer}"


def _candidates(spec: RunSpec, machine: Machine) -> Iterator[_Candidate]:
    """Layouts to try, in order."""
    store = SearchStore(spec, machine)
    here = store.load_note(_SEARCH)
    with suppress(*_DAMAGED):
        if here is not None:
            yield _recorded(here, _HERE)
    yield from _same_gpu(store)
    yield from _published(spec, machine)


def _recorded(note: dict[str, Any], source: str) -> _Candidate:
    return _Candidate(gmis_per_gpu=int(note["gmis"]), num_envs=int(note["num_envs"]), source=source)


def _same_gpu(store: SearchStore) -> Iterator[_Candidate]:
    """Complete searches of the same task and algorithm on the same GPU model, by any version, the newest first."""
    files = sorted(store.path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files:
        with suppress(OSError, *_DAMAGED):
            stored = json.loads(path.read_text())
            key, note = stored["key"], stored["notes"][_SEARCH]
            same = _of_search(key) == _of_search(store.key)
            if same and note["complete"] and path != store.path:
                name = key["machine"]["nodes"][0]["gpus"][0][0]
                yield _recorded(note, f"a recorded search on {name}")


def _of_search(key: dict[str, Any]) -> tuple[Any, ...]:
    """What has to be the same: task, engine, algorithm, and the GPUs' name, memory and SMs."""
    task = key["task"]
    gpus = {tuple(gpu) for node in key["machine"]["nodes"] for gpu in node["gpus"]}
    return task["env"], task["algorithm"], task["gmi"]["template"], gpus


def _published(spec: RunSpec, machine: Machine) -> Iterator[_Candidate]:
    """The papers' GMIs and environments, or one GMI with MuJoCo Warp; fewer where cores or memory do not suffice for them.

    A GMI has a core at least. With physics on cores, each of its cores has the preset's environments.
    """
    engine = spec.env.factory().engine
    on_gpu = engine in GPU_ENGINES
    most, source = (1, _ONE_PROCESS) if engine == "mujoco_warp" else (PAPER_GMIS_PER_GPU, _PAPERS)
    cores_per_gpu = min(
        len(node.usable_cores) // len(node.usable_gpus) for node in machine.nodes if node.usable_gpus
    )
    for gmis in range(min(most, max(1, cores_per_gpu)), 0, -1):
        num_envs = 2 ** ((PAPER_ENVS_PER_GPU // gmis).bit_length() - 1)  # a power of two, as in Algorithm 1
        if not on_gpu:
            num_envs = min(num_envs, spec.gmi.envs * max(1, cores_per_gpu // gmis))
        while num_envs >= spec.gmi.envs:
            yield _Candidate(gmis_per_gpu=gmis, num_envs=num_envs, source=source)
            num_envs //= 2
