"""Measures one case: throughput and memory, with the plan that it ran on."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import torch

from experiments.mapping.cases import Case
from placement.plan import PlacementPlan
from rayagi.coordinator.decoupled import session_of
from rayagi.coordinator.session import Session
from rayagi.coordinator.throughput_model import ModelledPlan, layout_of
from rayagi.envs import env_info
from rayagi.models.policy import new_policy
from rayagi.planning import serving_plan_of
from rayagi.serving.program import ServingJob, merged_results
from rayagi.serving.templates import serving_factory

WARM_UP_ITERATIONS = 1
WARM_UP_STEPS = 64


def measured(case: Case, seconds: float) -> tuple[dict[str, object], ModelledPlan]:
    """Environment steps per second and memory of a case, for about so many seconds, and its layout."""
    return served(case, seconds) if case.kind == "serving" else trained(case, seconds)


def trained(case: Case, seconds: float) -> tuple[dict[str, object], ModelledPlan]:
    """Training, as the driver sees it, in one request."""
    with session_of(case.spec) as session:
        session.train(1)
        began = time.perf_counter()
        session.train(WARM_UP_ITERATIONS)
        iterations = max(2, round(seconds * WARM_UP_ITERATIONS / (time.perf_counter() - began)))
        began = time.perf_counter()
        results = session.train(iterations)
        wall_s = time.perf_counter() - began
        # Of what was trained on: free-running collectors go on at the end of a request.
        name = "train_samples" if case.template == "decoupled" else "env_steps"
        steps = sum(result.metrics.get(name, 0.0) for result in results)
        return _found(steps / wall_s, session.plan, (worker.pid for worker in session.workers))


def served(case: Case, seconds: float) -> tuple[dict[str, object], ModelledPlan]:
    """Serving with an untrained policy, as the driver sees it, in one request."""
    spec = case.spec
    policy = new_policy(spec, env_info(case.task), torch.device("cpu"))
    shared: dict[str, object] = {"learner": {"model": policy.model.state_dict()}}
    if policy.normaliser is not None:
        shared["obs_normaliser"] = policy.normaliser.state_dict()
    job = ServingJob(spec=spec, shared=shared, version=0, greedy=False, seed=0)
    with Session(
        spec,
        factory=serving_factory(job, case.template),
        make_plan=lambda machine: serving_plan_of(spec.gmi, case.template, machine),
    ) as session:
        session.run("serve", WARM_UP_STEPS)
        began = time.perf_counter()
        session.run("serve", WARM_UP_STEPS)
        steps = max(WARM_UP_STEPS, round(seconds * WARM_UP_STEPS / (time.perf_counter() - began)))
        began = time.perf_counter()
        whole = merged_results(session.run("serve", steps))
        wall_s = time.perf_counter() - began
        return _found(whole.env_steps / wall_s, session.plan, (worker.pid for worker in session.workers))


def _found(
    steps_per_s: float, plan: PlacementPlan, pids: Iterable[int]
) -> tuple[dict[str, object], ModelledPlan]:
    return {"steps_per_s": steps_per_s, "num_gmis": plan.num_gmis, **held(pids)}, layout_of(plan)


def held(pids: Iterable[int]) -> dict[str, object]:
    """Memory of the GMIs' processes in all: resident, and with pages that several share divided among them."""
    bytes_of = {"Rss": 0, "Pss": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in bytes_of:
                bytes_of[name] += int(value.split()[0]) * 1024
    return {"resident_bytes": bytes_of["Rss"], "proportional_bytes": bytes_of["Pss"]}
