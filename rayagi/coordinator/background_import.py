"""An import on a thread of its own, while this one waits for something else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module


@contextmanager
def import_in_background(module: str) -> Iterator[None]:
    """Import a module while the block runs, and wait for it at the end.

    What goes wrong with it is said where it is needed, by the import there. Not for modules that the block imports parts of:
    where modules import each other, two threads may meet half-made ones.
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
