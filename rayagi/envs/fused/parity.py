"""Whether a simulator's kernels do what its functions say: any form against the reference, from the middle of episodes.

from rayagi.envs.fused import parity
parity.check(MySimulator())
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rayagi.envs.errors import EnvError
from rayagi.envs.fused.c.form import CForm
from rayagi.envs.fused.draws import random_actions
from rayagi.envs.fused.forms import Form, Setting, Steps, Totals
from rayagi.envs.fused.reference import TorchForm
from rayagi.envs.fused.simulator import Simulator

_SPLIT_SHARE = 0.01
"""Of environments that may end at another step: a threshold that lies within the tolerance."""


class ParityError(EnvError):
    """A form does not do what the reference does."""

    def __init__(self, simulator: str, difference: str) -> None:
        super().__init__(simulator, difference)
        self.simulator, self.difference = simulator, difference

    def __str__(self) -> str:
        return f"{self.simulator}: {self.difference}"


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest differences that were found, relative to 1 or the value, whichever is larger.

    Attributes:
        obs, rewards: of the environments that ended where the reference's did
        split: environments that ended at another step, at a threshold
    """

    obs: float
    rewards: float
    split: int


def check(
    simulator: Simulator,
    make_form: Callable[[Setting], Form] = CForm,
    *,
    num_envs: int = 500,
    num_steps: int = 20,
    warm_up: int = 30,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> Parity:
    """Run a form and the reference side by side with the same random actions, from states that the reference wandered to.

    Args:
        simulator: whose forms are compared
        make_form: what makes the form; by default the C form
        num_envs: environments, the last tile not full
        num_steps: steps side by side
        warm_up: steps of the reference before
        tolerance: of observations and rewards, relative to 1 or the value, whichever is larger
        seed: of everything

    Raises:
        ParityError: they differ; with the step, the environment and the values.
        SimulatorError: the simulator cannot be traced.
        KernelError: the form cannot be made here.
    """
    setting = Setting(
        simulator, num_envs, first_env_index=7, seed=seed, max_episode_steps=warm_up + num_steps // 2
    )
    reference, form = TorchForm(setting), make_form(setting)
    reference.start()
    form.start()
    _same(simulator, "the first observation", form.observe(), reference.observe(), tolerance, "environment")
    reference.wander(0, warm_up, Totals.allocate(num_envs))
    form.fleet.copy_(reference.fleet)
    actions = torch.stack(
        [random_actions(simulator, 1, torch.arange(num_envs), seed, step) for step in range(num_steps)]
    )
    obs_dim = len(reference.observe())
    wanted, given = (Steps.allocate(num_steps, num_envs, obs_dim) for _ in range(2))
    reference.run(actions, wanted)
    form.run(actions.to(form.fleet.state.device), given)
    return _compared(simulator, wanted, _on_host(given), tolerance)


def _on_host(steps: Steps) -> Steps:
    return Steps(*(getattr(steps, name).cpu() for name in Steps.__slots__))


def _compared(simulator: Simulator, wanted: Steps, given: Steps, tolerance: float) -> Parity:
    differs = (wanted.terminated != given.terminated) | (wanted.truncated != given.truncated)
    together = ~differs.cummax(0).values  # what comes after a different end is another episode
    split = int((~together[-1]).sum())
    if split > _SPLIT_SHARE * together.shape[1]:
        step, env = (int(i) for i in differs.nonzero()[0])
        raise ParityError(
            simulator.name,
            f"environment {env} ends at step {step} in one form alone, as do {split - 1} others",
        )
    ended = (wanted.terminated | wanted.truncated) & together
    masks = {"obs": together.unsqueeze(1), "rewards": together, "final_obs": ended.unsqueeze(1)}
    worst = {
        name: _same(
            simulator, name, getattr(given, name) * mask, getattr(wanted, name) * mask, tolerance, "step"
        )
        for name, mask in masks.items()
    }
    return Parity(max(worst["obs"], worst["final_obs"]), worst["rewards"], split)


def _same(
    simulator: Simulator, what: str, given: Tensor, wanted: Tensor, tolerance: float, axis: str
) -> float:
    """The largest difference."""
    given = given.cpu()
    difference = (given - wanted).abs() / wanted.abs().clamp(min=1.0)
    if not (difference <= tolerance).all():
        place = (~(difference <= tolerance)).nonzero()[0].tolist()
        at = (
            f"{axis} and environment {place[0]}, {place[-1]}"
            if axis == "step"
            else f"environment {place[-1]}"
        )
        raise ParityError(
            simulator.name,
            f"{what} at {at} is {float(given[tuple(place)])!r}, and {float(wanted[tuple(place)])!r} in the reference",
        )
    return float(difference.max())
