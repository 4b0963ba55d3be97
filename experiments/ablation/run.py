"""Training throughput with everything on and with one mechanism off, by turns, on two cores.

    python -m experiments.ablation.run
    python -m experiments.ablation.run --tasks Ant-v5 --only "whole rollouts" --rounds 8
    python -m experiments.ablation.run --table experiments/ablation/results/*.json

Every setting (task, GMIs, observations) keeps its GMIs' processes; in them each case has its own program, and they take
turns of the same number of iterations. Without a compiler, GMIs run on a Ray of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from experiments.scripts import command_line, origin, task_id, write_results
from rayagi.config.presets import preset
from rayagi.config.spec import RunSpec

HERE = Path(__file__).parent
TASKS = ("Ant-v5", "Humanoid-v5", "HalfCheetah-v5")
BASELINES = {"compiled acting": "whole rollouts"}
"""What a mechanism's absence is compared with, where that is off in this setting too; else "on"."""
NO_COMPILER = "compiler"
ANSWER_WITHIN_S = 600.0
ATTEMPTS, MOST_OTHER_CORES = 3, 0.25
"""A turn is repeated where other processes used more of the machine meanwhile; the one with the least counts."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What is trained, on which GMIs x threads of each, with normalised observations or raw ones."""

    task: str
    layout: str
    raw: bool

    @property
    def gmis(self) -> int:
        """Number of GMIs."""
        return int(self.layout.split("x")[0])

    @property
    def threads(self) -> int:
        """Of each GMI."""
        return int(self.layout.split("x")[1])

    @property
    def has_contacts(self) -> bool:
        """Whether worlds are stepped one by one: whole rollouts apply."""
        return self.task != "HalfCheetah-v5"

    def cases(self, only: str | None = None) -> tuple[str, ...]:
        """Names of mechanisms.CASES that apply, the baseline first."""
        applies = {
            "whole rollouts": self.has_contacts,
            "compiled acting": True,
            "compiled gradient": True,
            "compiled update": True,
            "thread pool": self.threads > 1,
            "compiled optimizer step": True,
            NO_COMPILER: True,
            "torch.compile": only == "torch.compile",
            "nothing": True,
        }
        found = [name for name, does in applies.items() if does]
        if only is not None:
            found = [name for name in found if name in (only, self.baseline(only))]
        return ("on", *found)

    def baseline(self, case: str) -> str:
        """The case that differs from this one in one mechanism."""
        if case == "compiled acting" and not self.has_contacts:
            return "on"
        return BASELINES.get(case, "on")

    def spec(self) -> RunSpec:
        """The task's preset on both cores."""
        spec = preset(self.task)
        gmi = replace(spec.gmi, backend="cpu", num_gmis=self.gmis, threads_per_gmi=self.threads)
        return replace(spec, gmi=gmi, learning=replace(spec.learning, normalize_obs=not self.raw))


