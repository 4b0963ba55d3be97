"""Explicit finite differences for the heat equation in a square plate, whole and cut into strips over GMIs.

    u'[i, j] = u[i, j] + r (u[i-1, j] + u[i+1, j] + u[i, j-1] + u[i, j+1] - 4 u[i, j])

with r = alpha dt / dx^2 <= 1/4. The plate has n x n inner points and an edge whose temperature stays. Each GMI holds a
strip of rows and one row of each neighbour (a halo), which it gets anew before every step. Every point is computed from
the same numbers in the same order whichever GMI has it, so strips give the whole plate to the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actors.gmi import GmiContext
from rayagi.programs import GmiProgram

RATE = 0.2
"""r: below the limit of stability, 1/4."""
HOT, COLD = 1.0, 0.0
"""The upper edge, and everything else at the start."""


def step(plate: Tensor) -> Tensor:
    """The inner points one step later.

    Args:
        plate: temperatures, edge or halo included   (rows + 2, n + 2)

    Returns:
        (rows, n)
    """
    inner = plate[1:-1, 1:-1]
    neighbours = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
    return inner + RATE * (neighbours - 4 * inner)


def cold_plate(rows: int, size: int, *, upper_edge: bool) -> Tensor:
    """(rows + 2, size + 2) float64 at the start; ``upper_edge``: whether its first row is the plate's hot edge."""
    plate = torch.full((rows + 2, size + 2), COLD, dtype=torch.float64)
    if upper_edge:
        plate[0] = HOT
    return plate


def solve(size: int, num_steps: int) -> tuple[Tensor, float]:
    """The plate after some steps in one process: inner points (size, size), and the largest change of the last step."""
    plate = cold_plate(size, size, upper_edge=True)
    change = 0.0
    for _ in range(num_steps):
        new = step(plate)
        change = float((new - plate[1:-1, 1:-1]).abs().max())
        plate[1:-1, 1:-1] = new
    return plate[1:-1, 1:-1].clone(), change


def rows_of(gmi_id: int, num_gmis: int, size: int) -> range:
    """The rows of a GMI's strip: as many for each as possible."""
    return range(gmi_id * size // num_gmis, (gmi_id + 1) * size // num_gmis)


class HeatStrip(GmiProgram):
    """One GMI's strip of the plate."""

    def __init__(self, context: GmiContext, size: int) -> None:
        super().__init__(context)
        rows = rows_of(self.gmi_id, self.num_gmis, size)
        self.plate = cold_plate(len(rows), size, upper_edge=self.gmi_id == 0).to(self.device)

    def gmi_run(self, num_steps: int) -> tuple[Tensor, float]:
        """Go some steps on; the strip's inner points, and the largest change of the last step anywhere in the plate."""
        change = torch.zeros(1, dtype=torch.float64, device=self.device)
        for _ in range(num_steps):
            self._exchange_halos()
            new = step(self.plate)
            change[0] = (new - self.plate[1:-1, 1:-1]).abs().max()
            self.all_reduce(change, "max")
            self.plate[1:-1, 1:-1] = new
        return self.plate[1:-1, 1:-1].cpu(), float(change)

    def _exchange_halos(self) -> None:
        above, below = self.gmi_id - 1, self.gmi_id + 1
        sent = []
        if above >= 0:
            sent.append(self.send(self.plate[1], to=above))
        if below < self.num_gmis:
            sent.append(self.send(self.plate[-2], to=below))
        if above >= 0:
            self.plate[0] = self.recv(source=above)
        if below < self.num_gmis:
            self.plate[-1] = self.recv(source=below)
        for message in sent:
            message.wait()
