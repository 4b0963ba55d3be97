"""``rayagi cleanup``: restore this host's GPUs after killed runs."""

from __future__ import annotations

import argparse

from placement.errors import counted
from placement.ledger import Ledger, all_ledgers
from placement.partitioner import recover_stale_state, stale_ledgers
from rayagi.cli.failures import FAILED
from rayagi.cli.output import complain


def run(arguments: argparse.Namespace) -> int:
    """List all partition ledgers of this host, and restore those of dead processes; returns the exit code."""
    ledgers, unreadable = all_ledgers()
    for ledger in ledgers:
        print("\n".join(_described(ledger)))
    left = stale_ledgers()
    if not left:
        print("Nothing was left behind.")
    elif arguments.dry_run:
        print(f"{counted(len(left), 'ended run')} left something behind; `rayagi cleanup` undoes it.")
    errors: list[Exception] = [*unreadable]
    for ledger in () if arguments.dry_run else left:
        remaining = recover_stale_state(ledger)
        errors += remaining
        if not remaining:
            print(f"Undone: what process {ledger.owner.pid} of run {ledger.run} left.")
    for error in errors:
        complain(f"rayagi: {error}")
    return FAILED if errors else 0


def _described(ledger: Ledger) -> list[str]:
    states = {"alive": "runs", "dead": "has ended", "elsewhere": "cannot be asked from here"}
    owner = ledger.owner
    head = f"Run {ledger.run}, process {owner.pid} on {owner.host}, {states[ledger.owner_state()]}:"
    return [head, *(f"  {step}" for step in ledger.steps())]
