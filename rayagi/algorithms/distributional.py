"""Rules of settings of distributional value functions. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from rayagi.config.errors import ConfigError


def support_rules(section: str, v_min: float, v_max: float) -> Iterator[ConfigError]:
    """Rules of the ends of a distribution's support."""
    if not -1e30 < v_min < v_max < 1e30:
        reason = f"must be finite and less than {section}.v_max = {v_max}"
        yield ConfigError(
            f"{section}.v_min", v_min, reason, "give the least and the largest discounted return"
        )
