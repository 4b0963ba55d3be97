"""Compares two profiles: seconds per iteration and shares, with significance over iterations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayagi.profiler.overlap import NO_ITERATION, Breakdown, Row
from rayagi.profiler.summary import aligned, num_iterations, operation_name, seconds, set_name
from rayagi.profiler.trace import printable

PERMUTATIONS = 10_000
_FEWEST = 4
"""Iterations of each profile below which nothing can be significant at 5 %: there are 70 ways to divide 8."""
_MOST = 200
"""Iterations of each profile that are compared, evenly chosen."""
_SIGNIFICANT = 0.05

_CHUNK = 128
"""Rows whose permutations are in memory at a time."""

_Key = tuple[str, frozenset[str]]
"""Operation and set of categories; the empty set for the whole operation."""


@dataclass(frozen=True)
class _Samples:
    """Nanoseconds of each key by iteration, without those that have none; and the numbers of all iterations."""

    sums: dict[_Key, Counter[int]]
    iterations: list[int]


@dataclass(frozen=True)
class Difference:
    """One operation, or one set of categories of it, in two profiles.

    Attributes:
        operation: with its phase
        categories: empty for the whole operation
        first_ns: per iteration or unit of work, or in all if a profile has no iterations
        second_ns: the same of the second profile
        first_share: of the profile's time
        second_share: the same of the second profile
        p_value: how often chance alone makes a difference of the means as large, corrected for the number of rows (Holm);
            None with too few iterations
    """

    operation: str
    categories: frozenset[str]
    first_ns: float
    second_ns: float
    first_share: float
    second_share: float
    p_value: float | None


def differences(
    first: Breakdown, second: Breakdown, work: tuple[float, float] = (1.0, 1.0)
) -> list[Difference]:
    """Compare the merged rows of two profiles, the largest differences first.

    Iterations count if both profiles have numbered ones; time outside of them is then left out on both sides.

    Args:
        first: a profile
        second: another one
        work: how much an iteration of each does, in any unit: times are then of one unit, such as an environment step
    """
    by_iteration = all(num_iterations(each.merged) for each in (first, second))
    samples = [_samples(each.merged, by_iteration) for each in (first, second)]
    keys = sorted({key for each in samples for key in each.sums}, key=lambda key: (key[0], sorted(key[1])))
    one, other = (_means(each, keys) / amount for each, amount in zip(samples, work, strict=True))
    p_values: list[float | None] = [None] * len(keys)
    if by_iteration and min(len(each.iterations) for each in samples) >= _FEWEST:
        tables = [_matrix(each, keys) / amount for each, amount in zip(samples, work, strict=True)]
        p_values = list(holm(permutation_p_values(tables[0], tables[1])))
    operations = np.array([not sets for _, sets in keys], bool)
    rows = [
        Difference(*key, *means, *shares, p_value)
        for key, means, shares, p_value in zip(
            keys,
            zip(one.tolist(), other.tolist(), strict=True),
            zip(_shares(one, operations), _shares(other, operations), strict=True),
            p_values,
            strict=True,
        )
    ]
    return sorted(rows, key=lambda each: -abs(each.second_ns - each.first_ns))


def _samples(rows: Iterable[Row], by_iteration: bool) -> _Samples:
    chosen = [row for row in rows if not by_iteration or row.cell.iteration != NO_ITERATION]
    sums: dict[_Key, Counter[int]] = {}
    for row in chosen:
        name = operation_name(row.cell.phase, row.cell.operation)
        for categories in (row.categories, frozenset[str]()):
            values = sums.setdefault((name, categories), Counter())
            values[row.cell.iteration if by_iteration else 0] += row.ns
    return _Samples(sums, sorted({number for values in sums.values() for number in values}))


def _means(samples: _Samples, keys: Sequence[_Key]) -> NDArray[np.float64]:
    """Over all iterations. Shape (keys,)"""
    count = len(samples.iterations) or 1
    return np.array([samples.sums.get(key, Counter[int]()).total() / count for key in keys], np.float64)


def _matrix(samples: _Samples, keys: Sequence[_Key]) -> NDArray[np.float64]:
    """Of more than _MOST iterations, every k-th. Shape (keys, iterations)"""
    some = samples.iterations[:: -(-len(samples.iterations) // _MOST)]
    columns = {number: column for column, number in enumerate(some)}
    table = np.zeros((len(keys), len(some)))
    for row, key in enumerate(keys):
        for number, ns in samples.sums.get(key, {}).items():
            if number in columns:
                table[row, columns[number]] = ns
    return table


def _shares(means: NDArray[np.float64], operations: NDArray[np.bool_]) -> list[float]:
    shares: list[float] = (means / (means[operations].sum() or 1.0)).tolist()
    return shares


def permutation_p_values(
    first: NDArray[np.float64], second: NDArray[np.float64], seed: int = 0
) -> list[float]:
    """For each row, the share of random divisions of all values whose means differ at least as much; two-sided.

    Args:
        first: shape (rows, n)
        second: shape (rows, m)
        seed: of the divisions
    """
    num_first, num_second = first.shape[1], second.shape[1]
    pooled = np.concatenate([first, second], axis=1)
    observed = np.abs(first.mean(axis=1) - second.mean(axis=1))
    keys = np.random.default_rng(seed).random((PERMUTATIONS, num_first + num_second))
    chosen = np.zeros_like(keys)
    np.put_along_axis(chosen, np.argpartition(keys, num_first - 1, axis=1)[:, :num_first], 1.0, axis=1)
    extreme = np.zeros(len(pooled), np.int64)
    for at in range(0, len(pooled), _CHUNK):
        rows = slice(at, at + _CHUNK)
        sums = chosen @ pooled[rows].T  # (permutations, rows)
        differences = np.abs(sums / num_first - (pooled[rows].sum(axis=1) - sums) / num_second)
        # Rounding must not make a division that equals the observed one look smaller.
        least = observed[rows] - 1e-9 * np.abs(pooled[rows]).max(axis=1)
        extreme[rows] = (differences >= least).sum(axis=0)
    # The observed division is one of the possible ones: p is never 0.
    p_values: list[float] = ((extreme + 1) / (PERMUTATIONS + 1)).tolist()
    return p_values


def holm(p_values: Sequence[float]) -> list[float]:
    """Corrected for the number of comparisons: the i-th smallest of m is multiplied by m - i; they stay in order."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda each: p_values[each])):
        largest = max(largest, min(1.0, p_values[place] * (len(p_values) - rank)))
        corrected[place] = largest
    return corrected


def difference_text(rows: Sequence[Difference], most: int = 40, unit: str = "iteration") -> str:
    """For a terminal; ``unit`` says what the times are of."""
    tested = any(row.p_value is not None for row in rows)
    lines = [["operation", "categories", "A", "B", "B - A", "change", "share A", "share B", "p"]]
    for row in rows[:most]:
        change = f"{100 * (row.second_ns / row.first_ns - 1):+.1f} %" if row.first_ns else "new"
        mark = (
            "" if row.p_value is None else f"{row.p_value:.4f}{' *' if row.p_value < _SIGNIFICANT else '  '}"
        )
        lines.append(
            [
                row.operation,
                set_name(row.categories) or "all",
                seconds(row.first_ns),
                seconds(row.second_ns),
                seconds(row.second_ns - row.first_ns),
                change,
                f"{100 * row.first_share:.1f} %",
                f"{100 * row.second_share:.1f} %",
                mark,
            ]
        )
    note = (
        f"Mean time per {unit}. * significant at 5 %: permutation test over iterations, corrected for the number of rows."
        if tested
        else f"No significance: both profiles need at least {_FEWEST} numbered iterations."
    )
    return "\n".join(printable(line) for line in [*aligned(lines, left=2), note])