class Process:
    """A process with a session, and so a Ray, of its own."""

    def __init__(self, *, compiler: bool) -> None:
        self._pipe, theirs = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=serve, args=(theirs, compiler))
        self._process.start()
        theirs.close()

    def ask(self, *question: Any) -> Any:
        """What ``serve`` answers."""
        self._pipe.send(question)
        if not self._pipe.poll(ANSWER_WITHIN_S):
            raise SystemExit(f"no answer to {question} within {ANSWER_WITHIN_S:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit("a measuring process has ended; what it printed is above") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(60.0)


def serve(pipe: Connection, compiler: bool) -> None:
    """Build programs and let them take turns when asked to, until the pipe is closed."""
    if not compiler:
        os.environ["CC"] = "no-compiler"
    from experiments.ablation.turns import TurnsFactory  # here: Ray's processes inherit the environment
    from rayagi.coordinator.session import Session

    session: Session | None = None
    with ExitStack() as stack:
        while True:
            try:
                kind, *given = pipe.recv()
            except EOFError:
                return
            if kind == "build":
                setting, cases = given
                factory = TurnsFactory(setting.spec(), cases)
                if session is None:
                    session = stack.enter_context(Session(setting.spec(), factory=factory))
                else:
                    session.rebuild(factory)
                pipe.send(None)
            else:
                assert session is not None
                pipe.send(session.run(*given))


def measure(
    setting: Setting, processes: dict[bool, Process], cases: Sequence[str], rounds: int, seconds: float
) -> Iterable[Row]:
    """All cases by turns: forwards in one round, backwards in the next."""
    for compiler, process in processes.items():
        process.ask("build", setting, tuple(case for case in cases if (case != NO_COMPILER) == compiler))
    answers = processes[True].ask("run", "on", 3)
    iterations = max(2, round(seconds * 3 / max(answer["cpu_s"] / setting.threads for answer in answers)))
    for number in range(rounds):
        for case in cases if number % 2 == 0 else cases[::-1]:
            turns = list[Row]()
            while (
                len(turns) < ATTEMPTS
                and min((t["other_cores"] for t in turns), default=1.0) > MOST_OTHER_CORES
            ):
                turns.append(turn(processes[case != NO_COMPILER], case, iterations))
            best = min(turns, key=lambda each: float(each["other_cores"]))
            where = {"task": setting.task, "layout": setting.layout, "raw": setting.raw, "off": case}
            yield {**where, "round": number, "iterations": iterations, "attempts": len(turns), **best}


def turn(process: Process, case: str, iterations: int) -> Row:
    """One turn of a case: the slowest GMI's times, and steps per second of all."""
    load = os.getloadavg()[0]
    answers = process.ask("run", case, iterations)
    slowest = max(answers, key=lambda answer: float(answer["seconds"]))
    seconds, env_steps = slowest["seconds"], sum(answer["env_steps"] for answer in answers)
    return {
        **slowest,
        "env_steps": env_steps,
        "steps_per_s": env_steps / seconds,
        "load_before": load,
        "other_cores": (slowest["used_s"] - sum(answer["cpu_s"] for answer in answers)) / seconds,
        "stolen_cores": slowest["stolen_s"] / seconds,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def setting_of(row: Row) -> Setting:
    """The setting that a row belongs to."""
    return Setting(row["task"], row["layout"], row["raw"])


def joined(results: Sequence[Sequence[Row]]) -> list[Row]:
    """Rows of several results, whose rounds get numbers of their own."""
    return [
        {**row, "round": row["round"] + 1000 * number} for number, rows in enumerate(results) for row in rows
    ]


def ratios(rows: Sequence[Row]) -> dict[str, dict[Setting, list[float]]]:
    """By mechanism and setting: steps/s of its baseline over steps/s without it, of each round.

    Turns in which other processes used more than MOST_OTHER_CORES do not count.
    """
    speed = {
        (setting_of(row), row["round"], row["off"]): float(row["steps_per_s"])
        for row in rows
        if row["other_cores"] <= MOST_OTHER_CORES
    }
    found: dict[str, dict[Setting, list[float]]] = {}
    for (setting, number, case), without in speed.items():
        base = speed.get((setting, number, setting.baseline(case)))
        if case != "on" and base is not None:
            found.setdefault(case, {}).setdefault(setting, []).append(base / without)
    return found


def table(rows: Sequence[Row]) -> str:
    """Markdown: each mechanism's ratio in each setting, then over the settings."""
    found = ratios(rows)
    settings = list(dict.fromkeys(map(setting_of, rows)))
    names = [f"{s.task.removesuffix('-v5')} {s.layout} {'raw' if s.raw else 'norm'}" for s in settings]
    lines = [f"| off | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for case, of_case in found.items():
        cells = [
            f"{statistics.median(of_case[s]):.2f} ({min(of_case[s]):.2f}-{max(of_case[s]):.2f})"
            if s in of_case
            else ""
            for s in settings
        ]
        lines.append(f"| {case} | {' | '.join(cells)} |")
    lines += [
        "",
        "| off | settings | median of their medians | smallest | largest |",
        "|---|---|---|---|---|",
    ]
    for case, of_case in found.items():
        medians = {s: statistics.median(each) for s, each in of_case.items()}
        low, high = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
        lines.append(
            f"| {case} | {len(medians)} | {statistics.median(medians.values()):.3f} "
            f"| {medians[low]:.2f} ({names[settings.index(low)]}) | {medians[high]:.2f} ({names[settings.index(high)]}) |"
        )
    return "\n".join(lines)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument(
        "--tasks", type=lambda text: [task_id(task) for task in text.split(",")], default=list(TASKS)
    )
    parser.add_argument("--layouts", nargs="+", default=["2x1", "1x2"], choices=["2x1", "1x2"])
    parser.add_argument("--observations", nargs="+", default=["norm", "raw"], choices=["norm", "raw"])
    parser.add_argument("--only", help="one mechanism; torch.compile is measured only so")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn with everything on")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--table", type=Path, nargs="+", help="only print the table of these results")
    return parser.parse_args(arguments)


def main() -> None:
    """Command line."""
    given = parsed()
    if given.table is not None:
        print(table(joined([json.loads(path.read_text())["rows"] for path in given.table])))
        return
    header, rows = origin(), list[Row]()
    path = given.out / datetime.now(UTC).strftime("%Y-%m-%d_%H%M.json")
    given.out.mkdir(parents=True, exist_ok=True)
    for layout in given.layouts:
        with ExitStack() as stack:
            needs = [True, False] if given.only in (None, NO_COMPILER) else [True]
            processes = {compiler: stack.enter_context(Process(compiler=compiler)) for compiler in needs}
            for observations in given.observations:
                for task in given.tasks:
                    setting = Setting(task, layout, observations == "raw")
                    cases = setting.cases(given.only)
                    for row in measure(setting, processes, cases, given.rounds, given.seconds):
                        rows.append(row)
                        print(
                            f"{row['at'][11:]} {task} {layout} {observations} {row['round']} {row['off']}: "
                            f"{row['steps_per_s']:.0f} steps/s, others {row['other_cores']:.2f} ({row['attempts']})",
                            flush=True,
                        )
                        write_results(path, {"origin": header, "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
