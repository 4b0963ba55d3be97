"""Environment variables for a while. Imports the standard library alone: the profiler uses it too."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def temporary_environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process within the block; then they are as before. Not thread-safe."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
