"""Choice of a template: the throughput model predicts each possible one, and short runs by turns decide between the best.

Nothing is measured where the model may rank, and the default is faster than the others by more than the model's error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from placement.errors import PlanError
from placement.plan import PlacementPlan
from placement.role_layout import SERVING_WORKER_TYPES
from placement.text import aligned
from placement.types import Machine
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.learning import Template
from rayagi.config.spec import RunSpec
from rayagi.coordinator.model_validation import ModelValidation, load, may_compare, ranks, validation_text
from rayagi.coordinator.search_store import Measuring, SearchStore
from rayagi.coordinator.throughput_model import PlanThroughput, UnitCosts, layout_of, predict
from rayagi.planning import plan_of, serving_plan_of, uses_gpus

if TYPE_CHECKING:
    from rayagi.coordinator.template_probe import Comparison, MeasureFn

NameT = TypeVar("NameT", bound=str)

_SERVING_TEMPLATES = sorted(SERVING_WORKER_TYPES, key=lambda name: name != "dp_only")
"""The default first."""
TIE = 1.05
"""Templates whose predictions differ by less count as equally fast: such pairs are not validated either."""
MAX_CANDIDATES = 3
"""Most templates that are measured."""
MAX_ITERATION_S = 40.0
"""Templates are not measured if an iteration is predicted to last longer."""


def predictions(costs: UnitCosts, plans: Sequence[PlacementPlan]) -> list[PlanThroughput]:
    """The prediction of each plan, in their order."""
    return [predict(costs, layout_of(plan)) for plan in plans]


def training_plans(spec: RunSpec, machine: Machine) -> list[PlacementPlan]:
    """The plan of each template of the spec's algorithm that this machine can hold, the default template first."""
    return _possible(
        lambda name: plan_of(on_template(spec, name), machine), DEFINITIONS[spec.algorithm].templates
    )


def on_template(spec: RunSpec, template: Template) -> RunSpec:
    """The run on another template; dp_only has no learners of its own."""
    num_learners = None if template == "dp_only" else spec.gmi.num_learners
    return spec.with_gmi(template=template, num_learners=num_learners)


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
    found: Sequence[PlanThroughput],
    spec: RunSpec,
    machine: Machine,
    validation: ModelValidation | None,
    *,
    serving: bool = False,
) -> tuple[PlanThroughput, str]:
    """The template to use by the model alone, with the reason and the model's error as sentences.

    The fastest one where the model may rank; of several equally fast ones, the first given. Elsewhere the first given, which
    is the default.
    """
    on_gpu, kind = uses_gpus(spec, machine), _kind(spec, serving)
    known = validation_text(validation, machine, kind, on_gpu=on_gpu)
    if len(found) == 1 or not ranks(validation, machine, kind, on_gpu=on_gpu):
        why = _without_ranking([each.layout.template for each in found], _offered(spec, serving))
        return found[0], f"{why}. {known}"
    best = max(found, key=lambda each: each.steps_per_s)
    chosen = next(each for each in found if each.steps_per_s * TIE >= best.steps_per_s)
    others = [each.steps_per_s for each in found if each is not chosen]
    gain = chosen.steps_per_s / max(others)
    text = f"{chosen.layout.template}: predicted {chosen.steps_per_s:,.0f} steps/s, {gain:.2f} of the next."
    return chosen, f"{text} {known}"


def candidates(found: Sequence[PlanThroughput], error: float | None) -> list[str]:
    """The templates to measure, at most ``MAX_CANDIDATES``, in the order given: the default, and the fastest predictions.

    Args:
        found: a prediction of each possible template, the default first
        error: the model's error e: those that it cannot tell from the fastest, p (1 + e) >= p_max (1 - e), are candidates.
            None: unknown, and no prediction is ruled out
    """
    fastest = sorted(found, key=lambda each: -each.steps_per_s)
    if error is not None:
        best = fastest[0].steps_per_s
        fastest = [each for each in fastest if each.steps_per_s * (1 + error) >= best * (1 - error)]
    measured = fastest[:MAX_CANDIDATES]
    if found[0] not in measured:
        measured = [found[0], *measured[: MAX_CANDIDATES - 1]]
    return [each.layout.template for each in found if each in measured]


def _error(validation: ModelValidation | None, *, ranked: bool) -> float | None:
    """The recorded error: its median where the model may rank. Elsewhere what nine of ten layouts kept to."""
    if validation is None:
        return None
    return validation.median_error if ranked else validation.p90_error


