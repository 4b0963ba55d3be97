"""rayagi against its peers, one at a time, interleaved over several repeats; for Ant-v5 with the perfect-overlap limit.

    experiments/peers/setup.sh PEERS
    python -m experiments.throughput.run --peers PEERS --repeats 5 --seconds 20
    python -m experiments.throughput.run --peers PEERS --repeats 2 --seconds 8 --tasks all
    python -m experiments.throughput.run --cases rayagi-2x1 rayagi-1x2 rllib --tasks Ant-v5 Humanoid-v5 --repeats 3
    python -m experiments.throughput.run --cases rayagi-2x1 rayagi-1x2 cleanrl --peers PEERS --tasks all --repeats 3

PEERS is a folder of the peers' virtual environments, about 5 GB, of which only those of the cases are needed; without it,
only rayagi and the limit are measured, and RLlib if --cases names it. Writes results/<date>.json (raw lines and origin) and
results/<date>.md (medians and spread).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from experiments.cores import all_seconds, not_idle_seconds
from experiments.peers import DISCRETE, TASKS
from experiments.scripts import bullets, command_line, origin, spread, write_results
from experiments.throughput.watch import EITHER, WaitPolicy, run_watched

HERE = Path(__file__).parent
TIMEOUT_S = 400.0
OURS = ("rayagi-1x2", "rayagi-2x1")
"""One GMI with two threads, and two with one each."""
PEERS = {
    "sf-async": ("sf", "run_sample_factory"),
    "sb3-envpool": ("base", "run_sb3"),
    "pufferlib": ("puffer", "run_pufferlib"),
    "cleanrl": ("base", "run_cleanrl"),
    "rl-games": ("base", "run_rl_games"),
    "rsl-rl": ("base", "run_rsl_rl"),
    "skrl": ("base", "run_skrl"),
    "torchrl": ("torchrl", "run_torchrl"),
}
"""Virtual environment and runner of each, see experiments/peers."""
RLLIB = "rllib"
"""It is where rayagi is; measured only if it is named."""
CORES = 2
"""That both layouts of ours use."""
QUIET_SHARE = 0.08
"""Of all cores: below this a machine counts as idle."""
MOST_OTHER_CORES, ATTEMPTS = 0.15, 2
"""A run during which something else used more cores is repeated once."""


@dataclass(frozen=True)
class Case:
    """One thing to run; prints a JSON line last."""

    name: str
    command: tuple[str, ...]
    times_start_up: bool = False
    """Whether it takes ``--started``, the time at which it was called."""
    waiting: tuple[WaitPolicy, ...] = ("PASSIVE",)
    """Each as of ``run_watched``: runs of which the fastest counts."""


def our_cases(task: str, seconds: float) -> list[Case]:
    """rayagi with two layouts; and, of Ant-v5, the limit of its own work."""
    ours = ("experiments.throughput.ours", "--task", task, "--seconds", str(seconds))
    cases = [
        _case("rayagi-2x1", sys.executable, *ours, "--gmis", "2", "--threads", "1"),
        _case("rayagi-1x2", sys.executable, *ours, "--gmis", "1", "--threads", "2"),
    ]
    if task != "Ant-v5":
        return cases
    limits = ("experiments.throughput.limits", "--seconds", str(seconds / 3), "--cores", str(CORES))
    return [
        *cases,
        Case("limit", (sys.executable, "-m", *limits)),
        Case("limit, all cores busy", (sys.executable, "-m", *limits, "--together")),
    ]


def peer_cases(folder: Path, task: str, seconds: float, names: list[str] | None = None) -> list[Case]:
    """Each peer, in its virtual environment; ``names``: only these.

    Raises:
        SystemExit: the folder lacks one of these.
    """
    cases = []
    for name, (env, runner) in PEERS.items():
        if names is not None and name not in names:
            continue
        python = folder / env / "bin" / "python"
        if not python.exists():
            raise SystemExit(
                f"--peers {folder}: no virtual environment {env}; experiments/peers/setup.sh {folder}"
            )
        module = f"experiments.peers.{runner}"
        case = _case(name, str(python), module, "--task", task, "--seconds", str(seconds))
        cases.append(replace(case, waiting=EITHER))
    return cases


def _case(name: str, python: str, *module: str) -> Case:
    return Case(name, (python, "-m", *module), times_start_up=True)


def busy_share() -> float:
    """Share of all cores that something used during the last second."""
    busy, total = -not_idle_seconds(), -all_seconds()
    time.sleep(1)
    return (busy + not_idle_seconds()) / max(0.01, total + all_seconds())


def wait_until_quiet(limit_s: float = 30.0) -> None:
    """Wait until the machine is nearly idle, so that one case's leftovers do not slow the next."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until and busy_share() > QUIET_SHARE:
        pass


