"""Figures 2, 4, 5, 6, 8 and 9 of the MLBench'22 paper for the machine at hand.

    python -m experiments.fusion.run --figure 2|4|5|6|8|9|gpu|headline|inference|all [--quick]

Forms that torch's threads could slow down by spinning or by sleeping while they wait run both ways, each in a process of
its own, and the faster way counts. Every measurement is kept at once in results/measurements.jsonl; called again, it goes on
where it was stopped. Then results/figure_<n>.png and results/findings.md are drawn from what is there. --fresh begins anew.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from experiments.fusion import (
    breakdown,
    collection,
    complexity,
    fusion,
    headline,
    inference,
    on_gpu,
    simulators,
)
from experiments.fusion.figure import Case, Size, measure
from experiments.fusion.records import Records
from experiments.scripts import bullets, command_line, origin
from experiments.throughput.watch import EITHER, WaitPolicy
from rayagi.run.versions import usable_cores

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "brax", "warp-lang", "envpool")


@dataclass(frozen=True)
class Entry:
    """A figure's functions. Not everything is drawn, and counting has no spread.

    ``either``: some form's threads are OpenMP's, so that it matters whether they spin or sleep while they wait.
    """

    groups: Callable[[Size], Iterable[Sequence[Case]]]
    findings: Callable[[Records], str]
    draw: Callable[[Records, Path], None] | None = None
    repeated: bool = True
    either: bool = False

    @property
    def ways(self) -> tuple[WaitPolicy, ...]:
        """How they wait in the processes that measure this figure."""
        return EITHER if self.either else ("PASSIVE",)


FIGURES = {
    "2": Entry(simulators.groups, simulators.findings, simulators.draw, either=True),
    "4": Entry(collection.groups, collection.findings, collection.draw, either=True),
    "5": Entry(breakdown.time_groups, breakdown.time_findings, breakdown.draw_time),
    "6": Entry(breakdown.count_groups, breakdown.count_findings, breakdown.draw_counts, repeated=False),
    "8": Entry(fusion.groups, fusion.findings, fusion.draw, either=True),
    "9": Entry(complexity.groups, complexity.findings, complexity.draw),
    "gpu": Entry(on_gpu.groups, on_gpu.findings, on_gpu.draw),
    "headline": Entry(headline.groups, headline.findings, either=True),
    "inference": Entry(inference.groups, inference.findings, inference.draw),
}
TOGETHER = ("2", "4", "5", "6", "8", "9", "headline")
"""What ``all`` is; the others are about other machines or other questions, and have folders of their own."""
TITLES = {
    "gpu": "Figure 8 on a GPU",
    "headline": "Best form over Gymnasium's loop",
    "inference": "Simulation and inference fused, on one core",
}


def header() -> dict[str, object]:
    """Where the measurements are from, with the optional packages that some forms need."""
    found: dict[str, object] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return {**origin(), **found}


def report(records: Records) -> str:
    """What the figures show, as Markdown."""
    parts = ["# Findings", bullets(records.origins[-1])]
    others = [one["other_cores"] for name in FIGURES for _, values in records.of(name) for one in values]
    if others:
        parts.append(
            f"Cores that something else used, mean over {len(others)} measurements: {sum(others) / len(others):.2f}."
        )
    parts += [
        f"## {TITLES.get(name, f'Figure {name}')}\n\n{entry.findings(records)}"
        for name, entry in FIGURES.items()
        if records.of(name)
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Command line."""
    given = arguments()
    if given.figure == "gpu" and not torch.cuda.is_available():
        raise SystemExit("There is no GPU here.")
    path = given.out / "measurements.jsonl"
    if given.fresh:
        path.unlink(missing_ok=True)
    origin_here = header()  # before results are written, which are changes to this commit
    for name in TOGETHER if given.figure == "all" else (given.figure,):
        for waiting in FIGURES[name].ways:
            in_a_process(name, waiting, given, origin_here)
        records = Records(path, origin_here)
        draw = FIGURES[name].draw
        if draw is not None and records.of(name):
            draw(records, given.out / f"figure_{name}.png")
        (given.out / "findings.md").write_text(report(records))


def in_a_process(
    name: str, waiting: WaitPolicy, given: argparse.Namespace, origin_here: dict[str, object]
) -> None:
    """Measure a figure where OpenMP, which reads its environment as it is loaded, waits like that.

    Raises:
        SystemExit: the process failed, and has said why.
    """
    if waiting is None:
        os.environ.pop("OMP_WAIT_POLICY", None)
    else:
        os.environ["OMP_WAIT_POLICY"] = waiting
    process = multiprocessing.get_context("spawn").Process(
        target=measure_figure, args=(name, waiting, given, origin_here)
    )
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(process.exitcode)


def measure_figure(
    name: str, waiting: WaitPolicy, given: argparse.Namespace, origin_here: dict[str, object]
) -> None:
    """All points of a figure that are not there yet, in this process."""
    size = Size(
        quick=given.quick,
        seconds=0.05 if given.quick else 0.2,
        repeats=given.repeats or (2 if given.quick else 3),
        threads=given.threads,
    )
    entry = FIGURES[name]
    records = Records(given.out / "measurements.jsonl", origin_here)
    measure(name, entry.groups(size), size.repeats if entry.repeated else 1, records, waiting)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = command_line(__doc__)
    parser.add_argument("--figure", choices=[*FIGURES, "all"], default="all")
    parser.add_argument(
        "--quick", action="store_true", help="few points, short measurements: some three minutes in all"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--repeats", type=int, help="of each measurement; default 3, with --quick 2")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of forms that can choose")
    parser.add_argument("--out", type=Path, help="folder; default results beside this file, or one in it")
    given = parser.parse_args()
    if given.out is None:
        given.out = RESULTS if given.figure in (*TOGETHER, "all") else RESULTS / given.figure
    return given


if __name__ == "__main__":
    main()
