"""Processes that die where a kill or a power cut would hurt: between two changes of names in folders."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

_CHANGES = ("mkdir", "rename", "replace", "unlink", "rmdir")


def dies_before_change(num_changes: int, function: Callable[[], Any]) -> bool:
    """Call a function in a child that dies before one more change of a name than ``num_changes``. Returns whether it did."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _die_after(num_changes)
            function()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -9), "the function failed"
    return code == -9


def _die_after(num_changes: int) -> None:
    left = itertools.count(num_changes, -1)

    def dying(change: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*arguments: Any, **options: Any) -> Any:
            if next(left) == 0:
                os.kill(os.getpid(), 9)
            return change(*arguments, **options)

        return instead

    for name in _CHANGES:
        setattr(os, name, dying(getattr(os, name)))
