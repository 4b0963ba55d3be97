"""Packer (GMI-DRL §3.2.2; compressor in the preprint): groups fields into channels, and sets groups per transfer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch

from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.errors import SchemaError
from collectives.experience.grouping import Package, group_packages
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field

ROW_FIELD = "env"
"""Field of a ragged group: the row of the full groups that each ragged row belongs to."""
_GOOD_SHARE = 0.95
"""Share of the best bandwidth that the chosen batch must reach."""
_TRY_S = 0.03
_TRY_BYTES = 2**26
"""Largest transfer that is measured."""


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """Channels of one set of producers and consumers: one channel per group of fields."""

    groups: tuple[ExperienceSchema, ...]
    """The first is not ragged."""
    batch: int = 1
    """Groups per transfer: rollouts of an agent that are sent together."""
    ragged: frozenset[str] = frozenset()
    """Names of groups with a row count of their own; each has an int64 field ``env``."""
    value: float = 0.0
    """TOP_mov (eq. 6)."""
    reason: str = "as given"

    def __post_init__(self) -> None:
        names = [group.name for group in self.groups]
        if not self.full or self.groups[0].name in self.ragged or len(set(names)) != len(names):
            raise ValueError(
                f"groups {names}, ragged {sorted(self.ragged)}: the first must be full; all need names"
            )
        fields = [field.name for group in self.full for field in group.fields]
        for twice in {name for name in fields if fields.count(name) > 1}:
            raise SchemaError(
                names[0], f"field {twice!r} is in two groups of {names}: give each a name of its own"
            )
        for group in self.groups:
            if group.name in self.ragged and Field(name=ROW_FIELD, dtype=torch.int64) not in group.fields:
                raise SchemaError(
                    group.name, f"a ragged group needs a field {ROW_FIELD}: int64[], the row it belongs to"
                )

    @property
    def full(self) -> tuple[ExperienceSchema, ...]:
        """Groups that are not ragged: one row per row of experience."""
        return tuple(group for group in self.groups if group.name not in self.ragged)

    def __str__(self) -> str:
        channels = "; ".join(
            f"{group.name}{' (ragged)' if group.name in self.ragged else ''}: "
            f"{', '.join(map(str, group.fields))} ({group.row_bytes} B a row)"
            for group in self.groups
        )
        return f"{len(self.groups)} channels, {self.batch} group(s) per transfer: {channels}\n{self.reason}"


def pack(
    *axes: ExperienceSchema,
    ragged: Collection[str] = (),
    aligned: Callable[[Field, Field], bool] = lambda one, other: True,
) -> ChannelPlan:
    """Group fields into channels by eq. 5-8.

    Args:
        axes: one schema per row axis, full ones first; fields of different axes never share a channel (eq. 8)
        ragged: names of the schemas with a row count of their own
        aligned: further restriction: whether two fields of one axis may share a channel (eq. 8)

    Raises:
        SchemaError: the names of fields clash.
        ValueError: too many fields, or no full schema.
    """
    fields = {f"{axis.name}/{field.name}": (axis, field) for axis in axes for field in axis.fields}

    def may_share(one: Package, other: Package) -> bool:
        (axis, field), (other_axis, other_field) = fields[one.name], fields[other.name]
        return axis is other_axis and aligned(field, other_field)

    grouping = group_packages(
        [Package(name, field.row_bytes) for name, (_, field) in fields.items()], may_share
    )
    schemas, unequal = [], set()
    for axis in axes:
        found = [group for group in grouping.groups if fields[group[0].name][0] is axis]
        for index, group in enumerate(found):
            name = axis.name if len(found) == 1 else f"{axis.name}.{index}"
            schemas.append(ExperienceSchema(name, tuple(fields[package.name][1] for package in group)))
            unequal |= {name} if axis.name in ragged else set()
    return ChannelPlan(
        groups=tuple(schemas), ragged=frozenset(unequal), value=grouping.value, reason=str(grouping)
    )


def with_batch(plan: ChannelPlan, *, rows: int, most: int) -> ChannelPlan:
    """The plan with the fewest groups per transfer that reach 95 % of the best measured bandwidth.

    Measures on this host, for some tenths of a second: keep the result.

    Args:
        plan: groups of fields
        rows: of one rollout of the agent
        most: upper bound of groups per transfer; more groups make experience older on arrival

    Raises:
        ChannelError: there is not enough memory.
    """
    # Powers of two, up to ``most`` and up to the largest transfer worth measuring.
    sizes = [1]
    while sizes[-1] * 2 <= most and 2 * sizes[-1] * rows * plan.groups[0].row_bytes <= _TRY_BYTES:
        sizes.append(2 * sizes[-1])
    rates = {batch: measure_bandwidth(plan.full, batch * rows) for batch in sizes}
    chosen = smallest_good(rates)
    measured = ", ".join(f"{batch}: {rate / 1e6:.0f} MB/s" for batch, rate in rates.items())
    reason = f"{plan.reason}\n{chosen} group(s) of {rows} rows per transfer: the fewest within 5 % of the best ({measured})"
    return replace(plan, batch=chosen, reason=reason)


def smallest_good(rates: dict[int, float]) -> int:
    """The smallest batch whose rate is at least 95 % of the best."""
    enough = _GOOD_SHARE * max(rates.values())
    return min(batch for batch, rate in rates.items() if rate >= enough)


def measure_bandwidth(groups: Sequence[ExperienceSchema], rows: int, limit_s: float = _TRY_S) -> float:
    """Bytes per second through real channels: written once and read once, in batches of ``rows``."""
    consumer_endpoints = [ConsumerEndpoint(group) for group in groups]
    rings = [ProducerRing(group, rows=rows, slots=2) for group in groups]
    sources = [_filled(group, rows) for group in groups]
    targets = [_filled(group, rows) for group in groups]
    try:
        for ring, consumer_endpoint in zip(rings, consumer_endpoints, strict=True):
            ring.attach(consumer_endpoint.endpoint)
        num_bytes = sum(group.row_bytes for group in groups) * rows
        best_s, begin, tries = float("inf"), time.perf_counter(), 0
        while tries < 3 or time.perf_counter() - begin < limit_s:
            started, tries = time.perf_counter(), tries + 1
            for ring, source in zip(rings, sources, strict=True):
                ring.put(source, version=0)
            for consumer_endpoint, target in zip(consumer_endpoints, targets, strict=True):
                batch = consumer_endpoint.take()
                assert batch is not None  # its producer is attached
                with batch:
                    for name, tensor in batch.tensors.items():
                        target[name].copy_(tensor)
                    del tensor
            best_s = min(best_s, time.perf_counter() - started)
        return num_bytes / best_s
    finally:
        for ring in rings:
            ring.close(timeout_s=0.0)
        for consumer_endpoint in consumer_endpoints:
            consumer_endpoint.close()


def _filled(group: ExperienceSchema, rows: int) -> dict[str, torch.Tensor]:
    return {field.name: torch.ones((rows, *field.shape), dtype=field.dtype) for field in group.fields}