def run_case(case: Case) -> dict[str, object]:
    """Run one case, again if something else used the machine meanwhile. Returns its JSON line, or what went wrong."""
    return max((_run_waiting(case, waiting) for waiting in case.waiting), key=lambda row: rate(row) or 0.0)


def _run_waiting(case: Case, waiting: WaitPolicy) -> dict[str, object]:
    attempt = 0
    while True:
        attempt += 1
        wait_until_quiet()
        started = ("--started", str(time.time())) if case.times_start_up else ()
        try:
            done = run_watched([*case.command, *started], TIMEOUT_S, waiting=waiting)
        except TimeoutError as error:
            return {"case": case.name, "failed": str(error)}
        lines = [line for line in done.output.splitlines() if line.startswith("{")]
        if not lines:
            return {"case": case.name, "failed": (done.error or done.output)[-500:]}
        if done.other_cores <= MOST_OTHER_CORES or attempt == ATTEMPTS:
            break
    watched = {
        "own_cores": done.own_cores,
        "other_cores": done.other_cores,
        "memory_mib": done.memory_mib,
        "attempt": attempt,
        "waiting": waiting or "as started",
    }
    # Ours says what was stolen while it trained, without its start.
    return {"stolen_cores": done.stolen_cores, **json.loads(lines[-1]), "case": case.name, **watched}


def rate(row: dict[str, object]) -> float | None:
    """Environment steps per second of a row, or the limit; None where it failed."""
    value = row.get("steps_per_s", row.get("limit_steps_per_s"))
    return float(value) if isinstance(value, (int, float)) else None


def summarise(rows: list[dict[str, object]]) -> str:
    """A Markdown table: median steps per second and range, seconds to the end of the first iteration, most memory, and the
    ratios of our layouts to each in the same repeat.
    """
    rates: dict[str, dict[object, float]] = {}
    for row in rows:
        value = rate(row)
        if value is not None:
            rates.setdefault(str(row["case"]), {})[row["repeat"]] = value
    ours = {name: rates[name] for name in OURS if name in rates}
    lines = [
        "| case | runs | steps/s, median | lowest - highest | to the first iteration, s | memory, MiB |"
        + "".join(f" {name} / case |" for name in ours),
        f"|---|---|---|---|---|---|{'---|' * len(ours)}",
    ]
    for name, found in sorted(rates.items(), key=lambda item: -statistics.median(item[1].values())):
        values = list(found.values())
        ratios = (
            [mine[repeat] / value for repeat, value in found.items() if repeat in mine]
            for mine in ours.values()
        )
        over = "".join(f" {spread(each, '.2f')} |" for each in ratios)
        low, high = min(values), max(values)
        cells = (_median_of(rows, name, "startup_s", ".1f"), _median_of(rows, name, "memory_mib", ".0f"))
        lines.append(
            f"| {name} | {len(values)} | {statistics.median(values):.0f} | {low:.0f} - {high:.0f} | "
            f"{' | '.join(cells)} |{over}"
        )
    left = [of_what_was_left(rows, name, mine, rates.get("limit", {})) for name, mine in ours.items()]
    failed = [f"- {row['case']} failed: {row['failed']}" for row in rows if "failed" in row]
    disturbed = [
        row for row in rows if isinstance(other := row.get("other_cores"), float) and other > MOST_OTHER_CORES
    ]
    kept = f"{len(disturbed)} of {len(rows)} runs are kept although something else used more than {MOST_OTHER_CORES} cores."
    return "\n".join([*lines, "", *(f"{one}\n" for one in left if one), kept, *failed])


def _median_of(rows: list[dict[str, object]], case: str, key: str, form: str) -> str:
    """Over the repeats that have it; "-" without one."""
    found = [
        float(value)
        for row in rows
        if row["case"] == case and isinstance(value := row.get(key), (int, float))
    ]
    return format(statistics.median(found), form) if found else "-"


def of_what_was_left(
    rows: list[dict[str, object]], name: str, ours: dict[object, float], limits: dict[object, float]
) -> str:
    """The limit is CPU time; a host that keeps some of the cores from this machine lowers what wall time can reach."""
    left = {
        row["repeat"]: 1 - float(stolen) / CORES
        for row in rows
        if row["case"] == name and isinstance(stolen := row.get("stolen_cores"), float)
    }
    shares = [speed / limits[key] / left[key] for key, speed in ours.items() if key in limits and key in left]
    if not shares:
        return ""
    kept = ", ".join(f"{1 - left[key]:.1%}" for key in ours if key in left)
    return (
        f"While {name} trained, the host kept {kept} of the cores' time: of the limit with what was left, "
        f"{spread(shares, '.2f')}."
    )


