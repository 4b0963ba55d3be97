"""Unequal GMIs chosen by the throughput model, and kept only if a measurement by turns confirms them."""

from __future__ import annotations

from collections.abc import Callable

from placement.errors import PlanError
from placement.search import TrialFailure
from placement.types import Machine
from rayagi.config.spec import RunSpec
from rayagi.coordinator.model_validation import load, validation_text
from rayagi.coordinator.probe import VALIDATION, SessionProbe
from rayagi.coordinator.profiling import cached_unit_costs
from rayagi.coordinator.search_store import Measuring, SearchStore
from rayagi.coordinator.template_choice import TIE, predictions
from rayagi.coordinator.template_probe import compared
from rayagi.planning import plan_of, uses_gpus


def proposed_sizes(spec: RunSpec, machine: Machine) -> tuple[float, ...] | None:
    """Sizes that use all cores where equal GMIs leave some idle; None if they leave none, or on GPUs or several nodes.

    As many GMIs as in the equal plan, in whole cores that differ by one: so the total batch stays, and the slowest GMI is as
    fast as possible.
    """
    if uses_gpus(spec, machine) or len(machine.nodes) > 1 or spec.gmi.threads_per_gmi is not None:
        return None
    count, cores = plan_of(spec.with_gmi(slices=None), machine).num_gmis, machine.num_cores
    if cores % count == 0:
        return None
    return tuple(float(cores // count + (index < cores % count)) for index in range(count))


def chosen_sizes(
    spec: RunSpec,
    machine: Machine,
    *,
    log: Callable[[str], None],
    measuring: Measuring,
) -> tuple[float, ...] | None:
    """The sizes to use; None: equal GMIs. Logs the reason.

    Raises:
        PlanError: the machine cannot hold the equal plan; or a measurement is missing, and nothing may be measured.
        GmiLostError, GmiSilentError, ClusterUnreachableError, ReservationError: nothing could be measured.
    """
    sizes = proposed_sizes(spec, machine)
    if sizes is None:
        log(
            "Equal GMIs: they leave no core idle that unequal ones could use, or are not on the cores of one node."
        )
        return None
    costs = cached_unit_costs(spec, machine, log=log, may_measure=measuring != "nothing")
    equal, unequal = predictions(
        costs, [plan_of(spec.with_gmi(slices=each), machine) for each in (None, sizes)]
    )
    gain, text = unequal.steps_per_s / equal.steps_per_s, "+".join(f"{size:g}" for size in sizes)
    known = validation_text(load(), machine, spec.algorithm, on_gpu=False)
    log(f"Sizes {text}: predicted {gain:.2f} of equal GMIs. {known}")
    if gain < TIE:
        log("Equal GMIs: the predicted gain is too small to be measured.")
        return None
    found = compared(
        SearchStore(spec, machine),
        f"sizes {text}, {spec.gmi.envs} environments",
        ("equal", "unequal"),
        lambda turn: _turn(spec.with_gmi(slices=sizes if turn == "unequal" else None), machine, len(sizes)),
        log=log,
        measuring=measuring,
        missing=PlanError(
            "sizes left to a measurement",
            f"{text} was not compared with equal GMIs on this machine with this version",
            "Start the run, which compares them, or give sizes",
        ),
    )
    better = not found.failures and found.fastest(default="equal") == "unequal"
    speeds = {name: " and ".join(f"{speed:,.0f}" for speed in turns) for name, turns in found.turns.items()}
    measured = (
        f"measured {speeds['unequal']} steps/s unequal, {speeds['equal']} equal"
        if found.complete and not found.failures
        else "a turn is missing"
    )
    log(f"{text if better else 'Equal GMIs'}: {measured}.")
    return sizes if better else None


def _turn(spec: RunSpec, machine: Machine, num_gmis: int) -> float | TrialFailure:
    with SessionProbe(spec, machine) as probe:
        outcome = probe.measure(num_gmis, spec.gmi.envs, VALIDATION)
    return outcome if isinstance(outcome, TrialFailure) else outcome.steps_per_s * num_gmis
