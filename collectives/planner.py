"""Planner: chooses the composition for a layout by projected and measured costs, and explains the choice."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from collectives.alphabeta import AlphaBetaModel
from collectives.compositions import compose, composition_names
from collectives.costs import Projection, project
from collectives.errors import CompositionError
from collectives.layout import Layout
from collectives.schedule import CollectiveSchedule, Primitive, Step

TOLERANCE = 0.2
"""Relative error of a projection beyond which the planner chooses again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateComposition:
    """A usable composition with its projected costs by both models."""

    schedule: CollectiveSchedule
    paper: Projection
    by_primitive_s: Mapping[Primitive, float]
    """Seconds by the alpha-beta model, summed over the steps of each primitive."""

    @property
    def name(self) -> str:
        """Name of the composition."""
        return self.schedule.composition

    @property
    def model_s(self) -> float:
        """Seconds of all steps by the alpha-beta model, the broadcasts included."""
        return sum(self.by_primitive_s.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class CompositionCost:
    """Cost of a composition in seconds: expected before its first use, and measured since."""

    expected_s: float
    measured_s: float
    """The minimum of all measurements: disturbances only add, and a minimum converges."""

    @property
    def error(self) -> float:
        """(measured - expected) / expected."""
        return self.measured_s / self.expected_s - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class CompositionPlan:
    """The choice among all candidates for a layout and a size. Immutable: ``record_measurement`` returns a new plan."""

    layout: Layout
    nbytes: int
    model: AlphaBetaModel
    """Alpha-beta costs; it may also know primitives that do not work here."""
    usable: frozenset[Primitive]
    candidates: tuple[CandidateComposition, ...]
    """In the order of ``composition_names``; no two with the same steps."""
    rejected: tuple[tuple[str, str], ...]
    """Names of the other compositions, with the reason."""
    chosen: str
    reason: str
    """Why it was chosen, with figures."""
    measured: Mapping[str, CompositionCost]
    """By composition."""

    @property
    def schedule(self) -> CollectiveSchedule:
        """The schedule that was chosen."""
        return self.candidate(self.chosen).schedule

    def candidate(self, name: str) -> CandidateComposition:
        """The candidate of that name. Raises KeyError where there is none."""
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        raise KeyError(name)

    def expected_s(self, name: str) -> float:
        """Expected seconds of a composition: as measured, else the alpha-beta model corrected per primitive.

        expected = sum over primitives p of model_s[p] * factor[p], with factor[p] from ``_factors``.
        """
        if name in self.measured:
            return self.measured[name].measured_s
        factors = self._factors()
        return sum(
            seconds * factors.get(primitive, 1.0)
            for primitive, seconds in self.candidate(name).by_primitive_s.items()
        )

    def _factors(self) -> dict[Primitive, float]:
        """Correction per primitive: mean of measured / model over the measured compositions that use it.

        Weighted with the primitive's share of each composition's model cost.
        """
        sums: dict[Primitive, float] = {}
        weights: dict[Primitive, float] = {}
        # factor[p] = sum_c w[c,p] r[c] / sum_c w[c,p], r[c] = measured_s / model_s, w[c,p] = model_s[c,p] / model_s[c].
        for name, measurement in self.measured.items():
            candidate = self.candidate(name)
            for primitive, seconds in candidate.by_primitive_s.items():
                weight = seconds / candidate.model_s
                ratio = measurement.measured_s / candidate.model_s
                sums[primitive] = sums.get(primitive, 0.0) + weight * ratio
                weights[primitive] = weights.get(primitive, 0.0) + weight
        return {primitive: sums[primitive] / weights[primitive] for primitive in sums}

    def for_size(self, nbytes: int) -> CompositionPlan:
        """The plan for buckets of another size, by the same model."""
        return plan_composition(self.layout, nbytes, self.model, self.usable)

    def without_measurements(self) -> CompositionPlan:
        """The same choice, with the measurements turned into expected costs.

        For measurements of another kind: only costs that were measured the same way can be compared.
        """
        candidates = []
        for candidate in self.candidates:
            factor = self.expected_s(candidate.name) / candidate.model_s if candidate.model_s else 1.0
            costs = {primitive: factor * s for primitive, s in candidate.by_primitive_s.items()}
            candidates.append(replace(candidate, by_primitive_s=costs))
        return replace(self, candidates=tuple(candidates), measured={})

    def record_measurement(self, measured_s: float) -> CompositionPlan:
        """Record the measured cost of the chosen composition, and choose again if the projection was too wrong.

        If it was wrong by more than 20 %, the candidate with the least expected cost is chosen. Otherwise the choice stands,
        unless another one was measured cheaper. The choice converges to the best measured composition: an unmeasured one is
        tried at most once, a measured one is left only for a cheaper one, and a measured cost only falls.

        Every rank must pass the same number, such as the slowest rank's mean over many operations. After a permanent change
        of the machine, profile it again.

        Raises:
            ValueError: not a positive, finite number of seconds.
        """
        if not 0 < measured_s < math.inf:
            raise ValueError(f"measured_s is {measured_s}; it must be positive and finite")
        if not self.schedule.steps:
            return self
        expected_s = self.expected_s(self.chosen)
        error = measured_s / expected_s - 1
        # The minimum of all measurements of this composition.
        before = self.measured.get(self.chosen, CompositionCost(expected_s=expected_s, measured_s=math.inf))
        now = replace(before, measured_s=min(before.measured_s, measured_s))
        known = replace(self, measured={**self.measured, self.chosen: now})
        # Within the tolerance only measured compositions compete, beyond it all candidates; ties keep the choice.
        wrong = abs(error) > TOLERANCE
        open_to = [c.name for c in self.candidates if wrong or c.name in known.measured]
        chosen = min(open_to, key=lambda name: (known.expected_s(name), name != self.chosen))
        comparison = (
            f"{self.chosen} cost {_ms(measured_s)} ms, {error:+.0%} from the {_ms(expected_s)} ms expected"
        )
        if chosen == self.chosen:
            verdict = "still the least expected" if wrong else f"within {TOLERANCE:.0%}, so it stays"
        else:
            how = "measured" if chosen in known.measured else "expected now"
            verdict = f"so {chosen} takes over at {_ms(known.expected_s(chosen))} ms {how}"
        return replace(known, chosen=chosen, reason=f"{comparison}; {verdict}")

    def explain(self) -> str:
        """A table of candidates with their costs in milliseconds, the rejected ones, the choice and its reason."""
        head = ("", "composition", "steps", "paper", "as printed", "alpha-beta", "measured")
        rows = [head, *(self._row(candidate) for candidate in self.candidates)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [
            f"{self.layout}, {self.nbytes} bytes; costs in ms, by the paper's formulas without the broadcast back, by its "
            "estimate as printed, and by the alpha-beta model"
        ]
        for row in rows:
            cells = [
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        lines += [f"   {name}: no, {reason}" for name, reason in self.rejected]
        lines += [f"chosen: {self.chosen}. {self.reason}.", f"alpha-beta: {self.model.origin}."]
        return "\n".join(lines)

    def _row(self, candidate: CandidateComposition) -> tuple[str, ...]:
        measurement = self.measured.get(candidate.name)
        return (
            "*" if candidate.name == self.chosen else "",
            candidate.name,
            str(len(candidate.schedule.steps)),
            _ms(candidate.paper.derived_s),
            _ms(candidate.paper.published_s),
            _ms(candidate.model_s),
            f"{_ms(measurement.measured_s)} ({measurement.error:+.0%})" if measurement else "-",
        )

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-ready values; seconds throughout."""
        return {
            "layout": str(self.layout),
            "nbytes": self.nbytes,
            "origin": self.model.origin,
            "chosen": self.chosen,
            "reason": self.reason,
            "steps": [
                {"op": step.op, "primitive": step.primitive, "groups": step.groups}
                for step in self.schedule.steps
            ],
            "candidates": [
                {
                    "composition": candidate.name,
                    "steps": len(candidate.schedule.steps),
                    "paper_s": candidate.paper.derived_s,
                    "paper_as_printed_s": candidate.paper.published_s,
                    "alpha_beta_s": candidate.model_s,
                    "measured_s": self.measured[candidate.name].measured_s
                    if candidate.name in self.measured
                    else None,
                }
                for candidate in self.candidates
            ],
            "rejected": dict(self.rejected),
        }


def plan_composition(
    layout: Layout, nbytes: int, model: AlphaBetaModel, available: Collection[Primitive] | None = None
) -> CompositionPlan:
    """Choose the composition with the least alpha-beta cost; among equal costs, with the fewest steps. A pure function.

    ``available``: primitives that work here; None: all of the model.

    Raises:
        CompositionError: no composition connects the layout with these primitives.
        ValueError: ``nbytes`` < 1.
    """
    if nbytes < 1:
        raise ValueError(f"{nbytes} bytes need no plan")
    units = model.unit_costs(layout, nbytes)
    usable = {primitive for primitive, _ in model.coefficients if available is None or primitive in available}
    candidates: list[CandidateComposition] = []
    rejected: list[tuple[str, str]] = []
    names_by_steps: dict[tuple[Step, ...], str] = {}
    # 1. A schedule per composition; those with unusable primitives or with an earlier one's steps are rejected.
    for name in composition_names(layout):
        try:
            schedule = compose(name, layout)
            _check_usable(schedule, usable, model)
            same = names_by_steps.setdefault(schedule.steps, name)
            if same != name:
                raise CompositionError(name, str(layout), f"the same steps as {same}")
        except CompositionError as error:
            rejected.append((name, error.reason))
            continue
        # 2. model_s = sum over steps of alpha + alpha_member g + (beta + beta_shared g p) moved (alphabeta.py).
        by_primitive: dict[Primitive, float] = {}
        for step in schedule.steps:
            seconds = model.step_s(step, layout, nbytes)
            by_primitive[step.primitive] = by_primitive.get(step.primitive, 0.0) + seconds
        candidates.append(
            CandidateComposition(
                schedule=schedule, paper=project(schedule, units), by_primitive_s=by_primitive
            )
        )
    if not candidates:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        raise CompositionError("every composition", str(layout), reasons)
    # 3. The least cost; among equal ones the fewest steps.
    ranked = sorted(candidates, key=lambda candidate: (candidate.model_s, len(candidate.schedule.steps)))
    return CompositionPlan(
        layout=layout,
        nbytes=nbytes,
        model=model,
        usable=frozenset(usable),
        candidates=tuple(candidates),
        rejected=tuple(rejected),
        chosen=ranked[0].name,
        reason=_reason(ranked),
        measured={},
    )


def _check_usable(schedule: CollectiveSchedule, usable: Collection[Primitive], model: AlphaBetaModel) -> None:
    """CompositionError if a step's primitive does not work here, or a model lacks its cost."""
    for step in schedule.steps:
        if step.primitive not in usable:
            reason = f"it needs {step.primitive}, which is not available"
            raise CompositionError(schedule.composition, str(schedule.layout), reason)
        for op in ("all_reduce", step.op):  # the paper's unit cost is that of an all-reduce
            if (step.primitive, op) not in model.coefficients:
                reason = f"{op} by {step.primitive} was not measured"
                raise CompositionError(schedule.composition, str(schedule.layout), reason)


def _reason(ranked: list[CandidateComposition]) -> str:
    """Why the first candidate was chosen, and what the paper's projection would have chosen."""
    best = ranked[0]
    if len(ranked) == 1:
        return (
            "the only one that can be used" if best.schedule.steps else "a single GMI has nothing to reduce"
        )
    second = ranked[1]
    ratio = second.model_s / best.model_s
    by_paper = min(ranked, key=lambda candidate: candidate.paper.derived_s)
    agrees = by_paper is best or by_paper.paper.derived_s == best.paper.derived_s
    return (
        f"{_ms(best.model_s)} ms by the alpha-beta model, {ratio:.2f} times as fast as the next, {second.name}; the "
        + (
            "paper's projection agrees"
            if agrees
            else f"paper's projection would take {by_paper.name} ({_ms(by_paper.paper.derived_s)} ms against "
            f"{_ms(best.paper.derived_s)}), without the broadcast back"
        )
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
