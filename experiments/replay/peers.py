"""The fastest other replay of each workload, where it is installed: cpprb, and torchrl for slices of trajectories.

    pip install cpprb==11.0.0 torchrl==0.14.1     # beside rayagi; the bench then has their variants

Each function makes a variant of experiments.replay.workloads.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np

try:
    import cpprb
except ImportError:
    cpprb = None

Step = Callable[[], object]
Consumer = Callable[[int], Step]
SLICE = 64


def uniform(plain: dict[str, np.ndarray], batch: int) -> dict[str, Consumer]:
    """cpprb's uniform draws: of a buffer of one process, and of one that several share."""
    if cpprb is None:
        return {}
    own, shared = (_filled(kind, plain) for kind in ("ReplayBuffer", "MPReplayBuffer"))
    return {
        "cpprb": lambda seed: _sampling(own, batch, seed),
        "cpprb, shared": lambda seed: _sampling(shared, batch, seed),
    }


def prioritized(plain: dict[str, np.ndarray], batch: int) -> dict[str, Consumer]:
    """cpprb's prioritised draws, with an update of the batch's priorities."""
    if cpprb is None:
        return {}
    own, shared = (_filled(kind, plain) for kind in ("PrioritizedReplayBuffer", "MPPrioritizedReplayBuffer"))
    return {
        "cpprb": lambda seed: _updating(own, batch, seed),
        "cpprb, shared": lambda seed: _updating(shared, batch, seed),
    }


def inserting(plain: dict[str, np.ndarray], rows: int) -> dict[str, Consumer]:
    """cpprb's insertion into a shared buffer."""
    if cpprb is None:
        return {}
    shared = _filled("MPReplayBuffer", plain)
    some = {name: data[:rows, 0] for name, data in plain.items()}
    return {"cpprb, shared": lambda _seed: lambda: shared.add(**some)}


def slices(plain: dict[str, np.ndarray], batch: int) -> dict[str, Consumer]:
    """torchrl's slices of trajectories, of one process."""
    try:
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
    except ImportError:
        return {}
    rows, steps = next(iter(plain.values())).shape[:2]
    sampler = SliceSampler(slice_len=SLICE, traj_key="episode", cache_values=True)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(rows * steps), batch_size=batch * SLICE, sampler=sampler
    )
    for row in range(rows):
        columns = {name: torch.from_numpy(data[row]) for name, data in plain.items()}
        buffer.extend(TensorDict({**columns, "episode": torch.full((steps,), row)}, [steps]))
    return {"torchrl": lambda _seed: buffer.sample}


def _filled(kind: str, plain: dict[str, np.ndarray]) -> Any:
    rows, steps = next(iter(plain.values())).shape[:2]
    shapes = {
        name: {"shape": data.shape[2:] if steps == 1 else data.shape[1:]} for name, data in plain.items()
    }
    fork = {"ctx": multiprocessing.get_context("fork")} if kind.startswith("MP") else {}
    buffer = getattr(cpprb, kind)(rows, shapes, **fork)
    for begin in range(0, rows, 1000):
        some = {name: data[begin : begin + 1000] for name, data in plain.items()}
        buffer.add(**{name: data[:, 0] if steps == 1 else data for name, data in some.items()})
    return buffer


def _sampling(buffer: Any, batch: int, seed: int) -> Step:
    np.random.seed(seed)  # noqa: NPY002 - it is what cpprb draws from
    return lambda: buffer.sample(batch)


def _updating(buffer: Any, batch: int, seed: int) -> Step:
    priorities = np.random.default_rng(seed).random(batch) + 1e-3

    def step() -> None:
        found = buffer.sample(batch, 0.4)
        buffer.update_priorities(found["indexes"], priorities)

    return step
