"""Errors of recording."""


class ProfilerError(Exception):
    """The profiler was used in a way that cannot be recorded."""
