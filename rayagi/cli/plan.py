"""``rayagi plan``: how a machine would be cut, without starting anything."""

from __future__ import annotations

import argparse

from placement.inventory import load_machine, local_machine
from placement.plan import make_plan
from rayagi.cli.settings import spec_from


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; returns the exit code."""
    spec = spec_from(arguments)
    machine = local_machine() if arguments.machine is None else load_machine(arguments.machine)
    plan = make_plan(
        machine,
        backend=spec.gmi.backend,
        template=spec.gmi.template,
        num_gmis=spec.gmi.num_gmis,
        gmis_per_gpu=spec.gmi.gmis_per_gpu,
        num_envs=spec.gmi.num_envs,
        threads_per_gmi=spec.gmi.threads_per_gmi,
    )
    print(plan.table())
    return 0
