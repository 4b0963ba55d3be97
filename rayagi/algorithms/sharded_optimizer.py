"""One copy of parameters and of Adam's moments for all trainers of a host, each of which steps a share of it.

Replicas reduce a whole gradient to everyone, and then all of them clip the same gradient and make the same step. Where they
share memory, each reduces, clips and steps its share alone, and sees what the others stepped (the partition of ZeRO's first
stage, Rajbhandari et al. 2020, §5.1, without its gathering): a step takes world_size times less of each.
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
    """Memory that all trainers read.

    Attributes:
        parameters: flat                                             (S,) float32
        exp_avg, exp_avg_sq: Adam's moments, zero to begin with      (S,) float32 each
        share_sums: each share's part of the gradient's norm          (world_size, SHARE_STRIDE) float64
        share: of the elements, what this trainer writes; as ``Communicator.reduce_scatter`` shares them
    """

    parameters: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    share_sums: Tensor
    share: slice

    @classmethod
    def create(cls, model: nn.Module, communicator: Communicator) -> Self | None:
        """Begins with rank 0's parameters. None where trainers share no memory.

        All trainers call it alike. What was there before a loss of one of them is of no use: some shares may have been
        stepped and others not.
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
