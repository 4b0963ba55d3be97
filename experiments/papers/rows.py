"""Result files: the newest of an experiment, and its rows with their origin."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def load(path: Path) -> Any:
    """The content of a JSON file, or the lines of a .jsonl file as a list."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


def origins_of(rows: Any) -> list[Mapping[str, Any]]:
    """Machine, versions, commit and date of each run that wrote a file, the oldest first.

    Raises:
        ValueError: it has none.
    """
    found: list[Mapping[str, Any]] = []
    for each in [rows, *rows.get("rows", [])] if isinstance(rows, dict) else rows:
        origin = each.get("origin") or each
        if isinstance(origin, dict) and {"date", "git_commit"} <= origin.keys():
            found.append(origin)
    if not found:
        raise ValueError("the rows do not say where they are from")
    return sorted(found, key=lambda origin: str(origin["date"]))


def origin_of(rows: Any) -> Mapping[str, Any]:
    """That of a file's last run.

    Raises:
        ValueError: it has none.
    """
    return origins_of(rows)[-1]


def newest(folder: Path, pattern: str, accepts: Callable[[Any], bool] = lambda rows: True) -> Path | None:
    """The file with the latest date among those that match and are accepted; None if there is none."""
    found = {path: load(path) for path in sorted(folder.glob(pattern))}
    dated = {path: str(origin_of(rows)["date"]) for path, rows in found.items() if accepts(rows)}
    return max(dated, key=lambda path: dated[path], default=None)
