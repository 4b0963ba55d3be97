"""Two GMIs with a thread each against one GMI with two threads, for each kind of learner; as many environments in all.

    python -m experiments.ablation.layouts

By turns, each run in a process of its own. The ablation (run.py) compares the two for PPO's compiled programs alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from experiments.ablation.waiting import CASES, Row, named, parsed, rate_of, separately, spec_of
from experiments.scripts import origin, spread, write_results
from rayagi.config.spec import RunSpec

RESULTS = Path(__file__).parent / "results" / "layouts"
LAYOUTS = ("2x1", "1x2")
"""GMIs x threads."""


def spec_in(case: tuple[str, str, str], layout: str) -> RunSpec:
    """The preset's environments in two GMIs, or all of them in one."""
    spec = spec_of(*case)
    if layout == "2x1":
        return replace(spec, gmi=replace(spec.gmi, num_gmis=2, threads_per_gmi=1))
    return replace(spec, gmi=replace(spec.gmi, num_envs=2 * spec.gmi.envs))


def table(rows: Sequence[Row]) -> str:
    """Markdown: steps/s, and two GMIs over one of the same repeat; medians (lowest - highest)."""
    lines = ["| case | two GMIs, steps/s | one GMI | two over one |", "|---|---|---|---|"]
    for case in dict.fromkeys(row["case"] for row in rows):
        rates = {
            layout: {
                row["repeat"]: row["steps_per_s"]
                for row in rows
                if (row["case"], row["layout"]) == (case, layout)
            }
            for layout in LAYOUTS
        }
        two, one = rates["2x1"], rates["1x2"]
        ratios = [rate / one[repeat] for repeat, rate in two.items() if repeat in one]
        cells = (spread([*two.values()], ",.0f"), spread([*one.values()], ",.0f"), spread(ratios))
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    given = parsed(__doc__)
    header, rows = origin(), list[Row]()
    path = RESULTS / datetime.now(UTC).strftime("%Y-%m-%d_%H%M.json")
    for repeat, case, layout in itertools.product(range(given.repeats), CASES, LAYOUTS):
        found = separately(rate_of, spec_in(case, layout), given.seconds)
        rows.append({"case": named(*case), "layout": layout, "repeat": repeat, **found})
        print(rows[-1], flush=True)
        write_results(path, {"origin": header, "seconds": given.seconds, "rows": rows})
    print(table(rows))


if __name__ == "__main__":
    main()
