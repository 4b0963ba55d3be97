"""Throughput and memory of one case, and the unit costs that the model predicts from."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from experiments.mapping.cases import Case
from placement.inventory import local_machine
from placement.templates import UnitCosts, estimate
from rayagi.coordinator.profiling import unit_costs_of
from rayagi.coordinator.session import Session

WARM_UP_ITERATIONS = 2


def measure(case: Case, seconds: float) -> dict[str, object]:
    """Environment steps per second of all GMIs, and what their processes hold of memory."""
    return {**asdict_of(case), **_trained(case, seconds)}


def asdict_of(case: Case) -> dict[str, object]:
    """A case in a result file."""
    return {"task": case.task, "mode": case.mode, "template": case.template.name, "num_envs": case.num_envs}


def _trained(case: Case, seconds: float) -> dict[str, object]:
    with Session(case.spec) as session:
        session.train(1)
        began = time.perf_counter()
        session.train(WARM_UP_ITERATIONS)
        iterations = max(2, round(seconds * WARM_UP_ITERATIONS / (time.perf_counter() - began)))
        began = time.perf_counter()
        results = session.train(iterations)
        wall_s = time.perf_counter() - began
        env_steps = sum(result.metrics["env_steps"] for result in results)
        phases = {
            name: sum(result.metrics.get(name, 0.0) for result in results) / iterations
            for name in ("simulate_s", "act_s", "exchange_s", "update_s", "sync_s")
        }
        return {
            "steps_per_s": env_steps / wall_s,
            "iteration_s": wall_s / iterations,
            "phases_s": phases,
            "gmis": len(session.landings),
            **held(landing.pid for landing in session.landings),
        }


def held(pids: Iterable[int]) -> dict[str, float]:
    """Memory of processes in all, in bytes: resident, and with what several share divided among them."""
    resident = proportional = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "Rss":
                resident += int(value.split()[0]) * 1024
            if name == "Pss":
                proportional += int(value.split()[0]) * 1024
    return {"resident_bytes": float(resident), "proportional_bytes": float(proportional)}


def costs_of(task: str, num_envs: int) -> UnitCosts:
    """Table 1 of the paper for a task at a size, measured here in one GMI of one core."""
    from experiments.mapping.cases import SYNCHRONOUS_BASELINE

    return unit_costs_of(SYNCHRONOUS_BASELINE(task, num_envs), local_machine())


def predicted(case: Case, costs: UnitCosts, num_gmis: int) -> dict[str, object]:
    """What the model says of a case."""
    found = estimate(case.template, costs, num_gmis=num_gmis)
    return {"steps_per_s": found.steps_per_s, "resource": found.resource, "costs": asdict(costs)}
