"""The same simulators in every form that the paper compares: K steps of N environments in a call, and what a call takes.

The knobs of "Optimizing Data Collection in Deep Reinforcement Learning" (MLBench 2022, §4.2) are part of what is asked for:
the dynamics iterated C times in a step, and S times as much state to load and store. Only the simulation runs: actions are
given, and of a call's steps only sums come back, so that what is measured is not the writing of observations.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from rayagi.envs.fused.backends import BatchedEnvState, EnvConfig, Totals
from rayagi.envs.fused.draws import seed_word
from rayagi.envs.fused.reference import started_states
from rayagi.envs.fused.simulator import Discrete, Simulator


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkConfig:
    """What is asked for. Raises ValueError for a number below 1."""

    simulator: Simulator
    num_envs: int
    """N."""
    steps_per_call: int = 1
    """K: steps of every environment in one call from Python."""
    compute: int = 1
    """C: how often a step iterates the dynamics, with the same action; reward and end are the last iteration's."""
    copies: int = 1
    """S: how many times the state is there. The copies beyond the first follow its changes, so each of them is loaded and
    stored by every launch, and no compiler can leave that out."""
    seed: int = 0
    real: torch.dtype = torch.float32
    """What reals are kept and computed in: ``EnvConfig.real``."""
    num_threads: int = 1
    """Of variants that can choose: C, torch, EnvPool. Warp has one on a CPU, XLA as many as the process may use."""

    def __post_init__(self) -> None:
        for name in ("num_envs", "steps_per_call", "compute", "copies", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def env_config(self) -> EnvConfig:
        """As the other forms take it."""
        return EnvConfig(
            self.simulator,
            self.num_envs,
            seed=self.seed,
            max_episode_steps=self.simulator.max_episode_steps,
            real=self.real,
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """What a call of K steps takes."""

    api_calls: int
    """From Python into what computes: the paper's Python-to-backend calls."""
    launches: int
    """Kernels: loops over the environments in compiled code, each of which loads and stores what it works on."""


@dataclass(slots=True)
class BenchmarkState:
    """Where environments are, and what the last call brought. On the host.

    Attributes:
        fleet: states and episodes
        copies: of the state; zero at first     (copies - 1, S, N)
        totals: of the last call
    """

    env_state: BatchedEnvState
    copies: Tensor
    totals: Totals

    @classmethod
    def allocate(cls, work: BenchmarkConfig, device: torch.device | str = "cpu") -> BenchmarkState:
        """Before the first episode."""
        shape = (work.copies - 1, len(work.simulator.state), work.num_envs)
        env_state = BatchedEnvState.allocate(work.simulator, work.num_envs, device, work.real)
        copies = torch.zeros(shape, dtype=work.real, device=device)
        return cls(env_state, copies, Totals.allocate(work.num_envs, device, work.real))

    @classmethod
    def first(cls, work: BenchmarkConfig, device: torch.device | str = "cpu") -> BenchmarkState:
        """At the start of the first episodes, as every variant with rayagi's random numbers begins."""
        bench_state = cls.allocate(work, device)
        indices = torch.arange(work.num_envs, device=device)
        bench_state.env_state.episode.zero_()
        begun = started_states(
            work.simulator, seed_word(work.seed), indices, bench_state.env_state.episode, work.real
        )
        bench_state.env_state.state.copy_(begun)
        return bench_state

    def copy_(self, other: BenchmarkState) -> None:
        """Take over another's numbers."""
        self.env_state.copy_(other.env_state)
        self.copies.copy_(other.copies)
        self.totals.rewards.copy_(other.totals.rewards)
        self.totals.ended.copy_(other.totals.ended)

    def on_host(self, work: BenchmarkConfig) -> BenchmarkState:
        """A copy."""
        copied = BenchmarkState.allocate(work)
        copied.copy_(self)
        return copied


class Stepper(Protocol):
    """N environments in one variant, at the start of their first episodes. Those that end begin anew in the same step."""

    def put(self, bench_state: BenchmarkState) -> None:
        """Go on from there."""
        ...

    def prepare(self, actions: Tensor) -> Any:
        """Actions as this variant takes them: made once, so that stepping does not pay for it.

        Args:
            actions: as random_actions gives them
        """
        ...

    def step(self, prepared: Any) -> None:
        """K steps. May return before the device has done them."""
        ...

    def wait(self) -> None:
        """Return when all steps are done."""
        ...

    def get(self) -> BenchmarkState:
        """Where the environments are. Waits."""
        ...

    def counts(self) -> Counts:
        """What a call takes. May step to find out."""
        ...


class Variant(Protocol):
    """A way to run simulators."""

    name: str

    def missing(self, work: BenchmarkConfig) -> str | None:
        """Why it cannot do this here; None where it can. Looks, and computes nothing."""
        ...

    def make(self, work: BenchmarkConfig) -> Stepper:
        """The environments.

        Raises:
            KernelError: it cannot run here, or its code does not compile.
            SimulatorError: the simulator cannot be traced.
        """
        ...


def random_actions(work: BenchmarkConfig, seed: int = 0) -> Tensor:
    """Actions for one call, uniform over the choices, (K, N) uint8, or over the box, (K, dim, N) reals."""
    generator = torch.Generator().manual_seed(seed)
    shape, actions = (work.steps_per_call, work.num_envs), work.simulator.actions
    if isinstance(actions, Discrete):
        return torch.randint(actions.count, shape, dtype=torch.uint8, generator=generator)
    low, high = (torch.tensor(side).unsqueeze(1) for side in (actions.low, actions.high))
    drawn = torch.rand((shape[0], len(low), shape[1]), generator=generator)
    return (low + (high - low) * drawn).to(work.real)


def not_installed(package: str, extra: str) -> str | None:
    """A reason for ``Variant.missing`` where a package is not there."""
    return None if find_spec(package) else f"{package} is not installed: pip install 'rayagi[{extra}]'"


def knobs_unknown(work: BenchmarkConfig) -> str | None:
    """A reason for ``Variant.missing`` of environments that others wrote."""
    if work.compute > 1 or work.copies > 1:
        return "compute and copies are knobs of rayagi's own simulators"
    return None
