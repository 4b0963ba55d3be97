"""docs/papers.md: one line per table and figure, the paper's values beside this project's."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.papers.catalogue import EXHIBITS, PAPERS, Exhibit
from experiments.papers.findings import CLAIMS
from experiments.papers.rows import load, origins_of

AXES = {"same": "same axes", "partly": "other axes in part", "none": "-"}
HEAD = """# The papers, figure by figure

Each table and figure of the five papers that has results: the paper's headline, what was measured here, and what differs.
Written by `python -m experiments.papers all --draw` from committed rows; a test compares the page with them. Figures are
medians over repeats, and ratios are taken within a repeat. Where a GPU is needed nothing is extrapolated. Rows of several
runs have the dates of the first and the last run, and the last run's machine and commit.

<!-- not run: minutes to hours -->
```sh
python -m experiments.papers gear --quick               # few points: minutes
python -m experiments.papers gear --full --peers PEERS  # what is committed; goes on where it was stopped
python -m experiments.papers rl-scope --figure 5 --full --peers PEERS
```

PEERS is the folder of `experiments/peers/setup.sh`.
"""


def line(exhibit: Exhibit, rows: Mapping[Exhibit, Path], pictures: Path, page: Path) -> str:
    """One row of the table."""
    path = rows.get(exhibit)
    if path is None or exhibit.measuring is None or exhibit.ours is None:
        state = exhibit.needs or "not measured"
        cells = [exhibit.label, exhibit.quantity, exhibit.theirs, f"**{state}**", "-", exhibit.differs, "-"]
        return f"| {' | '.join(cells)} |"
    content = load(path)
    label = exhibit.label
    if exhibit.draw is not None:
        picture = path.parent / exhibit.picture if exhibit.picture else pictures / f"{exhibit.key}.png"
        label = f"[{label}]({_link(picture, page)})"
    cells = [
        label,
        exhibit.quantity,
        exhibit.theirs,
        exhibit.ours(content),
        AXES[exhibit.axes],
        exhibit.differs,
        f"[{where(origins_of(content))}]({_link(path, page)})",
    ]
    return f"| {' | '.join(cells)} |"


def claims(rows: Mapping[Exhibit, Path]) -> list[str]:
    """What holds: a row for each claim, with the values of the exhibits that show it; not of those that are not measured."""
    measured = {exhibit.key: exhibit for exhibit in rows}
    lines = ["| paper | claim | here | why | values |", "|---|---|---|---|---|"]
    for claim in CLAIMS:
        shown = [measured[key] for key in claim.shown if key in measured]
        if claim.shown and not shown:
            verdict, why, values = "not measured", "", "-"
        else:
            found = (
                f"{each.label}: {each.ours(load(rows[each]))}" for each in shown if each.ours is not None
            )
            verdict, why, values = claim.verdict, claim.why, "; ".join(found) or "-"
        title = PAPERS[claim.paper].split(" (")[0]
        lines.append(f"| {title} | {claim.claim} | **{verdict}** | {why} | {values} |")
    return lines


def _link(path: Path, page: Path) -> str:
    return os.path.relpath(path, page.parent)


def where(origins: Sequence[Mapping[str, Any]]) -> str:
    """Machine, date and commit of a file's last run, and the date of its first; a GPU before the processor."""
    origin = origins[-1]
    first, last = (str(each["date"])[:10] for each in (origins[0], origin))
    dates = last if first == last else f"{first} to {last}"
    commit = str(origin["git_commit"])
    changed = "+" if "+" in commit else ""
    gpu = f"{origin['gpu']}, " if "gpu" in origin else ""
    return f"{gpu}{origin['cpu_model']}, {origin['cores']} cores, {dates}, {commit[:8]}{changed}"


def text(
    rows: Mapping[Exhibit, Path], pictures: Path, page: Path, exhibits: Iterable[Exhibit] = EXHIBITS
) -> str:
    """The page.

    Args:
        rows: file of each exhibit that is measured
        pictures: folder of the figures
        page: where it is written, which links are relative to
        exhibits: which
    """
    exhibits = tuple(exhibits)
    parts = [HEAD]
    for paper, title in PAPERS.items():
        own = [exhibit for exhibit in exhibits if exhibit.paper == paper]
        if not own:
            continue
        measured = sum(exhibit in rows for exhibit in own)
        parts += [
            f"## {title}\n",
            f"{measured} of {len(own)} measured. `python -m experiments.papers {paper} --full`\n",
            "| | quantity | paper | here | axes | what differs | rows |",
            "|---|---|---|---|---|---|---|",
            *(line(exhibit, rows, pictures, page) for exhibit in own),
            "",
        ]
    if exhibits == EXHIBITS:
        parts += ["## What of the papers holds here\n", "Two cores, no GPU, one host.\n", *claims(rows), ""]
    return "\n".join(parts)
