"""Figure 8 on a GPU, as in the paper: K steps of CartPole in a call, fused in one kernel or not, against N."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.fusion.figure import Case, Size
from experiments.fusion.fusion import cases
from experiments.fusion.plots import draw_rates, form_and_steps, rate_table
from experiments.fusion.records import Records

MOST_STEPS = {"torch-gpu": 1.1e7, "xla": 1.1e8, "warp-gpu": 1.1e8, "cuda": 1.1e8, "c": 1.1e8}
"""Environment steps of one call: their actions alone take as many bytes."""
STEPS = {"torch-gpu": (1,)}
"""K of forms that take steps one at a time whatever a call asks for."""


def groups(size: Size) -> Iterator[Sequence[Case]]:
    """One per N. XLA is JAX's on its first device; C is on the host's cores, beside them."""
    for num_envs in (4096, 1 << 20) if size.quick else (16, 256, 4096, 65536, 1 << 20):
        yield cases(num_envs, MOST_STEPS, STEPS, size)


def draw(records: Records, path: Path) -> None:
    """A line per form and K."""
    draw_rates(records.of("gpu"), form_and_steps, "Figure 8 on a GPU: K steps of CartPole in a call", path)


def findings(records: Records) -> str:
    """Every median."""
    return rate_table(records.of("gpu"), 1e6, "Million")