def _kind(spec: RunSpec, serving: bool) -> str:
    return "serving" if serving else spec.algorithm


def _offered(spec: RunSpec, serving: bool) -> Sequence[str]:
    return _SERVING_TEMPLATES if serving else DEFINITIONS[spec.algorithm].templates


def chosen(
    spec: RunSpec,
    machine: Machine,
    *,
    log: Callable[[str], None],
    serving: bool = False,
    measure: MeasureFn | None = None,
    measuring: Measuring = "unfinished",
) -> str:
    """The name of the template to use; logs the reason, with what was predicted and measured.

    Unit costs, and short runs of the best candidates, are measured if they are not cached. Nothing is measured on GPUs, on
    several hosts and on one core, nor where one template fits.

    Args:
        spec: the run
        machine: the machine of the run
        log: called with sentences
        serving: whether GMIs act without training
        measure: runs one turn of a template; None: trains
        measuring: what may be measured

    Raises:
        PlanError: no template fits; or a measurement is missing, and nothing may be measured.
        GmiLostError, GmiSilentError, ClusterUnreachableError, ReservationError: unit costs could not be measured.
    """
    if serving:
        plans = _possible(lambda name: serving_plan_of(spec.gmi, name, machine), _SERVING_TEMPLATES)
    else:
        plans = training_plans(spec, machine)
    validation, kind = load(), _kind(spec, serving)
    on_gpu = uses_gpus(spec, machine)
    if len(plans) == 1 or not may_compare(machine, on_gpu=on_gpu):
        why = _without_ranking([plan.template for plan in plans], _offered(spec, serving))
        log(f"Template {why}. {validation_text(validation, machine, kind, on_gpu=on_gpu)}")
        return plans[0].template
    # Imported here and below: most runs measure nothing.
    from rayagi.coordinator.profiling import cached_unit_costs

    costs = cached_unit_costs(spec, machine, log=log, may_measure=measuring != "nothing")
    found = predictions(costs, plans)
    ranked = ranks(validation, machine, kind, on_gpu=on_gpu)
    log(table(found, ranked=ranked))
    best, reason = choose(found, spec, machine, validation, serving=serving)
    names = candidates(found, _error(validation, ranked=ranked))
    if len(names) == 1:
        log(f"Template {reason}")
        return best.layout.template
    longest_s = max(
        costs.num_steps * sum(plan.envs) / each.steps_per_s
        for plan, each in zip(plans, found, strict=True)
        if plan.template in names
    )
    if longest_s > MAX_ITERATION_S:
        log(f"Template {reason} Not measured: an iteration would last up to {longest_s:,.0f} s.")
        return best.layout.template
    log(validation_text(validation, machine, kind, on_gpu=on_gpu))
    comparison = _compared(spec, machine, names, kind, measure, log, measuring)
    name = comparison.fastest(default=plans[0].template)
    text = comparison.text({each.layout.template: each.steps_per_s for each in found})
    if name is not None:
        log(f"Template {name}: {text}")
        return name
    if comparison.turns:  # the time budget ended it: of those that are not known to fail
        runnable = [each for each in found if each.layout.template not in comparison.failures]
        best, _ = choose(runnable, spec, machine, validation, serving=serving)
    log(f"Template {best.layout.template} by the model alone: {text}")
    return best.layout.template


def _compared(
    spec: RunSpec,
    machine: Machine,
    names: Sequence[str],
    kind: str,
    measure: MeasureFn | None,
    log: Callable[[str], None],
    measuring: Measuring,
) -> Comparison:
    """The cached comparison of these templates, or a new one. Raises as ``chosen`` does."""
    # Imported here: it loads torch and Ray, which choosing by the model alone does not need.
    from rayagi.coordinator.template_probe import compared, trained_steps_per_s

    gmi = spec.gmi
    return compared(
        SearchStore(spec, machine),
        # With the numbers that the store's key leaves out.
        f"{kind} templates {' '.join(sorted(names))}, {gmi.num_envs} environments, "
        f"{gmi.num_gmis or 'all'} GMIs, {gmi.gmis_per_gpu or 'any'} per GPU",
        names,
        lambda name: (measure or trained_steps_per_s)(spec, name),
        log=log,
        measuring=measuring,
        missing=PlanError(
            "a template left to a measurement",
            f"{', '.join(names)} were not compared on this machine with this version",
            "Start the run, which compares them, or give a template",
        ),
    )


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
