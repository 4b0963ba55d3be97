"""Cores of GMIs that wait, lent to those that they wait for.

GMIs that train together wait for the last of them: worlds with more contacts take longer, and whatever else runs on a core
makes its GMI late. A GMI that has come to the next collective has nothing to do until all have, so those of its host that
still simulate step some of their environments on its cores.
"""

from __future__ import annotations

import torch

from actors.gmi import GmiContext
from actors.protocols import CoreSharingEnv, VecEnv

_MOST_CORES = 1024
"""Ids of logical cores that an affinity mask has room for (cpu_set_t)."""


def share_idle_cores(env: VecEnv, context: GmiContext) -> bool:
    """Let environments that can be stepped on others' cores use those of the GMIs that wait for this one.

    Every GMI of the group calls it, with environments of one kind. Returns whether they are of use: the same on all of them.
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
