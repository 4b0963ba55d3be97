"""Idle core sharing: GMIs blocked at a barrier let their co-located peers use their cores.

Synchronous training waits for the slowest GMI: simulations with more contacts take longer, and so do GMIs whose cores run
other processes. A GMI blocked in a collective leaves its cores idle. Peers on the same host that still simulate step some
of their environments on these cores.
"""

from __future__ import annotations

import torch

from actors.gmi import GmiContext
from actors.protocols import CoreSharingEnv, VecEnv

_MOST_CORES = 1024
"""Number of logical cores in an affinity mask (cpu_set_t)."""


def share_idle_cores(env: VecEnv, context: GmiContext) -> bool:
    """Let a CoreSharingEnv step environments on the idle cores of co-located peers.

    Collective: every GMI of the group calls it, with environments of the same class. Returns whether cores are shared: the
    same on all GMIs.
    """
    communicator = context.communicator
    barrier_progress = communicator.barrier_progress()
    if barrier_progress is None or not isinstance(env, CoreSharingEnv):
        return False
    own = torch.zeros(_MOST_CORES, dtype=torch.int64)
    own[list(context.identity.slice.cores)] = 1
    masks = communicator.all_gather(own)
    cores = {rank: mask.nonzero().flatten().tolist() for rank, mask in enumerate(masks)}
    idle_cores = {rank: ids for rank, ids in cores.items() if rank != communicator.rank and ids}
    return env.use_idle_cores(idle_cores, barrier_progress)
