"""Datasets into replay stores and back. ``rayagi replay`` is the command."""

from rayagi.replay.loading import load, open_source

__all__ = ["load", "open_source"]
