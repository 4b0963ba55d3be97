"""Choice of a template by the throughput model: a prediction for each possible one, and the fastest where it may rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from placement.errors import PlanError
from placement.plan import PlacementPlan
from placement.role_layout import SERVING_WORKER_TYPES
from placement.text import aligned
from placement.types import Machine
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.learning import Template
from rayagi.config.spec import RunSpec
from rayagi.coordinator.model_validation import Validation, load, ranks, validation_text
from rayagi.coordinator.throughput_model import PlanThroughput, UnitCosts, layout_of, predict
from rayagi.planning import plan_of, serving_plan_of, uses_gpus

NameT = TypeVar("NameT", bound=str)

_SERVING_TEMPLATES = sorted(SERVING_WORKER_TYPES, key=lambda name: name != "dp_only")
"""The default first."""
TIE = 1.05
"""Templates whose predictions differ by less count as equally fast: such pairs are not validated either."""


def predictions(costs: UnitCosts, plans: Sequence[PlacementPlan]) -> list[PlanThroughput]:
    """The prediction of each plan, in their order."""
    return [predict(costs, layout_of(plan)) for plan in plans]


def training_plans(spec: RunSpec, machine: Machine) -> list[PlacementPlan]:
    """The plan of each template of the spec's algorithm that this machine can hold, the default template first."""

    def on(template: Template) -> PlacementPlan:
        num_learners = None if template == "dp_only" else spec.gmi.num_learners
        gmi = replace(spec.gmi, template=template, num_learners=num_learners)
        return plan_of(replace(spec, gmi=gmi), machine)

    return _possible(on, DEFINITIONS[spec.algorithm].templates)


def serving_plans(spec: RunSpec, machine: Machine) -> list[PlacementPlan]:
    """The plan of each serving template that this machine can hold, dp_only first."""
    return _possible(lambda name: serving_plan_of(spec.gmi, name, machine), _SERVING_TEMPLATES)


def _possible(make_plan: Callable[[NameT], PlacementPlan], names: Sequence[NameT]) -> list[PlacementPlan]:
    plans, refused = list[PlacementPlan](), list[PlanError]()
    for name in names:
        try:
            plans.append(make_plan(name))
        except PlanError as error:
            refused.append(error)
    if not plans:
        raise refused[0]
    return plans


def _without_ranking(fitting: Sequence[str], offered: Sequence[str]) -> str:
    """Why the first of the fitting templates is taken where none is ranked."""
    first, default = fitting[0], offered[0]
    if len(offered) == 1:
        return f"{first} is the only template of the algorithm"
    if len(fitting) == 1:
        return f"{first} is the only template that fits"
    if first == default:
        return f"{first} is the default"
    return f"{first} is the first that fits, which the default, {default}, does not"


def choose(
    found: Sequence[PlanThroughput], spec: RunSpec, machine: Machine, validation: Validation | None
) -> tuple[PlanThroughput, str]:
    """The template to use, with the reason and the model's error as sentences.

    The fastest one where the model may rank; of several equally fast ones, the first given. Elsewhere the first given, which
    is the default.
    """
    on_gpu = uses_gpus(spec, machine)
    known = validation_text(validation, machine, on_gpu=on_gpu)
    if len(found) == 1 or not ranks(validation, machine, on_gpu=on_gpu):
        offered = DEFINITIONS[spec.algorithm].templates
        why = _without_ranking([each.layout.template for each in found], offered)
        return found[0], f"{why}. {known}"
    best = max(found, key=lambda each: each.steps_per_s)
    chosen = next(each for each in found if each.steps_per_s * TIE >= best.steps_per_s)
    others = [each.steps_per_s for each in found if each is not chosen]
    gain = chosen.steps_per_s / max(others)
    text = f"{chosen.layout.template}: predicted {chosen.steps_per_s:,.0f} steps/s, {gain:.2f} of the next."
    return chosen, f"{text} {known}"


def chosen(
    spec: RunSpec,
    machine: Machine,
    *,
    log: Callable[[str], None],
    serving: bool = False,
    may_measure: bool = True,
    folder: Path | None = None,
) -> str:
    """The name of the template to use, by unit costs that are measured if they are not cached; logs the reason.

    Nothing is measured where the model may not rank.

    Raises:
        PlanError: no template fits; or unit costs are missing, and ``may_measure`` is False.
        GmiLostError, GmiSilentError, ClusterUnreachableError, ReservationError: unit costs could not be measured.
    """
    plans = (serving_plans if serving else training_plans)(spec, machine)
    offered = _SERVING_TEMPLATES if serving else DEFINITIONS[spec.algorithm].templates
    validation = load()
    on_gpu = uses_gpus(spec, machine)
    if len(plans) == 1 or not ranks(validation, machine, on_gpu=on_gpu):
        name = plans[0].template
        why = _without_ranking([plan.template for plan in plans], offered)
        log(f"Template {why}. {validation_text(validation, machine, on_gpu=on_gpu)}")
        return name
    # Imported here: most runs measure nothing.
    from rayagi.coordinator.profiling import cached_unit_costs

    costs = cached_unit_costs(spec, machine, log=log, may_measure=may_measure, folder=folder)
    found = predictions(costs, plans)
    best, reason = choose(found, spec, machine, validation)
    log(f"{table(found, ranked=True)}\nTemplate {reason}")
    return best.layout.template


def table(found: Sequence[PlanThroughput], *, ranked: bool) -> str:
    """A line per prediction with its phases in ms; fastest first if the model may rank."""
    shown = sorted(found, key=lambda each: -each.steps_per_s) if ranked else found
    names = list(dict.fromkeys(name for each in shown for name in each.parts_s))
    head = ("template", "GMIs", "steps/s", *(f"{name} ms" for name in names), "bound by")
    rows = [
        (
            each.layout.template,
            str(len(each.layout.workers)),
            f"{each.steps_per_s:,.0f}",
            *(f"{1e3 * each.parts_s[name]:.3g}" if name in each.parts_s else "-" for name in names),
            each.bound_by,
        )
        for each in shown
    ]
    return "\n".join(aligned([head, *rows]))
