"""Sample accounting of a decoupled run: experience.json of its folder, and its text form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayagi.run.atomic import replace_json

FILE = "experience.json"
_WIDTH = 40


def save(run: Path, experience: Mapping[str, Any]) -> None:
    """Write experience.json: ``rows`` (sent, taken, dropped, in flight, lost), ``lags``, ``bound`` (on the lag; None:
    no bound), ``restarts``, ``is_lower_bound`` (of rows sent and environment steps).

    Raises:
        DiskError: the file cannot be written.
    """
    replace_json(run / FILE, dict(experience))


def load(run: Path) -> Mapping[str, Any] | None:
    """Content of experience.json; None if it is missing or damaged."""
    try:
        stored: Mapping[str, Any] = json.loads((run / FILE).read_text())
        facts(stored)  # all that is shown of it is there
        histogram(stored)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None
    return stored


def facts(experience: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, value) lines of the run's summary."""
    rows, lags = experience["rows"], {int(lag): rows for lag, rows in experience["lags"].items()}
    total = sum(lags.values())
    found = [
        (
            "rollout rows",
            f"{rows['sent']:,} sent = {rows['taken']:,} learned from + {rows['dropped']:,} too old + "
            f"{rows['in_flight']:,} in flight + {rows['lost']:,} lost with learners"
            + (f"; {rows['missing']:,} are missing" if rows["missing"] else ""),
        )
    ]
    if total:
        mean = sum(lag * count for lag, count in lags.items()) / total
        bound = f" (bound {experience['bound']})" if experience.get("bound") is not None else ""
        found.append(("policy lag", f"{mean:.2f} updates on average, {max(lags)} at most{bound}"))
    if experience["restarts"]:
        found.append(("GMIs replaced", str(experience["restarts"])))
    if experience.get("is_lower_bound"):
        found.append(
            ("environment steps", "a lower bound: learners were lost after a collector, or with one")
        )
    return found


def histogram(experience: Mapping[str, Any]) -> str:
    """Histogram of policy lag as text: one line per lag, with its share of rows."""
    lags = {int(lag): rows for lag, rows in experience["lags"].items()}
    total, most = sum(lags.values()), max(lags.values(), default=0)
    return "\n".join(
        f"{lag:>4}  {'#' * round(_WIDTH * lags[lag] / most):<{_WIDTH}}  {100 * lags[lag] / total:5.1f} %"
        for lag in sorted(lags)
        if most
    )
