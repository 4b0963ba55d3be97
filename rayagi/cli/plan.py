"""``rayagi plan``: how a machine would be cut, without starting anything."""

from __future__ import annotations

import argparse
import os

from placement.inventory import cluster_machine, load_machine, local_machine
from placement.types import Machine
from rayagi.cli.settings import spec_from
from rayagi.planning import plan_of


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; returns the exit code."""
    spec = spec_from(arguments)
    print(plan_of(spec, _machine(arguments)).table())
    return 0


def _machine(arguments: argparse.Namespace) -> Machine:
    """What is planned for: a recorded machine, else what `rayagi train` would run on."""
    if arguments.machine is not None:
        return load_machine(arguments.machine)
    if os.environ.get("RAY_ADDRESS", "local") in ("", "local"):
        return local_machine()
    # Imported here: without a cluster there is no need to wait for Ray.
    from rayagi.coordinator.cluster import connected

    with connected():
        return cluster_machine()
