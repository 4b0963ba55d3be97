"""Profiles made of plain tuples, for the tests of the analysis."""

import json
from pathlib import Path

import numpy as np

from rayagi.profiler.layout import HEADER, MAGIC, RECORD, VERSION
from rayagi.profiler.trace import EVENT, Clock, ProcessTrace, Profile, ThreadTrace


def thread(events, names, thread_id=1, dropped=0):
    """A thread of (category, start, end, name, depth[, flags]) tuples; ``names`` gets ids for new texts."""
    records = [
        (start, end, names.setdefault(name, len(names)), category, depth, *(rest or (0,)))
        for category, start, end, name, depth, *rest in events
    ]
    start = records[0][0] if records else 0
    return in_memory(np.array(records, EVENT), thread_id, start, dropped)


def in_memory(events, thread_id=1, start=0, dropped=0):
    """A thread whose events are in an array."""
    path = Path(f"{thread_id}-0.events")
    return ThreadTrace(
        path, thread_id, start, dropped, len(events), lambda first, last: np.array(events[first:last])
    )


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


def write(folder, found):
    """Write a profile as the recorder does."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"version": VERSION, "command": found.command, "start_unix_ns": 0, "intercepted": {}}
    (folder / "profile.json").write_text(json.dumps(about))
    for each in found.processes:
        path = folder / each.path.name
        path.mkdir()
        fields = ("name", "pid", "parent", "argv", "metadata", "python")
        facts = {name: getattr(each, name) for name in fields} | {"clock": vars(each.clock)}
        (path / "process.json").write_text(json.dumps(facts))
        names = [json.dumps({"id": number, "name": name}) + "\n" for number, name in each.names.items()]
        (path / "names.jsonl").write_text("".join(names))
        for thread in each.threads:
            count = len(thread.events)
            head = HEADER.pack(
                MAGIC, VERSION, RECORD.size, thread.thread_id, count, count, thread.dropped, thread.start_ns,
                thread.dropped_from_ns,
            )  # fmt: skip
            (path / thread.path.name).write_bytes(head + thread.events.tobytes())
    return folder
