"""``python -m experiments.stencil.run``: the plate in one process and on GMIs, how far apart they are, and both times.

Time is told, not judged: GMIs gain where strips are large beside their halos of one row.
"""

from __future__ import annotations

import argparse
import time

import torch

from experiments.stencil.heat import HeatStrip, solve
from rayagi.programs import GmiConfig, GmiManager

TOLERANCE = 1e-12


def main() -> int:
    """Compare; 0 where they agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gmis", type=int, default=2, help="GMIs (default 2)")
    parser.add_argument("--size", type=int, default=512, help="inner points along an edge (default 512)")
    parser.add_argument("--steps", type=int, default=200, help="time steps (default 200)")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    whole, change = solve(arguments.size, arguments.steps)
    alone_s = time.perf_counter() - begin

    manager = GmiManager(GmiConfig(), name="heat", on_plan=lambda plan: print(plan.table()))
    for gmi_id in range(arguments.gmis):
        manager.add_gmi(gmi_id, HeatStrip, size=arguments.size)
    with manager:
        begin = time.perf_counter()
        answers = manager.gmi_run(arguments.steps)
        gmis_s = time.perf_counter() - begin
    strips = torch.cat([strip for strip, _ in answers])
    apart = float((strips - whole).abs().max())
    print(f"one process: {alone_s:.2f} s, last change {change:.3e}")
    print(f"{arguments.gmis} GMIs: {gmis_s:.2f} s, last change {answers[0][1]:.3e}, {apart:g} apart at most")
    return int(apart > TOLERANCE or {value for _, value in answers} != {change})


if __name__ == "__main__":
    raise SystemExit(main())
