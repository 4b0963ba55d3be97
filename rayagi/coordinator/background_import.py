"""Imports a module in a background thread, while the calling thread waits for something else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module


@contextmanager
def import_in_background(module: str) -> Iterator[None]:
    """Import a module while the block runs, and wait for it at the end.

    Errors are suppressed; the regular import raises them later. Not for modules that the block imports too: with circular
    imports, a thread may see partially initialised modules.
    """
    thread = threading.Thread(target=_load, args=(module,), name=f"import {module}")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _load(module: str) -> None:
    with suppress(Exception):
        import_module(module)
