"""Packer (GMI-DRL §3.2.2; compressor in the preprint): groups fields into channels."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from collectives.errors import counted
from collectives.experience.errors import SchemaError
from collectives.experience.grouping import Package, group_packages
from collectives.experience.schema import ExperienceSchema, Field

ROW_FIELD = "env"
"""Field of a ragged group: the row of the full groups that each ragged row belongs to."""


@dataclass(frozen=True, slots=True)
class ChannelPlan:
    """Channels of one set of producers and consumers: one channel per group of fields."""

    groups: tuple[ExperienceSchema, ...]
    """The first is not ragged."""
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
        return f"{counted(len(self.groups), 'channel')}: {channels}\n{self.reason}"


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
