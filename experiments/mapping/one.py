"""Measures one template: throughput and memory. Or what the model needs to predict it.

    python -m experiments.mapping.one Ant-v5 synchronous e_at --num-envs 64 --seconds 10
    python -m experiments.mapping.one Ant-v5 costs --num-envs 64

Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import torch

from experiments.mapping.cases import Case, spec_of, template_of
from placement.inventory import local_machine
from rayagi.coordinator.profiling import unit_costs_of
from rayagi.coordinator.session import Session
from rayagi.envs import env_info
from rayagi.models.policy import new_policy
from rayagi.planning import serving_plan_of
from rayagi.serving.program import ServingJob, merged_results
from rayagi.serving.templates import serving_factory

WARM_UP_ITERATIONS = 2
WARM_UP_STEPS = 64
PHASES = ("simulate_s", "act_s", "exchange_s", "wait_s", "update_s", "sync_s")


def trained(case: Case, seconds: float) -> dict[str, object]:
    """Environment steps per second of training, as the driver sees them, in one request."""
    with Session(case.spec) as session:
        session.train(1)
        began = time.perf_counter()
        session.train(WARM_UP_ITERATIONS)
        iterations = max(2, round(seconds * WARM_UP_ITERATIONS / (time.perf_counter() - began)))
        began = time.perf_counter()
        results = session.train(iterations)
        wall_s = time.perf_counter() - began
        steps = sum(result.metrics["env_steps"] for result in results)
        phases = {
            name: sum(result.metrics.get(name, 0.0) for result in results) / iterations for name in PHASES
        }
        return {
            "steps_per_s": steps / wall_s,
            "num_gmis": session.plan.num_gmis,
            "num_trainers": len(session.plan.hosting("trainer")),
            "phases_s": phases,
            **held(worker.pid for worker in session.workers),
        }


def served(case: Case, seconds: float) -> dict[str, object]:
    """Environment steps per second of serving with an untrained policy, as the driver sees them, in one request."""
    spec = case.spec
    policy = new_policy(spec, env_info(case.task), torch.device("cpu"))
    shared: dict[str, object] = {"learner": {"model": policy.model.state_dict()}}
    if policy.normaliser is not None:
        shared["obs_normaliser"] = policy.normaliser.state_dict()
    job = ServingJob(spec=spec, shared=shared, version=0, greedy=False, seed=0)
    template = case.template.name
    with Session(
        spec,
        factory=serving_factory(job, template),
        make_plan=lambda machine: serving_plan_of(spec.gmi, template, machine),
    ) as session:
        session.run("serve", WARM_UP_STEPS)
        began = time.perf_counter()
        session.run("serve", WARM_UP_STEPS)
        steps = max(WARM_UP_STEPS, round(seconds * WARM_UP_STEPS / (time.perf_counter() - began)))
        began = time.perf_counter()
        whole = merged_results(session.run("serve", steps))
        wall_s = time.perf_counter() - began
        return {
            "steps_per_s": whole.env_steps / wall_s,
            "num_gmis": session.plan.num_gmis,
            "num_trainers": 0,
            "step_p50_s": whole.step.percentile(0.5),
            "step_p99_s": whole.step.percentile(0.99),
            "simulate_p50_s": whole.simulate.percentile(0.5),
            "act_p50_s": whole.act.percentile(0.5),
            **held(worker.pid for worker in session.workers),
        }


def held(pids: Iterable[int]) -> dict[str, object]:
    """Memory of the GMIs' processes in all: resident, and with pages that several share divided among them."""
    bytes_of = {"Rss": 0, "Pss": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in bytes_of:
                bytes_of[name] += int(value.split()[0]) * 1024
    return {"resident_bytes": bytes_of["Rss"], "proportional_bytes": bytes_of["Pss"]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task")
    parser.add_argument("mode", choices=["serving", "synchronous", "costs"])
    parser.add_argument("template", nargs="?")
    parser.add_argument("--num-envs", type=int, required=True)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    if given.mode == "costs":
        found: dict[str, object] = asdict(unit_costs_of(spec_of(given.task, given.num_envs), local_machine()))
    else:
        template = template_of(given.mode, given.template)
        case = Case(task=given.task, mode=given.mode, template=template, num_envs=given.num_envs)
        found = served(case, given.seconds) if given.mode == "serving" else trained(case, given.seconds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
