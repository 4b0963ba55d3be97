"""What users and files name, as it is now: commands and options, settings, metrics, classes.

    python -m tests.public_names            # writes tests/data/public_names.json

A name that goes breaks somebody's script or an older run folder: tests compare with the file (test_public_names.py).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import rayagi
from rayagi.cli.parser import build_parser
from rayagi.config.convert import setting_paths
from rayagi.monitoring.catalogue import CATALOGUE, DERIVED, EVALUATION

FILE = Path(__file__).parent / "data" / "public_names.json"


def _options(parser: argparse.ArgumentParser, prefix: str) -> dict[str, Any]:
    """Options and positional arguments of each command, with their choices."""
    found: dict[str, Any] = {}
    own = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                found |= _options(command, f"{prefix} {name}")
        elif not isinstance(action, argparse._HelpAction):
            name = " ".join(action.option_strings) or action.dest
            own[name] = sorted(map(str, action.choices)) if action.choices else None
    return {prefix: own, **found}


def public_names() -> dict[str, Any]:
    """Everything, sorted."""
    metrics = {metric.name for metric in (*CATALOGUE, *DERIVED, *EVALUATION)}
    return {
        "commands": _options(build_parser(), "rayagi"),
        "settings": dict(sorted(setting_paths().items())),
        "metrics": sorted(metrics),
        "classes": sorted(rayagi.__all__),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(public_names(), indent=1, sort_keys=True) + "\n")
