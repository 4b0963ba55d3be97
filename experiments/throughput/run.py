"""rayagi against its peers, one at a time, interleaved over several repeats, with the perfect-overlap limit in the same run.

    python -m experiments.throughput.run --peers PEERS --repeats 5 --seconds 20

PEERS is a folder of runners as described in README.md beside this file; without it, only rayagi and the limit are measured.
Writes results/<date>.json (raw lines and origin) and results/<date>.md (medians and spread).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from experiments.cores import all_seconds, not_idle_seconds
from experiments.origin import origin
from experiments.throughput.watch import run_watched

HERE = Path(__file__).parent
TIMEOUT_S = 400.0
OURS = ("rayagi-1x2", "rayagi-2x1")
"""One GMI with two threads, and two with one each."""
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


def our_cases(seconds: float) -> list[Case]:
    """rayagi with two layouts, and the limit of its own work."""
    module = (sys.executable, "-m", "experiments.throughput.ours", "--seconds", str(seconds))
    limit = (
        sys.executable,
        "-m",
        "experiments.throughput.limits",
        "--seconds",
        str(seconds / 3),
        "--cores",
        str(CORES),
    )
    return [
        Case("rayagi-2x1", (*module, "--gmis", "2", "--threads", "1"), times_start_up=True),
        Case("rayagi-1x2", (*module, "--gmis", "1", "--threads", "2"), times_start_up=True),
        Case("limit", limit),
        Case("limit, all cores busy", (*limit, "--together")),
    ]


def peer_cases(folder: Path, seconds: float, names: list[str]) -> list[Case]:
    """Peers as the folder's compare.sh lists them: name, virtual environment, runner and flags.

    Raises:
        SystemExit: the folder is no folder of peers, or lacks one of the names.
    """
    script = folder / "compare.sh"
    if not script.is_file() or "PEERS'\n" not in script.read_text():
        raise SystemExit(
            f"--peers {folder}: there is no compare.sh that lists peers; see README.md beside this file"
        )
    listed = script.read_text().split("PEERS'\n")[1].split("\nPEERS")[0].splitlines()
    missing = set(names) - {line.split()[0] for line in listed}
    if missing:
        raise SystemExit(f"--names {' '.join(sorted(missing))}: not in {script}")
    (folder / "logs").mkdir(exist_ok=True)  # measure.py writes there, and only compare.sh would make it
    cases = []
    for line in listed:
        name, venv, *arguments = line.split()
        if name in names:
            python = str(folder / "venv" / "base" / "bin" / "python")
            cases.append(
                Case(name, (python, str(folder / "measure.py"), venv, *arguments, "--seconds", str(seconds)))
            )
    return cases


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
    attempt = 0
    while True:
        attempt += 1
        wait_until_quiet()
        started = ("--started", str(time.time())) if case.times_start_up else ()
        try:
            done = run_watched([*case.command, *started], TIMEOUT_S)
        except TimeoutError as error:
            return {"case": case.name, "failed": str(error)}
        lines = [line for line in done.output.splitlines() if line.startswith("{")]
        if not lines:
            return {"case": case.name, "failed": (done.error or done.output)[-500:]}
        if done.other_cores <= MOST_OTHER_CORES or attempt == ATTEMPTS:
            break
    watched = {"own_cores": done.own_cores, "other_cores": done.other_cores, "attempt": attempt}
    # Ours says what was stolen while it trained, without its start.
    return {"stolen_cores": done.stolen_cores, **json.loads(lines[-1]), "case": case.name, **watched}


def rate(row: dict[str, object]) -> float | None:
    """Environment steps per second of a row, or the limit; None where it failed."""
    value = row.get("steps_per_s", row.get("limit_steps_per_s"))
    return float(value) if isinstance(value, (int, float)) else None


def summarise(rows: list[dict[str, object]]) -> str:
    """A Markdown table: median steps per second and range, and the ratios of our layouts to each in the same repeat."""
    rates: dict[str, dict[object, float]] = {}
    for row in rows:
        value = rate(row)
        if value is not None:
            rates.setdefault(str(row["case"]), {})[row["repeat"]] = value
    ours = {name: rates[name] for name in OURS if name in rates}
    lines = [
        f"| case | runs | steps/s, median | lowest - highest |{''.join(f' {name} / case |' for name in ours)}",
        f"|---|---|---|---|{'---|' * len(ours)}",
    ]
    for name, found in sorted(rates.items(), key=lambda item: -statistics.median(item[1].values())):
        values = list(found.values())
        ratios = (
            [mine[repeat] / value for repeat, value in found.items() if repeat in mine]
            for mine in ours.values()
        )
        told = "".join(f" {spread(each, '.2f')} |" for each in ratios)
        low, high = min(values), max(values)
        lines.append(
            f"| {name} | {len(values)} | {statistics.median(values):.0f} | {low:.0f} - {high:.0f} |{told}"
        )
    left = [of_what_was_left(rows, name, mine, rates.get("limit", {})) for name, mine in ours.items()]
    failed = [f"- {row['case']} failed: {row['failed']}" for row in rows if "failed" in row]
    disturbed = [
        row for row in rows if isinstance(other := row.get("other_cores"), float) and other > MOST_OTHER_CORES
    ]
    kept = f"{len(disturbed)} of {len(rows)} runs are kept although something else used more than {MOST_OTHER_CORES} cores."
    return "\n".join([*lines, "", *(f"{one}\n" for one in left if one), kept, *failed])


def spread(values: list[float], form: str) -> str:
    """Median, lowest and highest."""
    if not values:
        return ""
    median, low, high = (format(each, form) for each in (statistics.median(values), min(values), max(values)))
    return f"{median} ({low} - {high})"


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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=Path, help="folder with the peers' runners and virtual environments")
    parser.add_argument(
        "--names", nargs="*", default=["sb3-envpool", "cleanrl", "sf-async", "pufferlib", "rl_games"]
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    given = parser.parse_args()
    cases = our_cases(given.seconds)
    if given.peers is not None:
        cases += peer_cases(given.peers, given.seconds, given.names)
    header, rows = origin(), list[dict[str, object]]()
    name = datetime.now(UTC).strftime("ant_v5_%Y-%m-%d_%H%M")
    for repeat in range(given.repeats):
        for case in cases:
            row = {"repeat": repeat, **run_case(case)}
            rows.append(row)
            print(repeat, case.name, rate(row), row.get("other_cores", row.get("failed")), flush=True)
            write(given.out, name, header, rows)  # what is cut short leaves what it has measured
    print(summarise(rows))


def write(folder: Path, name: str, header: dict[str, object], rows: list[dict[str, object]]) -> None:
    """The result files, of what there is so far."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"origin": header, "rows": rows}, indent=1) + "\n")
    told = "\n".join(f"- {key}: {value}" for key, value in header.items())
    (folder / f"{name}.md").write_text(f"# Ant-v5, peers' settings\n\n{told}\n\n{summarise(rows)}\n")


if __name__ == "__main__":
    main()
