"""Program factories: the program that the GMIs of each template run."""

from __future__ import annotations

from collections.abc import Callable

from actors.gmi import ProgramFactory
from rayagi.config.spec import RunSpec
from rayagi.monitoring.exporting import ExportingFactory


def template_factory(spec: RunSpec, run_name: str) -> ProgramFactory:
    """The program factory of the spec's template, with its metrics exported through Ray."""
    # Imported here: torch and the networks are not needed to plan.
    from rayagi.algorithms.collector_learner import collector_learner_factory
    from rayagi.algorithms.program import dp_only_factory
    from rayagi.algorithms.stepwise import stepwise_factory

    factories: dict[str, Callable[[RunSpec], ProgramFactory]] = {
        "dp_only": dp_only_factory,
        "ea_t": collector_learner_factory,
        "e_at": stepwise_factory,
        "dp_mp": stepwise_factory,
        "decoupled": collector_learner_factory,
    }
    return ExportingFactory(factories[spec.gmi.template](spec), run=run_name)