def compare(rows: list[dict[str, object]]) -> str:
    """A Markdown table of tasks: median steps per second, and our layouts beside the fastest peer of each repeat."""
    measured = {row["case"] for row in rows}
    peers = [name for name in (*PEERS, RLLIB) if name in measured]
    names = [*OURS, *peers]
    lines = [
        f"| task | {' | '.join(names)} | {' | '.join(f'{name} / fastest peer' for name in OURS)} |",
        f"|---|{'---|' * (len(names) + len(OURS))}",
    ]
    for task in dict.fromkeys(str(row["task"]) for row in rows):
        rates: dict[str, dict[object, float]] = {name: {} for name in names}
        for row in rows:
            value = rate(row)
            if row["task"] == task and row["case"] in rates and value is not None:
                rates[str(row["case"])][row["repeat"]] = value
        medians = (
            f"{statistics.median(found.values()):.0f}" if (found := rates[name]) else "-" for name in names
        )
        ratios = (spread(_of_fastest_peer(rates, name, peers), ".2f") or "-" for name in OURS)
        lines.append(f"| {task} | {' | '.join((*medians, *ratios))} |")
    return "\n".join(lines)


def _of_fastest_peer(rates: dict[str, dict[object, float]], ours: str, peers: Sequence[str]) -> list[float]:
    """One for each repeat in which a peer was measured."""
    return [
        speed / max(rates[peer][repeat] for peer in peers if repeat in rates[peer])
        for repeat, speed in rates[ours].items()
        if any(repeat in rates[peer] for peer in peers)
    ]


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--peers", type=Path, help="folder with the peers' virtual environments")
    parser.add_argument("--tasks", nargs="+", default=["Ant-v5"], choices=[*TASKS, *DISCRETE, "all"])
    parser.add_argument("--cases", nargs="+", help="only these of what is measured, by name")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    tasks = TASKS if "all" in given.tasks else tuple(dict.fromkeys(given.tasks))
    peers = None if given.peers is None else given.peers.resolve()
    cases = {task: cases_of(task, peers, given.seconds, given.cases) for task in tasks}
    header, rows = origin(), list[dict[str, object]]()
    name = tasks[0].lower().replace("-", "_") if len(tasks) == 1 else "tasks"
    name += datetime.now(UTC).strftime("_%Y-%m-%d_%H%M")
    for repeat in range(given.repeats):
        for task in tasks:
            for case in cases[task]:
                row = {"repeat": repeat, "task": task, **run_case(case)}
                rows.append(row)
                others = row.get("other_cores", row.get("failed"))
                print(repeat, task, case.name, rate(row), others, flush=True)
                write(given.out, name, header, rows)  # what is cut short leaves what it has measured
    print(report(rows))


def cases_of(task: str, peers: Path | None, seconds: float, names: list[str] | None) -> list[Case]:
    """What is measured of a task; ``names``: only these.

    Raises:
        SystemExit: a name is of none of them.
    """
    cases = our_cases(task, seconds)
    if peers is not None:
        cases += peer_cases(peers, task, seconds, names)
    if RLLIB in (names or ()):
        runner = ("experiments.peers.run_rllib", "--task", task, "--seconds", str(seconds))
        cases.append(replace(_case(RLLIB, sys.executable, *runner), waiting=EITHER))
    unknown = set(names or ()) - {case.name for case in cases} - {"limit", "limit, all cores busy"}
    if unknown:
        raise SystemExit(f"--cases {' '.join(sorted(unknown))}: none of {', '.join(c.name for c in cases)}")
    return [case for case in cases if names is None or case.name in names]


def report(rows: list[dict[str, object]]) -> str:
    """Of one task its table; of several a table of all, and then theirs."""
    tasks = list(dict.fromkeys(str(row["task"]) for row in rows))
    if len(tasks) == 1:
        return summarise(rows)
    parts = (f"## {task}\n\n{summarise([row for row in rows if row['task'] == task])}" for task in tasks)
    return "\n\n".join((compare(rows), *parts))


def write(folder: Path, name: str, header: dict[str, object], rows: list[dict[str, object]]) -> None:
    """The result files, of what there is so far."""
    write_results(folder / f"{name}.json", {"origin": header, "rows": rows})
    title = ", ".join(dict.fromkeys(str(row["task"]) for row in rows))
    (folder / f"{name}.md").write_text(f"# {title}, peers' settings\n\n{bullets(header)}\n\n{report(rows)}\n")


if __name__ == "__main__":
    main()
