"""Parity check: compares any backend of a simulator with the reference, from the middle of episodes.

from rayagi.envs.fused import parity
parity.check(MySimulator())

It runs twice. In float64 both take all steps independently: rounding is too small to hide a mistake in a program. In float32
rounding alone may exceed 1e-6 in 20 steps (docs/fused.md), so every step starts from the reference's state. Differences are
relative to a field's scale: its largest absolute value in any environment, or 1 if that is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rayagi.envs.errors import EnvError
from rayagi.envs.fused.backends import EnvConfig, FusedBackend, StepBatch, Totals
from rayagi.envs.fused.c.backend import CBackend
from rayagi.envs.fused.draws import random_actions
from rayagi.envs.fused.reference import TorchBackend
from rayagi.envs.fused.simulator import Simulator

EXACT = 1e-9
"""Tolerance in float64."""
_SPLIT_SHARE = 0.01
"""Largest fraction of environments that may terminate or choose differently, because a value is close to a threshold."""
Fields = Mapping[str, Tensor]
"""Results of K steps by name: (K, N), or (K, rows, N). Integers and booleans must be equal; ``final_obs`` counts only where
episodes ended."""


class ParityError(EnvError):
    """A backend differs from the reference."""

    def __init__(self, simulator: str, difference: str) -> None:
        super().__init__(simulator, difference)
        self.simulator, self.difference = simulator, difference

    def __str__(self) -> str:
        return f"{self.simulator}: {self.difference}"


@dataclass(frozen=True, slots=True)
class Parity:
    """Largest differences found, relative to a field's scale.

    Attributes:
        exact: in float64, over all steps
        single: in float32, over one step
        split: environments that ended at another step or chose another action, at a threshold
    """

    exact: float
    single: float
    split: int


def check(
    simulator: Simulator,
    make_backend: Callable[[EnvConfig], FusedBackend] = CBackend,
    *,
    num_envs: int = 500,
    num_steps: int = 20,
    warm_up: int = 30,
    tolerance: float = 1e-6,
    seed: int = 0,
) -> Parity:
    """Run a backend and the reference with the same random actions, from states after ``warm_up`` random steps.

    Args:
        simulator: the simulator to check
        make_backend: constructor of the backend; by default the C backend
        num_envs: environments; by default the last tile is partial
        num_steps: compared steps
        warm_up: random steps of the reference before
        tolerance: of one step in float32; raise it for a stiff simulator. In float64 it is EXACT
        seed: of all random numbers

    Raises:
        ParityError: they differ; the message names the step, the environment and the values.
        SimulatorError: the simulator cannot be traced.
        KernelError: the backend cannot be built on this machine.
    """

    def compare(real: torch.dtype, block: int, tolerance: float) -> tuple[float, int]:
        env_config = EnvConfig(simulator, num_envs, 7, seed, warm_up + num_steps // 2, real)
        reference, backend = TorchBackend(env_config), make_backend(env_config)
        wandered(reference, warm_up)
        backend.start()
        wanted, given = zip(*_steps(reference, backend, num_steps, block), strict=True)
        return compared(simulator, joined(wanted), joined(given), tolerance, free=block > 1)

    exact, single = compare(torch.float64, num_steps, EXACT), compare(torch.float32, 1, tolerance)
    return Parity(exact[0], single[0], exact[1] + single[1])


def wandered(reference: TorchBackend, num_steps: int) -> None:
    """Start, and take some random steps."""
    env_config = reference.env_config
    reference.start()
    reference.run_random_actions(0, num_steps, Totals.allocate(env_config.num_envs, real=env_config.real))


def _steps(
    reference: TorchBackend, backend: FusedBackend, num_steps: int, block: int
) -> Iterator[tuple[Fields, Fields]]:
    """Results of both, ``block`` steps at a time; each block starts from the reference's state."""
    env_config, obs_dim = reference.env_config, len(reference.observe())
    indices = torch.arange(env_config.num_envs)
    for begin in range(0, num_steps, block):
        drawn = [
            random_actions(env_config.simulator, 1, indices, env_config.seed, begin + k) for k in range(block)
        ]
        actions = torch.stack(drawn)
        actions = actions.to(env_config.real) if actions.is_floating_point() else actions
        backend.env_state.copy_(reference.env_state)
        out = [
            StepBatch.allocate(block, env_config.num_envs, obs_dim, real=env_config.real) for _ in range(2)
        ]
        reference.run(actions, out[0])
        backend.run(actions.to(backend.env_state.state.device), out[1])
        wanted, given = ({name: getattr(one, name).cpu() for name in StepBatch.__slots__} for one in out)
        yield wanted, given


def joined(parts: Sequence[Fields]) -> Fields:
    """Concatenate the blocks' results."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def compared(
    simulator: Simulator, wanted: Fields, given: Fields, tolerance: float, *, free: bool
) -> tuple[float, int]:
    """The largest difference relative to a field's scale, and the number of environments that diverged at a threshold.

    Args:
        simulator: for error messages
        wanted: the reference's results, including ``terminated`` and ``truncated``
        given: the backend's, of the same names
        tolerance: of the differences
        free: steps continue from each other, so that after a different termination the episodes no longer correspond

    Raises:
        ParityError: they differ.
    """
    # 1. Integers and booleans: equal, except in a few environments at a threshold.
    discrete = [name for name, values in wanted.items() if not values.is_floating_point()]
    differs = torch.stack([wanted[name] != given[name] for name in discrete]).any(0)
    diverged = differs.cummax(0).values if free else differs
    split = int(diverged.any(0).sum())
    if split > _SPLIT_SHARE * diverged.shape[1]:
        step, env = (int(i) for i in differs.nonzero()[0])
        raise ParityError(
            simulator.name,
            f"environment {env} ends at step {step} in one backend only, as do {split - 1} others",
        )
    # 2. Reals, in all other environments.
    ended = wanted["terminated"] | wanted["truncated"]
    reals = wanted.keys() - set(discrete)
    worst = 0.0
    for name in sorted(reals):
        mask = ~diverged & ended if name == "final_obs" else ~diverged
        mask = mask if wanted[name].ndim == 2 else mask.unsqueeze(1)
        difference = _same(simulator, name, given[name] * mask, wanted[name] * mask, tolerance)
        worst = max(worst, difference)
    return worst, split


def _same(simulator: Simulator, what: str, given: Tensor, wanted: Tensor, tolerance: float) -> float:
    """The largest difference relative to the field's scale. Raises ParityError above the tolerance."""
    scale = wanted.abs().amax((0, -1), keepdim=True).clamp(min=1.0)
    difference = (given - wanted).abs() / scale
    wrong = ~(difference <= tolerance)
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise ParityError(
            simulator.name,
            f"{what} at step and environment {place[0]}, {place[-1]} is {float(given[place])!r}, and "
            f"{float(wanted[place])!r} in the reference",
        )
    return float(difference.max())
