"""How long a loss is felt: kills a collector, a learner and the collective actor of a real asynchronous run, in turn.

    python -m experiments.asynchronous.recovery Ant-v5 --repeats 5

One session; between kills it trains until updates come as before. Writes results/recovery_<task>.json (every kill, and
origin) and .md (medians, spread).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from experiments.scripts import bullets, command_line, origin, spread, write_results
from rayagi.config.convert import with_settings
from rayagi.config.presets import preset
from rayagi.config.rules import checked
from rayagi.coordinator.decoupled import DecoupledSession, session_of

HERE = Path(__file__).parent
GOAL_S = 10.0
LIMIT_S = 120.0
WARM_UP = 8
"""Updates before the first kill, and between two."""


class Watched:
    """A session whose updates, losses and successors are noted by the driver's clock."""

    def __init__(self, session: DecoupledSession, messages: list[tuple[float, str]]) -> None:
        self.session, self.messages = session, messages
        self.updates: list[float] = []
        """When each came."""

    def train(self, updates: int) -> None:
        """Note each as it comes."""
        for _ in range(updates):
            self.session.train(1)
            self.updates.append(time.perf_counter())

    def train_until(self, done: Callable[[], bool]) -> None:
        """Until the session has said something.

        Raises:
            TimeoutError: it was not.
        """
        begin = time.perf_counter()
        while not done():
            self.train(1)
            if time.perf_counter() - begin > LIMIT_S:
                raise TimeoutError(f"nothing of it within {LIMIT_S:.0f} s; messages: {self.messages}")

    def kill(self, pid: int, successors: int) -> dict[str, float]:
        """End a process, and go on until its successors work.

        Returns:
            seconds until the message on the loss (0: there is none), the longest pause between updates, the longest
            before the loss, and how long it took until all successors had begun to work.
        """
        self.train(WARM_UP)
        usual_s = max(pauses(self.updates[-WARM_UP:]))
        self.messages.clear()
        begin, before = time.perf_counter(), len(self.updates)
        os.kill(pid, signal.SIGKILL)
        self.train_until(lambda: sum("goes on" in text for _, text in self.messages) >= successors)
        came = [moment for moment, text in self.messages if "goes on" in text]
        self.train(WARM_UP)
        updates = self.updates[before - 1 :]
        return {
            "told_s": self.messages[0][0] - begin if self.messages else 0.0,
            "pause_s": max(pauses(updates)),
            "usual_pause_s": usual_s,
            "whole_s": max(came, default=begin) - begin,
        }


def pauses(moments: Sequence[float]) -> list[float]:
    """Seconds between one and the next."""
    return [after - before for before, after in itertools.pairwise(moments)]


def kills(session: DecoupledSession) -> dict[str, tuple[int, int]]:
    """Who is killed: its process, and how many successors are started for it."""
    group = session._group
    assert group is not None
    collector, *_ = session.plan.hosting("simulator")
    learners = session.plan.hosting("trainer")
    pids = {
        index: ray.get(group.handles[index].worker_info.remote()).pid for index in (collector, learners[0])
    }
    collective = ray.get(group.collective.__ray_call__.remote(lambda actor: os.getpid()))
    return {
        "collector": (pids[collector], 1),
        "learner": (pids[learners[0]], len(learners)),
        "collective actor": (collective, 0),
    }


def measure(task: str, repeats: int, settings: Sequence[str]) -> dict[str, Any]:
    """Every kill, so many times, in one session."""
    spec = checked(with_settings(preset(task, "appo"), ["gmi.template=decoupled", *settings]))
    lines: list[dict[str, Any]] = []
    messages: list[tuple[float, str]] = []
    with session_of(spec, log=lambda text: messages.append((time.perf_counter(), text))) as session:
        assert isinstance(session, DecoupledSession)
        watched = Watched(session, messages)
        watched.train(WARM_UP)
        for repeat in range(repeats):
            for who in ("collector", "learner", "collective actor"):
                line = {"repeat": repeat, "killed": who, **watched.kill(*kills(session)[who])}
                lines.append(line)
                print(json.dumps(line), flush=True)
        return {"plan": str(session.plan), "lines": lines, "experience": session.experience()}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Medians and spread by who was killed."""
    names = {
        "told_s": "told",
        "pause_s": "longest pause",
        "usual_pause_s": "longest without",
        "whole_s": "whole again",
    }
    rows = [
        f"| killed | {' | '.join(names.values())} | under {GOAL_S:.0f} s |",
        f"|{'---|' * (len(names) + 2)}",
    ]
    for who in dict.fromkeys(line["killed"] for line in lines):
        own = [line for line in lines if line["killed"] == who]
        cells = [spread([line[name] for line in own]) for name in names]
        worst = max(max(line["whole_s"], line["pause_s"]) for line in own)
        rows.append(f"| {who} | {' | '.join(cells)} | {'yes' if worst < GOAL_S else 'no'} |")
    return "\n".join(rows)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("task", nargs="?", default="Ant-v5")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    found = {"origin": origin(), **measure(given.task, given.repeats, given.set)}
    place = given.out / f"recovery_{given.task}"
    write_results(place.with_suffix(".json"), found)
    rows = ", ".join(f"{name} {count}" for name, count in found["experience"]["rows"].items())
    parts = [
        f"# {given.task}: recovery, in seconds",
        bullets(found["origin"]),
        table(found["lines"]),
        f"Rows of experience: {rows}.",
    ]
    place.with_suffix(".md").write_text("\n\n".join(parts) + "\n")
    print(table(found["lines"]))


if __name__ == "__main__":
    main()
