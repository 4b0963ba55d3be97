"""Which machine this is, as far as the cost of a hook depends on it. Standard library only."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any


def this_machine() -> dict[str, str | int]:
    """``cpu``, its model, and ``cores``."""
    return {"cpu": cpu_model(), "cores": os.cpu_count() or 1}


def machine_text(machine: Mapping[str, Any]) -> str:
    """``2-core Intel Xeon``."""
    return f"{machine.get('cores', '?')}-core {machine.get('cpu', '?')}" if machine else "unknown"


def cpu_model() -> str:
    """Name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
