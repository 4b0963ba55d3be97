"""Sharded optimiser: one copy of parameters and of Adam's moments per host; each trainer steps one shard.

Replicas all-reduce the gradient, and each repeats the same clipping and step. With shared memory, each trainer
reduce-scatters, clips and steps its own shard, and reads the shards of the others. This is the partition of ZeRO stage 1
(Rajbhandari et al. 2020, §5.1) without the all-gather: each trainer does 1 / world_size of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from collectives.communicator import Communicator
from collectives.shares import shares
from rayagi.models.networks import padded_size
from rayagi.native.optimizer_step import SHARE_STRIDE


@dataclass(frozen=True, slots=True)
class ShardedOptimizer:
    """Shared memory of all trainers of a host.

    Attributes:
        parameters: flat                                             (S,) float32
        exp_avg, exp_avg_sq: Adam's moments, zero to begin with      (S,) float32 each
        share_sums: each shard's sum of squared gradients             (world_size, SHARE_STRIDE) float64
        share: shard that this trainer writes; partitioned as in ``Communicator.reduce_scatter``
    """

    parameters: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    share_sums: Tensor
    share: slice

    @classmethod
    def create(cls, model: nn.Module, communicator: Communicator) -> Self | None:
        """Starts with rank 0's parameters. None if trainers share no memory.

        Collective: all trainers call it. After the loss of a trainer, the old contents are unusable: some shards may have
        been stepped and others not.
        """
        size = padded_size(model)
        memory = communicator.common(3 * size, torch.float32)
        if memory is None:
            return None
        share_sums = communicator.common(communicator.world_size * SHARE_STRIDE, torch.float64)
        assert share_sums is not None
        parameters, exp_avg, exp_avg_sq = memory.chunk(3)
        if communicator.rank == 0:
            own = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
            parameters[: len(own)] = own
        communicator.barrier()
        share = slice(*shares(size, communicator.world_size)[communicator.rank])
        return cls(parameters, exp_avg, exp_avg_sq, share_sums.view(-1, SHARE_STRIDE), share)
