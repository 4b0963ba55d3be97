"""Variant c: the C backend with the paper's knobs, vectorised over tiles of environments, multithreaded."""

from __future__ import annotations

import ctypes
from importlib.resources import files

from torch import Tensor

from collectives.kernels import Kernel
from experiments.fusion.variants.variant import BenchmarkConfig, BenchmarkState, Counts
from rayagi.envs.fused.c.backend import CBackend, load_kernel
from rayagi.envs.fused.c.source import source
from rayagi.envs.fused.simulator import Discrete
from rayagi.native.binding import pointer

KNOBS = Kernel(
    name="fused simulators with knobs",
    module=__name__,
    reference="experiments.fusion.variants.torch_variants:TorchStepper",
    without="engine fused_torch needs no compiler",
)


class CStepper:
    """Implements Stepper: K steps in one call of each thread."""

    def __init__(self, work: BenchmarkConfig) -> None:
        """Raises KernelError and SimulatorError."""
        self.work = work
        self._backend = CBackend(work.env_config, work.num_threads)
        knobs = files(__package__).joinpath("simulate.h").read_text(encoding="utf-8")
        library = load_kernel(
            KNOBS,
            f"{work.simulator.name} in C, with knobs",
            f"{source(self._backend.traced, work.real)}\n{knobs}",
        )
        i64, address = ctypes.c_int64, ctypes.c_void_p
        self._simulate = library.rayagi_simulate
        self._simulate.argtypes = (address, i64, i64, i64, i64, i64, *[address] * 5)
        self._simulate.restype = None
        self._now = BenchmarkState.first(work)
        self._backend.env_state = self._now.env_state
        self._env_state = self._backend.env_state_pointers()
        self._sums = [
            pointer(one) for one in (self._now.copies, self._now.totals.rewards, self._now.totals.ended)
        ]

    def put(self, bench_state: BenchmarkState) -> None:
        """Set the environments' state."""
        self._now.copy_(bench_state)

    def prepare(self, actions: Tensor) -> Tensor:
        """Contiguous actions."""
        return actions.contiguous()

    def step(self, prepared: Tensor) -> None:
        """K steps."""
        work, given = self.work, pointer(prepared)
        actions = (given, None) if isinstance(work.simulator.actions, Discrete) else (None, given)
        sizes = (work.steps_per_call, work.compute, work.copies - 1)
        self._backend.on_threads(
            work.steps_per_call * work.compute,
            lambda begin, end: self._simulate(self._env_state, begin, end, *sizes, *actions, *self._sums),
        )

    def wait(self) -> None:
        """All threads are done when ``step`` returns."""

    def get(self) -> BenchmarkState:
        """State of the environments."""
        return self._now.on_host(self.work)

    def counts(self) -> Counts:
        """One call and one pass over the environments, split among the threads."""
        return Counts(1, 1)


class CVariant:
    """Implements Variant."""

    name = "c"

    def missing(self, work: BenchmarkConfig) -> str | None:
        """None; a missing C compiler is reported at compilation."""
        return None

    def make(self, work: BenchmarkConfig) -> CStepper:
        """The environments. Raises KernelError."""
        return CStepper(work)
