"""The C that programs share."""

from __future__ import annotations

from importlib.resources import files


def shared(name: str) -> str:
    """A header of this package, for programs to begin with."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
