"""``rayagi comm plan``: shows the composition that a layout would use, the projected costs, and the reason."""

from __future__ import annotations

import argparse
import json

from collectives.alphabeta import NOMINAL_MODEL, AlphaBetaModel
from collectives.layout import Layout
from collectives.planner import plan_composition
from collectives.profile import CostProfile

DEFAULT_BYTES = 440_000
"""Default size: Ant's float32 gradients in the preprint's Table 7."""


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; returns the exit code.

    Raises:
        LayoutError, ProfileError, CompositionError, UnknownEnvironmentError: invalid arguments.
    """
    layout = Layout.parse(arguments.layout)
    model = (
        NOMINAL_MODEL
        if arguments.profile is None
        else AlphaBetaModel.fit(CostProfile.load(arguments.profile))
    )
    plan = plan_composition(layout, _nbytes(arguments), model)
    if arguments.json:
        print(json.dumps(plan.to_dict(), indent=1))
    else:
        print(f"{plan.explain()}\n\n{plan.schedule.table()}")
    return 0


def _nbytes(arguments: argparse.Namespace) -> int:
    """Bytes of the bucket: as given, or of the task's networks with its preset."""
    if arguments.task is not None:
        # Imported here: torch takes seconds, and only a task needs it.
        from rayagi.config.presets import preset
        from rayagi.models.networks import FlatParameters, make_model

        spec = preset(arguments.task)
        return FlatParameters(make_model(spec.env.info(), spec.network)).gradients.nbytes
    if arguments.params is not None:
        return 4 * int(arguments.params)
    return int(arguments.size or DEFAULT_BYTES)
