"""Parses and formats quantities: ``5m``, ``2M``, ``512 MiB``."""

from __future__ import annotations

import math
import re
import sys
from decimal import Decimal
from fractions import Fraction

_DURATION_S = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}


class QuantityError(ValueError):
    """A text is not a valid duration, count or size."""

    def __init__(self, text: str, wanted: str) -> None:
        super().__init__(text, wanted)
        self.text, self.wanted = text, wanted

    def __str__(self) -> str:
        return f"'{self.text}' is not {self.wanted}"


def parse_duration_s(text: str) -> float:
    """Seconds in ``90s``, ``5m``, ``1.5h``, ``1h30m`` or a plain number of seconds.

    Raises:
        QuantityError: not a duration, or not positive.
    """
    wanted = "a positive duration; write e.g. 90s, 5m, 1.5h or 1h30m"
    compact = text.strip().lower().replace(" ", "")
    parts = re.findall(r"(\d+\.?\d*|\.\d+)([a-z]*)", compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise QuantityError(text, wanted)
    if len(parts) > 1 and any(not unit for _, unit in parts):
        raise QuantityError(text, wanted)
    total = 0.0
    for number, unit in parts:
        if (unit or "s") not in _DURATION_S:
            raise QuantityError(text, wanted)
        total += float(number) * _DURATION_S[unit or "s"]
    if not (math.isfinite(total) and total > 0):
        raise QuantityError(text, wanted)
    return total


def parse_count(text: str) -> int:
    """Whole number in ``500``, ``500k``, ``2M``, ``1.5M``, ``1e6`` or ``1_000_000``.

    Raises:
        QuantityError: not a whole number, or not positive.
    """
    wanted = "a positive whole number; write e.g. 500, 500k, 2M or 1e6"
    match = re.fullmatch(r"(\d[\d_]*\.?\d*(?:e\+?\d{1,2})?)([kmbg]?)", text.strip().lower())
    if match is None:
        raise QuantityError(text, wanted)
    value = Fraction(Decimal(match[1].replace("_", ""))) * _COUNT[match[2]]  # exact, unlike a float
    if not 1 <= value <= sys.float_info.max or value.denominator != 1:
        raise QuantityError(text, wanted)
    return int(value)


def parse_bytes(text: str) -> int:
    """Bytes in ``440000``, ``0.44MB`` (decimal) or ``1MiB`` (binary).

    Raises:
        QuantityError: not a whole number of bytes, or not positive.
    """
    wanted = "a positive number of bytes; write e.g. 440000, 0.44MB or 1MiB"
    match = re.fullmatch(r"(\d[\d_]*\.?\d*)\s*([kmg]?i?b?)", text.strip().lower())
    if match is None or match[2] not in _BYTES:
        raise QuantityError(text, wanted)
    value = float(match[1].replace("_", "")) * _BYTES[match[2]]
    if not 1 <= value < math.inf or abs(value - round(value)) > 1e-6 * value:
        raise QuantityError(text, wanted)
    return round(value)


def duration_text(seconds: float) -> str:
    """``45 s``, ``5 min``, ``5 min 30 s``, ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 1 and seconds > 0:
        return f"{seconds:.2g} s"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest:02d} s" if rest else f"{minutes} min"
    hours, rest = divmod(whole // 60, 60)
    return f"{hours} h {rest:02d} min" if rest else f"{hours} h"


def count_text(count: float) -> str:
    """``850``, ``12.5k``, ``2M``."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.4g}{unit}"
    return f"{count:g}"


def bytes_text(count: float) -> str:
    """``512 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
