"""What the training experiment compares, and what it projects where nothing could be measured. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from collectives.alphabeta import NOMINAL_MODEL
from collectives.layout import Layout
from collectives.planner import CompositionPlan, plan_composition

BASELINE = "ip_only"
PAPERS_PRIMITIVES = ("ip", "rp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Training on one layout with one composition.

    Attributes:
        layout: as the papers write it, 2G3T
        model: the benchmark whose size the networks have
        gradient_bytes: reduced at once
        composition: by which
        role: baseline; chosen, by the planner from the profile; runner-up, where it chose the baseline
        basis: what the throughput is: measured, or projected from what
        steps_per_s: environment steps of all GMIs; the median where it is measured
        repeats: all that was measured
        projected_steps_per_s: from the baseline's iterations and the two reductions' costs by the alpha-beta model
        reduction_ms: one reduction by the alpha-beta model
    """

    layout: str
    model: str
    gradient_bytes: int
    composition: str
    role: str
    basis: str
    steps_per_s: float
    repeats: tuple[float, ...]
    projected_steps_per_s: float
    reduction_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What an iteration of one model on one layout is made of."""

    steps: int
    """Environment steps of all GMIs."""
    reductions: int
    """Of gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """One model on one layout: its plan from the profile measured there, and steps per second by composition."""

    plan: CompositionPlan
    work: Work
    rates: Mapping[str, Sequence[float]]


def arms(plan: CompositionPlan) -> dict[str, str]:
    """Compositions to train with, and the role of each: the baseline and the choice, or the next best if they are one."""
    if plan.chosen != BASELINE:
        return {BASELINE: "baseline", plan.chosen: "chosen"}
    others = sorted((c for c in plan.candidates if c.name != BASELINE), key=lambda c: c.model_s)
    return {BASELINE: "baseline, chosen", **{c.name: "runner-up" for c in others[:1]}}


def with_other_reductions(rate: float, work: Work, from_s: float, to_s: float) -> float:
    """Steps per second where each reduction takes ``to_s`` instead of ``from_s`` and the rest stays."""
    return work.steps / (work.steps / rate + work.reductions * (to_s - from_s))


def with_more_members(rate: float, work: Work, from_s: float, to_s: float, times: float) -> float:
    """Steps per second of ``times`` as many members on the same cores, all busy: they compute ``times`` as long."""
    computing_s = work.steps / rate - work.reductions * from_s
    return times * work.steps / (times * computing_s + work.reductions * to_s)


def measured_rows(layout: str, model: str, trained: Trained) -> list[Row]:
    """What was measured, beside its projection from the baseline."""
    plan = trained.plan
    baseline = statistics.median(trained.rates[BASELINE])
    baseline_s = plan.candidate(BASELINE).model_s
    return [
        Row(
            layout=layout,
            model=model,
            gradient_bytes=plan.nbytes,
            composition=name,
            role=role,
            basis="measured, devices are labels",
            steps_per_s=statistics.median(trained.rates[name]),
            repeats=tuple(trained.rates[name]),
            projected_steps_per_s=with_other_reductions(
                baseline, trained.work, baseline_s, plan.candidate(name).model_s
            ),
            reduction_ms=1e3 * plan.candidate(name).model_s,
        )
        for name, role in arms(plan).items()
    ]


def projected_rows(layout: str, model: str, plan: CompositionPlan, known: Trained) -> list[Row]:
    """Rows of a layout that was not measured, from one that was and the alpha-beta model fitted there."""
    baseline = statistics.median(known.rates[BASELINE])
    from_s = known.plan.candidate(BASELINE).model_s
    times = plan.layout.world_size / known.plan.layout.world_size
    rows = []
    for name, role in arms(plan).items():
        own_s = plan.candidate(name).model_s
        rate = with_more_members(baseline, known.work, from_s, own_s, times)
        rows.append(
            Row(
                layout=layout,
                model=model,
                gradient_bytes=plan.nbytes,
                composition=name,
                role=role,
                basis=f"projected from {known.plan.layout}",
                steps_per_s=rate,
                repeats=(),
                projected_steps_per_s=rate,
                reduction_ms=1e3 * own_s,
            )
        )
    return rows


def nominal_table(layouts: Mapping[str, str], sizes: Mapping[str, int]) -> str:
    """One reduction on a DGX A100 by nominal rates, IP-only against the choice; nothing in it was measured."""
    lines = [
        "| layout | model | ip_only ms | chosen | ms | the paper's projection would choose |",
        "|---" * 6 + "|",
    ]
    for layout, text in layouts.items():
        for model, nbytes in sizes.items():
            plan = plan_composition(Layout.parse(text), nbytes, NOMINAL_MODEL, PAPERS_PRIMITIVES)
            by_paper = min(plan.candidates, key=lambda candidate: candidate.paper.derived_s)
            cells = (
                layout,
                model,
                f"{1e3 * plan.candidate(BASELINE).model_s:.3g}",
                plan.chosen,
                f"{1e3 * plan.candidate(plan.chosen).model_s:.3g}",
                by_paper.name,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """Markdown; spread is over the repeats."""
    lines = [
        "| layout | model | composition | role | steps/s | lowest - highest | of ip_only | projected | "
        "one reduction ms | basis |",
        "|---" * 10 + "|",
    ]
    baselines = {(row.layout, row.model): row for row in rows if row.composition == BASELINE}
    for row in rows:
        spread = f"{min(row.repeats):.0f} - {max(row.repeats):.0f}" if row.repeats else "-"
        ratio = row.steps_per_s / baselines[row.layout, row.model].steps_per_s
        cells = (
            row.layout,
            row.model,
            row.composition,
            row.role,
            f"{row.steps_per_s:.0f}",
            spread,
            f"{ratio:.3f}",
            f"{row.projected_steps_per_s:.0f}",
            f"{row.reduction_ms:.3g}",
            row.basis,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
