"""Draws the tables and figures of a paper again, for this machine.

    python -m experiments.papers gear --quick                # few points and repeats: minutes
    python -m experiments.papers gear --full --peers PEERS   # as committed; goes on where it was stopped
    python -m experiments.papers rl-scope --figure 5 --full --peers PEERS
    python -m experiments.papers all --draw                  # measures nothing: figures and docs/papers.md from the rows

Says first what it will run and how long that takes. --quick writes into the folder of --out, --full into the experiments'
own results, of which docs/papers.md shows the newest.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.papers.catalogue import EXHIBITS, PAPERS, Exhibit, Measuring
from experiments.papers.page import text
from experiments.papers.rows import load, newest
from experiments.scripts import command_line, origin, write_results

ROOT = Path(__file__).parents[2]
PICTURES = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "papers.md"


class Runs:
    """What ran already: a file in the output folder, written after each experiment."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "runs.json"
        self._done: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            try:
                self._done = json.loads(self._path.read_text(encoding="utf-8"))
            except ValueError:
                raise SystemExit(f"{self._path} is damaged: delete it, and everything runs again") from None

    def has(self, command: str) -> bool:
        """Whether it ended well by this commit. Results that were written since are changes, but not of the code."""
        before, now = self._done.get(command, {}).get("git_commit", ""), str(origin()["git_commit"])
        return before.partition("+")[0] == now.partition("+")[0]

    def add(self, command: str, seconds: float, load_before: float) -> None:
        """Keep it."""
        self._done[command] = {"seconds": round(seconds, 1), "load_average_before": load_before, **origin()}
        write_results(self._path, self._done)


def command_of(measuring: Measuring, given: argparse.Namespace) -> str:
    """The arguments of ``python -m`` with the folders filled in; those that need an absent one remain."""
    made = measuring.quick if given.quick else measuring.full
    folders = {"{out}": given.out / measuring.folder, "{peers}": given.peers}
    for name, folder in folders.items():
        if folder is not None:
            made = made.replace(name, shlex.quote(str(Path(folder).absolute())))
    if given.data:
        made = made.replace("{data}", shlex.join(str(path.absolute()) for path in given.data))
    return made


def plan(exhibits: Sequence[Exhibit], given: argparse.Namespace, runs: Runs) -> list[tuple[Measuring, str]]:
    """Print what will run; returns experiments and their commands, each once."""
    can_run = [exhibit for exhibit in exhibits if not exhibit.needs or torch.cuda.is_available()]
    wanted = dict.fromkeys(exhibit.measuring for exhibit in can_run if exhibit.measuring is not None)
    todo, minutes = [], 0.0
    for measuring in wanted:
        command = command_of(measuring, given)
        shows = ", ".join(f"{e.paper} {e.label}" for e in EXHIBITS if e.measuring is measuring)
        if "{peers}" in command or "{data}" in command:
            option = "--peers" if "{peers}" in command else "--data"
            print(f"skipped  {shows}: give {option}")
        elif runs.has(command) and not given.again:
            print(f"done     {shows}")
        else:
            took = measuring.minutes[0 if given.quick else 1]
            minutes += took
            todo.append((measuring, command))
            print(f"{took:4.0f} min {shows}: python -m {command}")
    for exhibit in exhibits:
        if exhibit.measuring is None or exhibit not in can_run:
            print(f"nothing  {exhibit.paper} {exhibit.label}: {exhibit.needs or exhibit.differs}")
    print(f"{len(todo)} experiments, about {minutes:.0f} minutes")
    return todo


def run(todo: Iterable[tuple[Measuring, str]], given: argparse.Namespace, runs: Runs) -> int:
    """Run them one by one; returns how many failed."""
    failed = 0
    for measuring, command in todo:
        (given.out / measuring.folder).mkdir(parents=True, exist_ok=True)
        print(f"\npython -m {command}", flush=True)
        started, before = time.monotonic(), os.getloadavg()[0]
        code = python_m(command)
        if code:
            failed += 1
            print(f"failed with exit code {code}; the others go on")
        else:
            runs.add(command, time.monotonic() - started, before)
    return failed


def python_m(command: str) -> int:
    """Run ``python -m COMMAND`` in the repository; returns its exit code."""
    return subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=ROOT, check=False).returncode


def found_rows(exhibits: Iterable[Exhibit], folder: Path | None) -> dict[Exhibit, Path]:
    """The newest rows of each exhibit: of a folder, or the committed ones."""
    found = {}
    for exhibit in exhibits:
        measuring = exhibit.measuring
        if measuring is None:
            continue
        path = (
            exhibit.committed()
            if folder is None
            else newest(folder / measuring.folder, measuring.rows, measuring.accepts)
        )
        if path is not None:
            found[exhibit] = path
    return found


def draw(exhibits: Iterable[Exhibit], folder: Path | None, pictures: Path, page: Path) -> None:
    """The figures, and the page."""
    exhibits = tuple(exhibits)
    rows = found_rows(exhibits, folder)
    pictures.mkdir(parents=True, exist_ok=True)
    for exhibit, path in rows.items():
        if exhibit.draw is not None and not exhibit.picture:
            exhibit.draw(load(path), pictures / f"{exhibit.key}.png")
    page.write_text(text(rows, pictures, page, exhibits), encoding="utf-8")
    print(f"\n{len(rows)} of {len(exhibits)} tables and figures: {page}")


def chosen(paper: str, figures: Sequence[str] | None) -> list[Exhibit]:
    """The exhibits of a paper, or those of these numbers.

    Raises:
        SystemExit: it has no such figure.
    """
    own = [exhibit for exhibit in EXHIBITS if paper in ("all", exhibit.paper)]
    if figures is None:
        return own
    unknown = set(figures) - {exhibit.number for exhibit in own}
    if unknown:
        known = ", ".join(dict.fromkeys(exhibit.number for exhibit in own))
        raise SystemExit(f"{paper} has no figure {', '.join(sorted(unknown))} with results; it has {known}")
    return [exhibit for exhibit in own if exhibit.number in figures]


def main() -> int:
    """Command line; returns the exit code."""
    parser = command_line(__doc__, prog="python -m experiments.papers")
    parser.add_argument("paper", choices=(*PAPERS, "all"))
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--quick", action="store_true", help="few points and repeats")
    how.add_argument("--full", action="store_true", help="as committed")
    how.add_argument("--draw", action="store_true", help="measure nothing: draw the committed rows")
    parser.add_argument(
        "--figure", nargs="+", metavar="N", help="only these: 12, 9a, T5 (a table), 4.4 (a section)"
    )
    parser.add_argument("--peers", type=Path, help="folder of experiments/peers/setup.sh")
    parser.add_argument(
        "--data", type=Path, nargs="+", help="datasets of `rayagi serve`, for GEAR's figure 7"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/papers"), help="rows, figures and page of --quick"
    )
    parser.add_argument("--again", action="store_true", help="also what ran already")
    parser.add_argument("--plan", action="store_true", help="only say what would run")
    given = parser.parse_args()
    exhibits = chosen(given.paper, given.figure)
    failed = 0
    if not given.draw:
        runs = Runs(given.out / ("quick" if given.quick else "full"))
        todo = plan(exhibits, given, runs)
        if given.plan:
            return 0
        failed = run(todo, given, runs)
    if given.quick:
        draw(exhibits, given.out, given.out / "figures", given.out / "papers.md")
    else:
        draw(EXHIBITS, None, PICTURES, PAGE)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
