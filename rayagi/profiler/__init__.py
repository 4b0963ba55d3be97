"""Where the time of a reinforcement-learning program goes: RL-Scope (Gleeson et al., MLSys 2021).

Usable without the rest of rayagi, for any Python program::

    from rayagi import profiler

    with profiler.profile("profiles/first"):
        for _ in range(20):
            with profiler.iteration():
                with profiler.operation("simulate"):
                    ...

Scopes of one thread are strictly nested. Without a profile they do nothing. ``profiler.trace`` reads what was recorded.
"""

from rayagi.profiler.errors import ProfilerError
from rayagi.profiler.layout import Category
from rayagi.profiler.schedule import Schedule
from rayagi.profiler.scopes import activity, iteration, operation, phase, timed_operation
from rayagi.profiler.session import RecordingSession, add_metadata, name_process, profile

__all__ = [
    "Category",
    "ProfilerError",
    "RecordingSession",
    "Schedule",
    "activity",
    "add_metadata",
    "iteration",
    "name_process",
    "operation",
    "phase",
    "profile",
    "timed_operation",
]
