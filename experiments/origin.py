"""Where a result came from: machine, versions, commit, date. Every result file carries it."""

from __future__ import annotations

from datetime import UTC, datetime

from rayagi.run.versions import collect_versions


def origin() -> dict[str, object]:
    """The header of a result file."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), **collect_versions()}
