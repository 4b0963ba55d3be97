"""Unequal GMIs chosen by the throughput model, and kept only if a measurement by turns confirms them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from placement.errors import PlanError
from placement.search import TrialFailure
from placement.types import Machine
from rayagi.config.spec import RunSpec
from rayagi.coordinator.cluster import connected
from rayagi.coordinator.model_validation import load, validation_text
from rayagi.coordinator.probe import VALIDATION, SessionProbe
from rayagi.coordinator.profiling import cached_unit_costs
from rayagi.coordinator.search_store import SearchStore
from rayagi.coordinator.template_choice import TIE, predictions
from rayagi.planning import plan_of, uses_gpus

_TURNS = ("equal", "unequal", "unequal", "equal")
"""Order of the measurements: drift of the machine's speed affects both alike."""


def proposed_sizes(spec: RunSpec, machine: Machine) -> tuple[float, ...] | None:
    """Sizes that use all cores where equal GMIs leave some idle; None if they leave none, or on GPUs or several nodes.

    As many GMIs as in the equal plan, in whole cores that differ by one: so the total batch stays, and the slowest GMI is as
    fast as possible.
    """
    if uses_gpus(spec, machine) or len(machine.nodes) > 1 or spec.gmi.threads_per_gmi is not None:
        return None
    count, cores = plan_of(_with_sizes(spec, None), machine).num_gmis, machine.num_cores
    if cores % count == 0:
        return None
    return tuple(float(cores // count + (index < cores % count)) for index in range(count))


def chosen_sizes(
    spec: RunSpec,
    machine: Machine,
    *,
    log: Callable[[str], None],
    may_search: bool = True,
    may_repeat: bool = True,
    folder: Path | None = None,
) -> tuple[float, ...] | None:
    """The sizes to use; None: equal GMIs. Logs the reason. A measurement is cached and not repeated, except one that may end
    otherwise and was made by another process, if ``may_repeat``.

    Raises:
        PlanError: the machine cannot hold the equal plan; or a measurement is missing, and ``may_search`` is False.
        GmiLostError, GmiSilentError, ClusterUnreachableError, ReservationError: nothing could be measured.
    """
    sizes = proposed_sizes(spec, machine)
    if sizes is None:
        log(
            "Equal GMIs: they leave no core idle that unequal ones could use, or are not on the cores of one node."
        )
        return None
    costs = cached_unit_costs(spec, machine, log=log, may_measure=may_search, folder=folder)
    equal, unequal = predictions(costs, [plan_of(_with_sizes(spec, each), machine) for each in (None, sizes)])
    gain, text = unequal.steps_per_s / equal.steps_per_s, "+".join(f"{size:g}" for size in sizes)
    known = validation_text(load(), machine, spec.algorithm, on_gpu=False)
    log(f"Sizes {text}: predicted {gain:.2f} of equal GMIs. {known}")
    if gain < TIE:
        log("Equal GMIs: the predicted gain is too small to be measured.")
        return None
    found = _turns(spec, machine, sizes, log, may_search=may_search, may_repeat=may_repeat, folder=folder)
    better = all(found.values()) and min(found["unequal"]) > max(found["equal"])
    log(f"{text if better else 'Equal GMIs'}: {_turns_text(found)}.")
    return sizes if better else None


def _turns(
    spec: RunSpec,
    machine: Machine,
    sizes: tuple[float, ...],
    log: Callable[[str], None],
    *,
    may_search: bool,
    may_repeat: bool,
    folder: Path | None,
) -> dict[str, list[float]]:
    """The cached measurements by turns, or new ones."""
    text = "+".join(f"{size:g}" for size in sizes)
    store, note = SearchStore(spec, machine, folder), f"sizes {text}, {spec.gmi.envs} environments"
    found = store.load_comparison(note, may_repeat=may_repeat)
    if found is None:
        if not may_search:
            raise PlanError(
                "sizes left to a measurement",
                f"{text} was not compared with equal GMIs on this machine with this version",
                "Start the run, which compares them, or give sizes",
            )
        log("Comparing them by turns: about a minute.")
        found, failure = _measured_by_turns(spec, machine, sizes)
        is_final = failure is None or failure.is_final
        store.save_comparison(note, found, is_final=is_final, log=log)
    return found


def _measured_by_turns(
    spec: RunSpec, machine: Machine, sizes: tuple[float, ...]
) -> tuple[dict[str, list[float]], TrialFailure | None]:
    """Environment steps per second of all GMIs in each turn; empty for what does not run, with its failure."""
    found: dict[str, list[float]] = {"equal": [], "unequal": []}
    with connected():
        for turn in _TURNS:
            candidate = _with_sizes(spec, sizes if turn == "unequal" else None)
            with SessionProbe(candidate, machine) as probe:
                outcome = probe.measure(len(sizes), spec.gmi.envs, VALIDATION)
            if isinstance(outcome, TrialFailure):
                return found | {turn: []}, outcome
            found[turn].append(outcome.steps_per_s * len(sizes))
    return found, None


def _turns_text(found: dict[str, list[float]]) -> str:
    if not all(found.values()):
        return "a turn failed"
    texts = {name: " and ".join(f"{speed:,.0f}" for speed in speeds) for name, speeds in found.items()}
    return f"measured {texts['unequal']} steps/s unequal, {texts['equal']} equal"


def _with_sizes(spec: RunSpec, sizes: tuple[float, ...] | None) -> RunSpec:
    return spec.with_gmi(slices=sizes)
