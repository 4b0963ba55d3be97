"""Alpha-beta cost model: latency plus bytes over bandwidth, as functions of the number of members, fitted to a profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from collectives.costs import UnitCost, unit_group
from collectives.errors import ProfileError
from collectives.layout import Layout
from collectives.profile import CostProfile, ProfilePoint, StepShape
from collectives.schedule import Op, Primitive, Step


@dataclass(frozen=True, slots=True)
class CostCoefficients:
    """Cost of one operation by one primitive among g members, with p parallel groups, on S bytes, in seconds:

        alpha + alpha_member g + (beta + beta_shared g p) moved

    ``moved`` is the bytes that each member moves: S through memory, S (g - 1) / g around a ring.

    Attributes:
        alpha: seconds per operation
        alpha_member: seconds per operation and member
        beta: seconds per byte on a member's own path
        beta_shared: seconds per byte on a path that all members of a host share, such as its memory bandwidth
    """

    alpha: float
    alpha_member: float
    beta: float
    beta_shared: float

    def seconds(self, shape: StepShape, nbytes: float) -> float:
        """Projected seconds."""
        factors = (self.alpha, self.alpha_member, self.beta, self.beta_shared)
        return sum(a * b for a, b in zip(factors, _features(shape, nbytes), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class AlphaBetaModel:
    """Cost coefficients of each operation, measured or assumed."""

    origin: str
    """Source of the numbers, as text."""
    coefficients: Mapping[tuple[Primitive, Op], CostCoefficients]
    points: tuple[ProfilePoint, ...] = ()
    """Measurements that they were fitted to; none if they are assumed."""

    @classmethod
    def fit(cls, profile: CostProfile) -> AlphaBetaModel:
        """Fit each operation's coefficients to its points: non-negative least squares of relative errors.

        Raises:
            ProfileError: the profile is empty, or has an operation with fewer than two sizes.
        """
        if not profile.points:
            raise ProfileError(profile.machine, "nothing was measured")
        by_operation: dict[tuple[Primitive, Op], list[ProfilePoint]] = defaultdict(list)
        for point in profile.points:
            by_operation[point.shape.primitive, point.shape.op].append(point)
        for (primitive, op), points in by_operation.items():
            if len({point.nbytes for point in points}) < 2:
                raise ProfileError(profile.machine, f"{op} by {primitive} needs measurements of two sizes")
        coefficients = {operation: _fitted(points) for operation, points in by_operation.items()}
        worst = max(
            abs(
                coefficients[point.shape.primitive, point.shape.op].seconds(point.shape, point.nbytes)
                / point.seconds
                - 1
            )
            for point in profile.points
        )
        origin = f"measured on {profile.machine}; the fit is within {worst:.0%} of all {len(profile.points)} points"
        return cls(origin=origin, coefficients=coefficients, points=profile.points)

    def step_s(self, step: Step, layout: Layout, nbytes: int) -> float:
        """Projected seconds of a step. Raises ProfileError where the model lacks this operation by this primitive."""
        shape = StepShape.from_step(step, layout)
        coefficients = self.coefficients.get((step.primitive, step.op))
        if coefficients is None:
            raise ProfileError(self.origin, f"{step.op} by {step.primitive} was not measured")
        return coefficients.seconds(shape, nbytes)

    def unit_costs(self, layout: Layout, nbytes: int) -> dict[Primitive, UnitCost]:
        """GMI-DRL's unit costs for a layout: as measured at this size, else by the fit."""
        measured = {(point.shape, point.nbytes): point.seconds for point in self.points}
        units: dict[Primitive, UnitCost] = {}
        for primitive, op in self.coefficients:
            group = unit_group(primitive, layout)
            if op == "all_reduce" and len(group) > 1:
                step = Step("all_reduce", primitive, (group,))
                seconds = measured.get((StepShape.from_step(step, layout), nbytes)) or self.step_s(
                    step, layout, nbytes
                )
                units[primitive] = UnitCost(members=len(group), seconds=seconds)
        return units


def _features(shape: StepShape, nbytes: float) -> tuple[float, float, float, float]:
    """Factors of alpha, alpha_member, beta, beta_shared."""
    on_memory = shape.primitive in ("ip", "device")
    moved = nbytes if on_memory else nbytes * (shape.members - 1) / shape.members
    return 1.0, float(shape.members), moved, moved * shape.members * shape.parallel


def _fitted(points: Sequence[ProfilePoint]) -> CostCoefficients:
    """Non-negative least squares, exact: tries every subset of the four coefficients as the nonzero ones."""
    # Each row is divided by the measured seconds, so that the residual is the relative error.
    seconds = np.array([point.seconds for point in points])
    rows = np.array([_features(point.shape, point.nbytes) for point in points]) / seconds[:, None]
    scale = np.linalg.norm(rows, axis=0)
    best, least = np.zeros(4), np.inf
    for size in range(1, 5):
        for columns in combinations(range(4), size):
            found = np.linalg.lstsq(rows[:, columns] / scale[list(columns)], np.ones(len(rows)), rcond=None)[
                0
            ]
            residual = float(np.linalg.norm(rows[:, columns] @ (found / scale[list(columns)]) - 1))
            # A larger subset must reduce the residual: if points cannot separate two coefficients, the first gets both.
            if (found >= 0).all() and residual < least - 1e-9:
                best, least = np.zeros(4), residual
                best[list(columns)] = found / scale[list(columns)]
    return CostCoefficients(*(float(value) for value in best))


NOMINAL_MODEL = AlphaBetaModel(
    origin="nominal rates of a DGX A100 (PCIe 4.0 x16 32 GB/s, host memory 410 GB/s, NVLink 300 GB/s each way, network "
    "200 Gb/s) and guessed latencies; nothing was measured",
    coefficients={
        # Through the host each GMI's bytes cross its PCIe link down and up, and the host's memory four times.
        ("ip", "all_reduce"): CostCoefficients(20e-6, 2e-6, 2 / 32e9, 4 / 410e9),
        ("ip", "reduce"): CostCoefficients(20e-6, 2e-6, 1 / 32e9, 2 / 410e9),
        ("ip", "broadcast"): CostCoefficients(20e-6, 2e-6, 1 / 32e9, 2 / 410e9),
        ("rp", "all_reduce"): CostCoefficients(15e-6, 3e-6, 2 / 300e9, 0.0),
        ("rp", "reduce"): CostCoefficients(15e-6, 3e-6, 1 / 300e9, 0.0),
        ("rp", "broadcast"): CostCoefficients(15e-6, 3e-6, 1 / 300e9, 0.0),
        ("net", "all_reduce"): CostCoefficients(30e-6, 10e-6, 2 / 25e9, 0.0),
    },
)
"""For plans without measurements. The rates are the vendors'; a profile of the actual machine replaces all of it."""
