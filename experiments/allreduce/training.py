"""Throughput of training with IP-only against other compositions (GMI-DRL Table 6; the preprint's Table 7).

    python -m experiments.allreduce.training

On 2G2T, 2G3T, 4G3T and 4G4T with networks of 1.1e5, 2.9e5 and 1.5e6 parameters, on Ant-v5. Layouts for which this machine
has cores enough are measured with real processes; their devices are labels, and Gloo stands in for rings over them. The
others are projected from what was measured. Reductions on a DGX A100 are projected from nominal rates. Writes
results/training_*.json and prints tables in Markdown.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from collectives.alphabeta import AlphaBetaModel
from collectives.layout import Layout
from collectives.planner import plan_composition
from experiments.allreduce.projection import (
    PAPERS_PRIMITIVES,
    Row,
    Trained,
    Work,
    arms,
    measured_rows,
    nominal_table,
    projected_rows,
    table,
)
from experiments.allreduce.trainers import ENVS_PER_GMI, MODELS, Model, TrainingMember
from experiments.scripts import command_line, origin, write_results
from placement.inventory import local_machine
from rayagi.benchmark.bench import make_case
from rayagi.benchmark.measure import LayoutMeasurement, TimingBudget, measure
from rayagi.benchmark.processes import MemberProcesses
from rayagi.benchmark.results import fitted, profile_of, rows_of
from rayagi.benchmark.results import table as bench_table
from rayagi.cli.comm_bench import MOST_PER_CORE

HERE = Path(__file__).parent
LAYOUTS = {"2G2T": "2x2", "2G3T": "2x3", "4G3T": "4x3", "4G4T": "4x4"}
ITERATIONS = 2
"""Of one composition before it is the other's turn."""


def work_of(layout: Layout, model: Model) -> Work:
    """What an iteration is made of."""
    ppo = model.spec(1).learning
    return Work(
        steps=layout.world_size * ENVS_PER_GMI * ppo.rollout_length,
        reductions=ppo.num_epochs * ppo.num_minibatches,
    )


def train_layout(
    layout: Layout, models: Sequence[Model], repeats: int, profile_s: float
) -> tuple[LayoutMeasurement, AlphaBetaModel, dict[str, Trained]]:
    """Profile the papers' compositions on a layout, then train every model on it. Results by the model's name."""
    every = make_case(layout, (), None)
    case = make_case(layout, [name for name in every.compositions if not name.startswith("device")], None)
    sizes = tuple(sorted(model.gradient_bytes() for model in models))
    measurement, trained = LayoutMeasurement(case=case), {}
    pace = TimingBudget(
        sizes=sizes,
        repeats=3,
        slice_s=profile_s / case.num_tasks(sizes, 3),
        before_each=lambda text: None,
    )
    with MemberProcesses(
        [partial(TrainingMember, rank, layout) for rank in range(layout.world_size)]
    ) as members:
        measure(members, pace, measurement)
        fit = fitted(profile_of([measurement], "this machine"))
        if fit is None:
            raise RuntimeError("a whole profile has two sizes of every step")
        for model in models:
            plan = plan_composition(layout, model.gradient_bytes(), fit, PAPERS_PRIMITIVES)
            work = work_of(layout, model)
            rates = _rates(members, model, list(arms(plan)), work, repeats)
            trained[model.name] = Trained(plan=plan, work=work, rates=rates)
            medians = {name: round(statistics.median(found)) for name, found in rates.items()}
            print(f"{layout} {model.name}: steps/s {medians}", flush=True)
    return measurement, fit, trained


def _rates(
    members: MemberProcesses, model: Model, compositions: Sequence[str], work: Work, repeats: int
) -> dict[str, list[float]]:
    """Steps per second of each repeat, compositions in turns."""
    members.ask("build", model, tuple(compositions))
    rates: dict[str, list[float]] = {name: [] for name in compositions}
    for repeat in range(repeats):
        for name in list(compositions)[:: 1 if repeat % 2 == 0 else -1]:
            spans = members.ask("train", name, ITERATIONS)
            wall_s = max(span.end_s for span in spans) - min(span.begin_s for span in spans)
            rates[name].append(ITERATIONS * work.steps / wall_s)
    for name in compositions:
        if len(set(members.ask("parameters", name))) != 1:
            raise RuntimeError(f"{name}: the replicas do not hold the same parameters")
    members.ask("end_programs")
    return rates


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help=f"of {ITERATIONS} iterations (default: 5)")
    parser.add_argument(
        "--profile-seconds", type=float, default=30.0, help="for each layout's profile (default: 30)"
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="default: all")
    parser.add_argument("--models", nargs="+", choices=[m.name for m in MODELS], help="default: all")
    parser.add_argument("--remark", default="", help="kept with the results, e.g. what else ran meanwhile")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the result file")
    given = parser.parse_args()
    models = [model for model in MODELS if given.models is None or model.name in given.models]
    cores = local_machine().num_cores
    rows: list[Row] = []
    measurements, costs = [], []
    last: tuple[AlphaBetaModel, dict[str, Trained]] | None = None
    for name in given.layouts:
        layout = Layout.parse(LAYOUTS[name])
        if layout.world_size <= MOST_PER_CORE * cores:
            measurement, fit, trained = train_layout(layout, models, given.repeats, given.profile_seconds)
            measurements.append(measurement)
            costs += rows_of([measurement], fit)
            last = fit, trained
            for model in models:
                rows += measured_rows(name, model.name, trained[model.name])
        elif last is not None:
            for model in models:
                plan = plan_composition(layout, model.gradient_bytes(), last[0], PAPERS_PRIMITIVES)
                rows += projected_rows(name, model.name, plan, last[1][model.name])
        else:
            print(f"{name}: too many processes for {cores} cores, and nothing smaller was measured")
    sizes = {model.name: model.gradient_bytes() for model in models}
    nominal = nominal_table({name: LAYOUTS[name] for name in given.layouts}, sizes)
    result = {
        "origin": origin(),
        "remark": given.remark,
        "iterations_per_repeat": ITERATIONS,
        "parameters_with_padding": {name: nbytes // 4 for name, nbytes in sizes.items()},
        "rows": [asdict(row) for row in rows],
        "reductions": [asdict(row) for row in costs],
    }
    path = given.out / f"training_{datetime.now(UTC):%Y-%m-%d_%H%M}.json"
    write_results(path, result)
    print(f"\n{table(rows)}\n\nReductions on a DGX A100, projected from nominal rates:\n\n{nominal}\n")
    print(f"{bench_table(measurements, costs, cores)}\n\nwritten: {path}")


if __name__ == "__main__":
    main()
