"""``rayagi plan``: how a machine would be cut, without starting anything."""

from __future__ import annotations

import argparse

from placement.inventory import load_machine
from placement.types import Machine
from rayagi.cli.machines import machine_of_run
from rayagi.cli.settings import spec_from
from rayagi.coordinator.auto import resolved
from rayagi.planning import plan_of


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; returns the exit code."""
    machine = _machine(arguments)
    spec = resolved(spec_from(arguments), machine, may_search=False)
    print(plan_of(spec, machine).table())
    return 0


def _machine(arguments: argparse.Namespace) -> Machine:
    """What is planned for: a recorded machine, else what `rayagi train` would run on."""
    if arguments.machine is not None:
        return load_machine(arguments.machine)
    return machine_of_run()
