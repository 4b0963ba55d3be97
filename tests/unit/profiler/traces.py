"""Profiles made of plain tuples, for the tests of the analysis."""

from pathlib import Path

import numpy as np

from rayagi.profiler.trace import EVENT, Clock, ProcessTrace, Profile, ThreadTrace


def thread(events, names, thread_id=1, dropped=0):
    """A thread of (category, start, end, name, depth[, flags]) tuples; ``names`` gets ids for new texts."""
    records = [
        (start, end, names.setdefault(name, len(names)), category, depth, *(rest or (0,)))
        for category, start, end, name, depth, *rest in events
    ]
    start = records[0][0] if records else 0
    return ThreadTrace(Path(f"{thread_id}-0.events"), thread_id, start, dropped, np.array(records, EVENT))


def process(threads, name="trainer", pid=41, host="host", clock=(0, 0), **others):
    """A process of lists of events, one list a thread."""
    ids = {}
    traces = tuple(thread(events, ids, number) for number, events in enumerate(threads, 1))
    facts = {"parent": 1, "argv": (), "metadata": {}, "python": "3.11"} | others
    return ProcessTrace(
        path=Path(f"{host}-{pid}-7"),
        name=name,
        pid=pid,
        clock=Clock(*clock, error_ns=0),
        names={number: text for text, number in ids.items()},
        threads=traces,
        **facts,
    )


def profile(*processes):
    return Profile(Path("profile"), ("python", "x.py"), 0, {}, tuple(processes))
