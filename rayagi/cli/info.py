"""``rayagi info``: the machine's devices, and which backends can share them."""

from __future__ import annotations

import argparse
import os
from shlex import quote

from placement.backends import BACKENDS
from placement.inventory import cluster_machine, dump_machine, load_machine, local_machine, machine_text
from placement.inventory.describing import describe
from placement.text import aligned
from placement.types import Machine


def run(arguments: argparse.Namespace) -> int:
    """Print the machine, or record it; returns the exit code."""
    machine = _machine(arguments)
    if arguments.json == "-":
        print(machine_text(machine), end="")
    elif arguments.json is not None:
        dump_machine(machine, arguments.json)
        print(
            f"Recorded in {arguments.json}. `rayagi plan TASK --machine {quote(str(arguments.json))}` plans for it anywhere."
        )
    else:
        print("\n".join([describe(machine), "", *_backend_lines(machine)]))
    return 0


def _machine(arguments: argparse.Namespace) -> Machine:
    if arguments.machine is not None:
        return load_machine(arguments.machine)
    if not arguments.cluster:
        return local_machine()
    # Imported here: without a cluster Ray is not needed.
    from rayagi.coordinator.cluster import connected

    with connected(os.environ.get("RAY_ADDRESS") or "auto"):
        return cluster_machine()


def _backend_lines(machine: Machine) -> list[str]:
    """Availability of each backend per node: on its first GPU, and on others that differ."""
    rows: list[tuple[str, ...]] = [("node", "backend", "usable", "why")]
    for node in machine.nodes:
        for name, backend in BACKENDS.items():
            answers: dict[str, tuple[str, str]] = {}
            for gpu in (None,) if name == "cpu" or not node.gpus else node.gpus:
                found = backend.availability(node, gpu)
                why = f"{found.reason}. {found.hint}" if found.hint else found.reason
                general = why if gpu is None else why.replace(gpu.uuid, "GPU")
                answers.setdefault(general, ("yes" if found.usable else "no", why))
            rows += [(node.name, name, usable, why) for usable, why in answers.values()]
    return aligned(rows)
