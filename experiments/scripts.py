"""What the experiments' scripts share: their command lines, and files of results with where they came from."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rayagi.run.versions import collect_versions


def command_line(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser whose ``--help`` shows the script's docstring as it is written."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


def task_id(text: str) -> str:
    """Type of an argument that names a task. Raises ArgumentTypeError: there is none of this name."""
    from rayagi.envs import (
        EnvironmentOptionError,
        UnknownEnvironmentError,
        make_env_factory,
    )  # most need no simulator

    try:
        make_env_factory(text)
    except UnknownEnvironmentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    except EnvironmentOptionError:  # it needs an engine, or options
        pass
    return text


def run_program(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program, which writes its reasons itself, to its end. Raises SystemExit: it failed."""
    ran = subprocess.run(command, check=False, text=True, **options)
    if ran.returncode:
        raise SystemExit(f"status {ran.returncode}, of this command: {shlex.join(command)}")
    return ran


def origin() -> dict[str, object]:
    """Machine, versions, commit and date: every result file carries them."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), **collect_versions()}


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """Write a JSON file, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def bullets(entries: Mapping[str, Any]) -> str:
    """A Markdown list with a line for each entry."""
    return "\n".join(f"- {name}: {value}" for name, value in entries.items())


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median, lowest and highest; empty if there are no values."""
    if not values:
        return ""
    return f"{statistics.median(values):{form}} ({min(values):{form}} - {max(values):{form}})"
