"""Chooses the serving template and the program of its GMIs."""

from __future__ import annotations

from collections.abc import Callable

from actors.gmi import WorkloadFactory
from placement.types import Machine
from rayagi.config.spec import RunSpec
from rayagi.serving.dp_only import DpOnlyServingFactory
from rayagi.serving.program import ServingJob
from rayagi.serving.task_dedicated import TaskDedicatedServingFactory

TIE = 1.02
"""Templates whose predictions differ by less count as equally fast: unit costs are not more accurate."""


def chosen_template(
    spec: RunSpec, asked: str, *, machine: Callable[[], Machine], log: Callable[[str], None]
) -> str:
    """The requested template; for ``auto``, the fastest by the placement model (GMI-DRL, eq. 2), with the reason logged.

    Of several equally fast ones, the one that moves the fewest bytes between GMIs.

    Raises:
        GmiLostError, GmiSilentError, ClusterUnreachableError, ReservationError: unit costs could not be measured.
    """
    if asked != "auto":
        return asked
    # Imported here: only auto measures.
    from placement.templates import choose, explain
    from rayagi.coordinator.profiling import cached_unit_costs

    costs = cached_unit_costs(spec, machine(), log=log)
    estimates = choose(costs, "serving")
    log(explain(estimates, costs))
    close = [each for each in estimates if each.steps_per_s * TIE >= estimates[0].steps_per_s]
    chosen = min(close, key=lambda each: each.communication_bytes)
    if len(close) > 1:
        log(f"{len(close)} of them are within {TIE - 1:.0%}: {chosen.template.name}, which moves the least.")
    return chosen.template.name


def serving_factory(job: ServingJob, template: str) -> WorkloadFactory:
    """The factory of each GMI's program."""
    return DpOnlyServingFactory(job) if template == "dp_only" else TaskDedicatedServingFactory(job)
