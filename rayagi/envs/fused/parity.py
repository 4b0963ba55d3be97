"""Whether a simulator's kernels do what its functions say: any form against the reference, from the middle of episodes.

from rayagi.envs.fused import parity
parity.check(MySimulator())

Twice, for two things may differ. In float64 a form goes its own way for all steps and must arrive where the reference does:
what is left of rounding hides no mistake in a program. In float32, where rounding alone may carry a simulator further than
1e-6 in 20 steps (docs/fused.md), every step begins where the reference stands. Differences are relative to a field's scale:
its largest value anywhere, or 1 where that is more.
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
"""Of environments that may end at another step, or choose otherwise: a threshold that lies within the tolerance."""
Fields = Mapping[str, Tensor]
"""What K steps gave, by name: (K, N), or (K, rows, N). What is no real must be equal; ``final_obs`` where episodes ended."""


class ParityError(EnvError):
    """A form does not do what the reference does."""

    def __init__(self, simulator: str, difference: str) -> None:
        super().__init__(simulator, difference)
        self.simulator, self.difference = simulator, difference

    def __str__(self) -> str:
        return f"{self.simulator}: {self.difference}"


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest differences that were found, of a field's scale.

    Attributes:
        exact: in float64, after any number of steps
        single: in float32, after one step
        split: environments that ended at another step, or chose otherwise, at a threshold
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
    """Run a form and the reference side by side with the same random actions, from states that the reference wandered to.

    Args:
        simulator: whose forms are compared
        make_backend: what makes the form, of the setting's type of reals; by default the C form
        num_envs: environments, the last tile not full
        num_steps: steps side by side
        warm_up: steps of the reference before
        tolerance: of one step in float32; what a stiff simulator cannot keep. In float64 it is EXACT
        seed: of everything

    Raises:
        ParityError: they differ; with the step, the environment and the values.
        SimulatorError: the simulator cannot be traced.
        KernelError: the form cannot be made here.
    """

    def course(real: torch.dtype, block: int, tolerance: float) -> tuple[float, int]:
        env_config = EnvConfig(simulator, num_envs, 7, seed, warm_up + num_steps // 2, real)
        reference, backend = TorchBackend(env_config), make_backend(env_config)
        wandered(reference, warm_up)
        backend.start()
        wanted, given = zip(*_steps(reference, backend, num_steps, block), strict=True)
        return compared(simulator, joined(wanted), joined(given), tolerance, free=block > 1)

    exact, single = course(torch.float64, num_steps, EXACT), course(torch.float32, 1, tolerance)
    return Parity(exact[0], single[0], exact[1] + single[1])


def wandered(reference: TorchBackend, num_steps: int) -> None:
    """Begin, and take some steps at random."""
    env_config = reference.env_config
    reference.start()
    reference.run_random_actions(0, num_steps, Totals.allocate(env_config.num_envs, real=env_config.real))


def _steps(
    reference: TorchBackend, backend: FusedBackend, num_steps: int, block: int
) -> Iterator[tuple[Fields, Fields]]:
    """What both give, ``block`` steps at a time, each block from where the reference stands."""
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
    """Of all blocks."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def compared(
    simulator: Simulator, wanted: Fields, given: Fields, tolerance: float, *, free: bool
) -> tuple[float, int]:
    """The largest difference of a field's scale, and how many environments went another way at a threshold.

    Args:
        simulator: for messages
        wanted: ``terminated`` and ``truncated`` among them
        given: of the same names
        tolerance: of the differences
        free: each step begins where the one before ended, so that after another end it is another episode

    Raises:
        ParityError: they differ.
    """
    whole = [name for name, values in wanted.items() if not values.is_floating_point()]
    differs = torch.stack([wanted[name] != given[name] for name in whole]).any(0)
    gone = differs.cummax(0).values if free else differs
    split = int(gone.any(0).sum())
    if split > _SPLIT_SHARE * gone.shape[1]:
        step, env = (int(i) for i in differs.nonzero()[0])
        raise ParityError(
            simulator.name,
            f"environment {env} ends at step {step} in one form alone, as do {split - 1} others",
        )
    ended = wanted["terminated"] | wanted["truncated"]
    reals = wanted.keys() - set(whole)
    worst = 0.0
    for name in sorted(reals):
        mask = ~gone & ended if name == "final_obs" else ~gone
        mask = mask if wanted[name].ndim == 2 else mask.unsqueeze(1)
        difference = _same(simulator, name, given[name] * mask, wanted[name] * mask, tolerance)
        worst = max(worst, difference)
    return worst, split


def _same(simulator: Simulator, what: str, given: Tensor, wanted: Tensor, tolerance: float) -> float:
    """The largest difference."""
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
