"""Settings that former versions saved, with the names that they have now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rayagi.config.learning import MOST_LAG

_NO_CLIP = 1e9
"""For runs without a clip: beyond every ratio, so that the first step of an update has the same gradient."""


def with_present_names(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a saved run with the present names of algorithms and sections.

    ``impala`` was what ``appo`` is, and ``a3c`` was ``appo`` without V-trace; both had the section ``impala``. A saved
    section is complete, so a user's own file with some settings of ``impala`` is not taken for one.
    """
    data = _with_bounded_lag(data)
    section = data.get("impala")
    if not isinstance(section, Mapping) or not {"clip_ratio", "rho_bar", "num_epochs"} <= section.keys():
        return data
    changed = {"appo" if key == "impala" else key: value for key, value in data.items()}
    clip = section["clip_ratio"]
    changed["appo"] = {
        **section,
        "clip_ratio": _NO_CLIP if clip is None else clip,
        "vtrace": data.get("algorithm") != "a3c",
    }
    if data.get("algorithm") in ("impala", "a3c"):
        changed["algorithm"] = "appo"
    return changed


def _with_bounded_lag(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what ``max_lag`` may be at most where a run has saved more: it had no bound once, and none of its rollouts was
    as old. A file of the user's own, whose section is not complete, is left for the rules to refuse."""
    changed = dict(data)
    for name in ("appo", "impala"):
        section = data.get(name)
        if isinstance(section, Mapping) and {"gamma", "num_epochs", "max_lag"} <= section.keys():
            lag = section["max_lag"]
            if isinstance(lag, int) and lag > MOST_LAG:
                changed[name] = {**section, "max_lag": MOST_LAG}
    return changed
