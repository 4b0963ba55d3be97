"""Datasets into replay stores and back. ``rayagi replay`` is the command."""

from rayagi.replay.exports import export
from rayagi.replay.loading import load, open_source

__all__ = ["export", "load", "open_source"]
