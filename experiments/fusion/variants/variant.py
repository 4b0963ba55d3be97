"""Interface of benchmark variants: a simulator on every backend that the paper compares, K steps of N environments per call.

The paper is "Optimizing Data Collection in Deep Reinforcement Learning" (MLBench 2022); its knobs (§4.2) are C iterations of
the dynamics per step, and S times as much state to load and store. Only the simulation is measured: actions are given, and a
call returns only sums, so that writing observations does not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from rayagi.envs.fused.backends import BatchedEnvState, EnvConfig
from rayagi.envs.fused.draws import seed_word
from rayagi.envs.fused.reference import started_states
from rayagi.envs.fused.simulator import Discrete, Simulator


@dataclass(slots=True)
class Totals:
    """Sums over K steps, for kernels that keep only the environments' state (the MLBench'22 paper, §3.2).

    Attributes:
        rewards: sum over the steps     (N,)
        ended: episodes that ended      (N,) int32
    """

    rewards: Tensor
    ended: Tensor

    @classmethod
    def allocate(
        cls, num_envs: int, device: torch.device | str = "cpu", real: torch.dtype = torch.float32
    ) -> Totals:
        """Zeroed storage."""
        return cls(
            torch.zeros(num_envs, dtype=real, device=device),
            torch.zeros(num_envs, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkConfig:
    """Configuration of a benchmark. Raises ValueError for a number below 1."""

    simulator: Simulator
    num_envs: int
    """N."""
    steps_per_call: int = 1
    """K: steps of every environment in one call from Python."""
    compute: int = 1
    """C: iterations of the dynamics per step, with the same action; reward and termination are the last iteration's."""
    copies: int = 1
    """S: copies of the state, the state itself included. Every change of the state is added to the others, so each launch
    loads and stores all of them, and no compiler can remove that."""
    seed: int = 0
    real: torch.dtype = torch.float32
    """Dtype of all reals: ``EnvConfig.real``."""
    num_threads: int = 1
    """Used by C, torch and EnvPool. Warp has one thread on a CPU, XLA as many as the process may use."""

    def __post_init__(self) -> None:
        for name in ("num_envs", "steps_per_call", "compute", "copies", "num_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def env_config(self) -> EnvConfig:
        """The corresponding EnvConfig."""
        return EnvConfig(
            self.simulator,
            self.num_envs,
            seed=self.seed,
            max_episode_steps=self.simulator.max_episode_steps,
            real=self.real,
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of calls and kernels for K steps."""

    api_calls: int
    """The paper's Python-to-backend calls."""
    launches: int
    """Kernels: loops over the environments in compiled code, each with its own loads and stores."""


@dataclass(slots=True)
class BenchmarkState:
    """State of the environments, and results of the last call.

    Attributes:
        env_state: states and episodes
        copies: further copies of the state, initially zero     (copies - 1, S, N)
        totals: sums of the last call
    """

    env_state: BatchedEnvState
    copies: Tensor
    totals: Totals

    @classmethod
    def allocate(cls, work: BenchmarkConfig, device: torch.device | str = "cpu") -> BenchmarkState:
        """Storage before the first episode."""
        shape = (work.copies - 1, len(work.simulator.state), work.num_envs)
        env_state = BatchedEnvState.allocate(work.simulator, work.num_envs, device, work.real)
        copies = torch.zeros(shape, dtype=work.real, device=device)
        return cls(env_state, copies, Totals.allocate(work.num_envs, device, work.real))

    @classmethod
    def first(cls, work: BenchmarkConfig, device: torch.device | str = "cpu") -> BenchmarkState:
        """The start of the first episodes, equal for every variant with rayagi's random numbers."""
        bench_state = cls.allocate(work, device)
        indices = torch.arange(work.num_envs, device=device)
        bench_state.env_state.episode.zero_()
        begun = started_states(
            work.simulator, seed_word(work.seed), indices, bench_state.env_state.episode, work.real
        )
        bench_state.env_state.state.copy_(begun)
        return bench_state

    def copy_(self, other: BenchmarkState) -> None:
        """Copy another's values."""
        self.env_state.copy_(other.env_state)
        self.copies.copy_(other.copies)
        self.totals.rewards.copy_(other.totals.rewards)
        self.totals.ended.copy_(other.totals.ended)

    def on_host(self, work: BenchmarkConfig) -> BenchmarkState:
        """A copy in host memory."""
        copied = BenchmarkState.allocate(work)
        copied.copy_(self)
        return copied


class Stepper(Protocol):
    """N environments of one variant, at the start of their first episodes, with auto-reset in the same step."""

    def put(self, bench_state: BenchmarkState) -> None:
        """Set the environments' state."""
        ...

    def prepare(self, actions: Tensor) -> Any:
        """Convert actions to this variant's format, outside the measured time.

        Args:
            actions: as returned by ``random_actions``
        """
        ...

    def step(self, prepared: Any) -> None:
        """K steps. May return before the device has finished."""
        ...

    def wait(self) -> None:
        """Wait until all steps are finished."""
        ...

    def get(self) -> BenchmarkState:
        """State of the environments, on the host. Waits for the device."""
        ...

    def counts(self) -> Counts:
        """Calls and kernels of ``step``. May step to count them."""
        ...


class Variant(Protocol):
    """A backend of the benchmark."""

    name: str

    def missing(self, work: BenchmarkConfig) -> str | None:
        """Why it cannot run this configuration here; None if it can. Cheap."""
        ...

    def make(self, work: BenchmarkConfig) -> Stepper:
        """Construct the environments.

        Raises:
            KernelError: it cannot run here, or its code does not compile.
            SimulatorError: the simulator cannot be traced.
        """
        ...


def random_actions(work: BenchmarkConfig, seed: int = 0) -> Tensor:
    """Uniform random actions for one call: choices (K, N) uint8, or reals in the box (K, dim, N)."""
    generator = torch.Generator().manual_seed(seed)
    shape, actions = (work.steps_per_call, work.num_envs), work.simulator.actions
    if isinstance(actions, Discrete):
        return torch.randint(actions.count, shape, dtype=torch.uint8, generator=generator)
    low, high = (torch.tensor(side).unsqueeze(1) for side in (actions.low, actions.high))
    drawn = torch.rand((shape[0], len(low), shape[1]), generator=generator)
    return (low + (high - low) * drawn).to(work.real)


def not_installed(package: str, extra: str) -> str | None:
    """Result of ``Variant.missing`` for a package: a reason if it is not installed."""
    return None if find_spec(package) else f"{package} is not installed: pip install 'rayagi[{extra}]'"


def knobs_unknown(work: BenchmarkConfig) -> str | None:
    """Result of ``Variant.missing`` for third-party environments: a reason if the knobs are used."""
    if work.compute > 1 or work.copies > 1:
        return "compute and copies are knobs of rayagi's own simulators"
    return None
