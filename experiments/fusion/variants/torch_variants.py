"""Variants torch and torch.compile: the reference with the paper's knobs, eager or compiled. K steps are a Python loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor import metrics
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.fusion.variants.variant import BenchmarkConfig, BenchmarkState, Counts, random_actions
from rayagi.envs.errors import KernelError
from rayagi.envs.fused.draws import seed_word
from rayagi.envs.fused.reference import clipped_actions, started_states
from rayagi.envs.fused.simulator import Discrete, named
from rayagi.envs.fused.trace import check_declaration

VIEWS = (
    "view",
    "unbind",
    "select",
    "slice",
    "expand",
    "unsqueeze",
    "squeeze",
    "t",
    "detach",
    "alias",
    "_to_copy",
)
"""Operations that only change a tensor's view and launch no kernel. (Dtype conversions are fused away or tiny here.)"""


class Moved(NamedTuple):
    """State and sums of N environments after a step."""

    state: Tensor
    elapsed: Tensor
    episode: Tensor
    copies: Tensor
    rewards: Tensor
    ended: Tensor


class TorchStepper:
    """Implements Stepper. On a GPU ``step`` does not synchronise."""

    def __init__(self, work: BenchmarkConfig, *, compiled: bool, device: torch.device | str = "cpu") -> None:
        check_declaration(work.simulator)
        self.work, self.device, self._word = work, torch.device(device), seed_word(work.seed)
        torch.set_num_threads(work.num_threads)
        self._indices = torch.arange(work.num_envs, device=self.device)
        # On a CPU it is cheaper to reset only ended environments; on a GPU finding them would synchronise.
        self._resets_by_index = not compiled and self.device.type == "cpu"
        self._compiled = compiled
        self._advance: Callable[..., Moved] = (
            torch.compile(self.moved, dynamic=False) if compiled else self.moved
        )
        self._now = BenchmarkState.first(work, self.device)

    def put(self, bench_state: BenchmarkState) -> None:
        """Set the environments' state."""
        fresh = BenchmarkState.allocate(self.work, self.device)
        fresh.copy_(bench_state)
        self._now = fresh

    def prepare(self, actions: Tensor) -> Sequence[Any]:
        """Arguments of ``Simulator.step`` for each of the K steps."""
        actions = actions.to(self.device)
        if not isinstance(self.work.simulator.actions, Discrete):
            actions = actions.movedim(1, -1)
        return [clipped_actions(self.work.simulator, one, self.work.real) for one in actions]

    @torch.no_grad()
    def step(self, prepared: Sequence[Any]) -> None:
        """K steps."""
        now, env_state, totals = self._now, self._now.env_state, self._now.totals
        zeros = torch.zeros_like(totals.rewards), torch.zeros_like(totals.ended)
        moved = Moved(env_state.state, env_state.elapsed, env_state.episode, now.copies, *zeros)
        for action in prepared:
            moved = self._advance(moved, action)
        env_state.state, env_state.elapsed, env_state.episode, now.copies, totals.rewards, totals.ended = (
            moved
        )

    def wait(self) -> None:
        """Synchronise with the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def get(self) -> BenchmarkState:
        """State of the environments."""
        return self._now.on_host(self.work)

    def counts(self) -> Counts:
        """Counted by torch itself; a call of a compiled step counts as one."""
        one_call = self.prepare(random_actions(self.work))
        if self._compiled:
            kernels = count_generated(lambda: self.step(one_call[:1]))
            return Counts(self.work.steps_per_call, self.work.steps_per_call * kernels)
        return count_calls(lambda: self.step(one_call))

    def moved(self, before: Moved, action: Any) -> Moved:
        """One step of every environment; ``action`` as ``clipped_actions`` gives it."""
        simulator, limit = self.work.simulator, self.work.env_config.limit
        state = before.state
        for _ in range(self.work.compute):
            result = simulator.step(named(simulator, state.unbind(0)), action)
            state = _rows(result[0], before.state)
        terminated = torch.as_tensor(result[2], device=self.device)
        elapsed = before.elapsed + 1
        ended = terminated | (elapsed >= limit)
        episode = before.episode + ended
        elapsed = torch.where(ended, 0, elapsed)
        state = self._reset(state, ended, episode)
        copies = before.copies + (state - before.state) if self.work.copies > 1 else before.copies
        return Moved(state, elapsed, episode, copies, before.rewards + result[1], before.ended + ended)

    def _reset(self, state: Tensor, ended: Tensor, episode: Tensor) -> Tensor:
        if not self._resets_by_index:
            return torch.where(ended, self._begun(self._indices, episode), state)
        ids = ended.nonzero().squeeze(1)
        if len(ids):
            state[:, ids] = self._begun(ids, episode[ids])
        return state

    def _begun(self, indices: Tensor, episode: Tensor) -> Tensor:
        return started_states(self.work.simulator, self._word, indices, episode, self.work.real)


class TorchVariant:
    """Implements Variant."""

    def __init__(self, *, compiled: bool, device: str = "cpu") -> None:
        self.compiled, self.device = compiled, device
        self.name = ("torch.compile" if compiled else "torch") + ("-gpu" if device == "cuda" else "")

    def missing(self, work: BenchmarkConfig) -> str | None:
        """A reason if there is no such device, or if torch.compile would unroll too many iterations."""
        if self.device == "cuda" and not torch.cuda.is_available():
            return "there is no CUDA device"
        if self.compiled and work.compute > MOST_UNROLLED:
            return f"torch.compile would unroll {work.compute} iterations; at most {MOST_UNROLLED}"
        return None

    def make(self, work: BenchmarkConfig) -> TorchStepper:
        """Construct the environments. Raises KernelError."""
        reason = self.missing(work)
        if reason:
            raise KernelError(f"{work.simulator.name} in {self.name}", reason)
        return TorchStepper(work, compiled=self.compiled, device=self.device)


MOST_UNROLLED = 16


def count_calls(call: Callable[[], object]) -> Counts:
    """Counts by torch's override modes: functions called from Python, and operations that launch a kernel."""
    with _Functions() as functions, _Kernels() as kernels:
        call()
    return Counts(functions.count, kernels.count)


def count_generated(call: Callable[[], object]) -> int:
    """Kernels that ``torch.compile`` generates for a call, which is recompiled for this."""
    torch._dynamo.reset()
    metrics.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        call()
    return metrics.generated_kernel_count


class _Functions(TorchFunctionMode):
    """Counts torch functions called from Python, including operators and tensor methods."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") != "__get__"  # attributes such as shape and device
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):
    """Counts operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


def _rows(values: Iterable[Any], like: Tensor) -> Tensor:
    return torch.stack(
        [torch.as_tensor(one, dtype=like.dtype, device=like.device).expand(like.shape[1]) for one in values]
    )
