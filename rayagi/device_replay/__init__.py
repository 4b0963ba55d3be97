"""Batches of a replay store on a GPU. ``DeviceGatherer`` is the entry; docs/explanation/replay.md has the three ways."""

from rayagi.device_replay.choice import DeviceGatherer

__all__ = ["DeviceGatherer"]
