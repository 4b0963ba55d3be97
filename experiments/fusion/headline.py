"""CartPole's best form on this CPU over Gymnasium's single environment in a Python loop, in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from experiments.fusion.figure import Case, Size
from experiments.fusion.fusion import simulation
from experiments.fusion.records import Records
from experiments.fusion.variants.variant import BenchmarkConfig
from experiments.scripts import spread
from rayagi.envs.fused.simulators import CartPole

GOAL = 1000.0
RATES = ("steps_per_s", "steps_per_cpu_s")
BASELINE = "gymnasium, 1 environment"


def groups(size: Size) -> Iterator[Sequence[Case]]:
    """All in one group."""
    one = BenchmarkConfig(simulator=CartPole(), num_envs=1)
    fused = BenchmarkConfig(simulator=CartPole(), num_envs=4096, steps_per_call=1000)
    works = {
        BASELINE: ("gymnasium", one),
        "c, 4096 environments, K = 1000, one thread": ("c", fused),
        f"c, 4096 environments, K = 1000, {size.threads} threads": (
            "c",
            replace(fused, num_threads=size.threads),
        ),
    }
    yield [
        Case({"case": name}, lambda f=form, w=work: simulation(f, w, size.seconds))
        for name, (form, work) in works.items()
    ]


def findings(records: Records) -> str:
    """Rates, and ratios of the same repeat."""
    found = {labels["case"]: values for labels, values in records.of("headline")}
    lines = [
        f"| case | million steps/s | per CPU second | over Gymnasium's loop (goal {GOAL:g}) | per CPU second |",
        "|---|---|---|---|---|",
    ]
    base = found.get(BASELINE, [])
    for name, values in found.items():
        cells = [spread([one[rate] / 1e6 for one in values], ".3g") for rate in RATES]
        for rate in RATES:
            pairs = zip(values, base, strict=False)
            cells.append(spread([one[rate] / other[rate] for one, other in pairs], ",.0f"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
