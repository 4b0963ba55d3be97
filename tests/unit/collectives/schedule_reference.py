"""Reference execution of schedules in one process, which every transport is compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collectives.schedule import CollectiveSchedule, Step
from collectives.transports.base import ReduceOp


def execute(schedule: CollectiveSchedule, tensors: Sequence[Tensor], op: ReduceOp = "sum") -> None:
    """All-reduce ``tensors``, one per rank, of equal shape and dtype, in place and step by step.

    Sums follow the order of the groups; bfloat16 is accumulated in float32 and rounded once per step; ``mean`` divides
    once, at the end. Contents that a step leaves unspecified are overwritten with garbage, so that tests find code
    that relies on them.

    Raises:
        ValueError: not one tensor per rank, or the mean of int64.
    """
    if len(tensors) != schedule.layout.world_size:
        raise ValueError(f"{len(tensors)} tensors for {schedule.layout.world_size} ranks")
    if op == "mean" and not tensors[0].is_floating_point():
        raise ValueError(f"the mean of {tensors[0].dtype} is not defined; use sum")
    for step in schedule.steps:
        for group in step.groups:
            _do(step, [tensors[rank] for rank in group], op)
    if op == "mean":
        for tensor in tensors:
            tensor.div_(len(tensors))


def _do(step: Step, members: list[Tensor], op: ReduceOp) -> None:
    first, *others = members
    if step.op != "broadcast":
        first.copy_(_reduced(members, op))
    for other in others:
        if step.op == "reduce":
            other.fill_(float("nan") if other.is_floating_point() else torch.iinfo(other.dtype).min // 2)
        else:
            other.copy_(first)


def _reduced(members: list[Tensor], op: ReduceOp) -> Tensor:
    wide = torch.float32 if members[0].dtype == torch.bfloat16 else members[0].dtype
    result = members[0].to(wide, copy=True)
    for member in members[1:]:
        if op == "max":
            torch.maximum(result, member.to(wide), out=result)
        else:
            result += member.to(wide)
    return result
