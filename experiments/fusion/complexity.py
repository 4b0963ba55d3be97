"""Figure 9: what fusing K steps gains over K = 1, against environments N, state factor S and compute factor C.

On one thread, by CPU time: what a step costs does not depend on who else uses the machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments.fusion.figure import Case, Size
from experiments.fusion.fusion import simulation
from experiments.fusion.plots import log_axes
from experiments.fusion.records import Records, by
from experiments.fusion.variants.variant import BenchmarkConfig
from rayagi.envs.fused.simulators import CartPole

FORM = "c"
"""The form that fuses: state stays in registers and caches for K steps, as in the paper's CUDA."""
MOST_STATE_BYTES = 300e6
MOST_ITERATIONS = 4e8
"""Of the dynamics in one call: N K C. What takes longer is not measured."""


def groups(size: Size) -> Iterator[Sequence[Case]]:
    """One per N, S and C: all K in turns, so that each gain is of one moment."""
    quick = size.quick
    for num_envs in (1024,) if quick else (64, 1024, 16384):
        for copies in (1, 256) if quick else (1, 16, 256, 2048):
            for compute in (1, 64) if quick else (1, 16, 256):
                if 4 * len(CartPole.state) * copies * num_envs <= MOST_STATE_BYTES:
                    yield _group(size, num_envs, copies, compute)


def _group(size: Size, num_envs: int, copies: int, compute: int) -> list[Case]:
    works = [
        BenchmarkConfig(
            simulator=CartPole(),
            num_envs=num_envs,
            steps_per_call=steps,
            compute=compute,
            copies=copies,
        )
        for steps in (1, 10, 100, 1000)
        if num_envs * steps * compute <= MOST_ITERATIONS
    ]
    labels = {"form": FORM, "num_envs": num_envs, "copies": copies, "compute": compute}
    return [
        Case({**labels, "steps": work.steps_per_call}, lambda w=work: simulation(FORM, w, size.seconds))
        for work in works
    ]


def gains(records: Records) -> dict[tuple[int, int, int, int], list[float]]:
    """Rate over the rate of K = 1, repeat by repeat, by (N, K, S, C)."""
    found = {}
    for (num_envs, copies, compute), cases in by(records.of("9"), "num_envs", "copies", "compute").items():
        rates = {labels["steps"]: [one["steps_per_cpu_s"] for one in values] for labels, values in cases}
        for steps in rates:
            if steps > 1 and 1 in rates:
                ratios = [fused / single for fused, single in zip(rates[steps], rates[1], strict=False)]
                found[num_envs, steps, copies, compute] = ratios
    return found


def draw(records: Records, path: Path) -> None:
    """N from left to right, K from top to bottom, S along x, a line per C."""
    found = gains(records)
    sizes = sorted({key[0] for key in found})
    fused = sorted({key[1] for key in found})
    figure = Figure(figsize=(4 * len(sizes), 3 * len(fused)), layout="constrained")
    grid = figure.subplots(len(fused), len(sizes), sharex=True, sharey=True, squeeze=False)
    for row, steps in enumerate(fused):
        for column, num_envs in enumerate(sizes):
            axes = grid[row][column]
            for compute in sorted({key[3] for key in found}):
                points = sorted(
                    (key[2], ratios)
                    for key, ratios in found.items()
                    if key[:2] + key[3:] == (num_envs, steps, compute)
                )
                if points:
                    middles = [sorted(ratios)[len(ratios) // 2] for _, ratios in points]
                    axes.plot([s for s, _ in points], middles, marker=".", label=f"C = {compute}")
            axes.set_title(f"N = {num_envs}, K = {steps}", fontsize=9)
            log_axes(axes, "state factor S", "gain over K = 1")
            axes.set_yscale("log", base=2)
            axes.axhline(1.0, color="black", linewidth=0.8)
            axes.axhline(steps, color="black", linewidth=0.5, linestyle=":")
    grid[0][0].legend(fontsize=8)
    figure.suptitle(f"Figure 9: what fusion gains, form {FORM} (dotted: K, the most there is)")
    figure.savefig(path, dpi=110)


def findings(records: Records) -> str:
    """Gains of the largest K."""
    found = gains(records)
    lines = ["| N | K | C | gain over K = 1 by S: median (lowest - highest) |", "|---|---|---|---|"]
    for num_envs, steps, compute in sorted({(key[0], key[1], key[3]) for key in found}):
        cells = [
            f"S={key[2]}: {sorted(ratios)[len(ratios) // 2]:.3g} ({min(ratios):.3g} - {max(ratios):.3g})"
            for key, ratios in sorted(found.items())
            if (key[0], key[1], key[3]) == (num_envs, steps, compute)
        ]
        lines.append(f"| {num_envs} | {steps} | {compute} | {', '.join(cells)} |")
    return "\n".join(lines)
