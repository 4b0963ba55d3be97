"""When each member entered and left each collective of a training run, and what follows from it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from actors.gmi import GmiContext, ProgramFactory
from actors.protocols import EvaluationResult, IterationResult, Program, StateDict
from collectives.communicator import Communicator, Tensors
from collectives.transports.base import ReduceOp


@dataclass(slots=True)
class Log:
    """What one member did, in seconds on the host's clock.

    Attributes:
        operations: name, bytes, begin and end of each collective of the counted iterations
        iterations: begin and end of each counted iteration
    """

    operations: list[tuple[str, int, float, float]] = field(default_factory=list)
    iterations: list[tuple[float, float]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Where the synchronisation of a run went; shares of the iterations' wall time, mean over members.

    Attributes:
        iterations: counted
        iteration_s: mean wall time of one
        operations: collectives per iteration
        reducing_share: from the arrival of the last member to the end of the last: what the operations themselves cost
        last_member_share: the same as the member saw that came last and waited for nobody; without the others' waking
        waiting_share: in operations before the last member came: the others were still computing
        waiting_shares: the same of each member
        in_collectives_share: all that members spent in collectives; what `sync_s` of a run reports
        reducing_us: median cost of the operation with most bytes, the gradients' reduction, in microseconds
        reducing_p90_us: its 90th percentile
    """

    iterations: int
    iteration_s: float
    operations: float
    reducing_share: float
    last_member_share: float
    waiting_share: float
    waiting_shares: tuple[float, ...]
    in_collectives_share: float
    reducing_us: float
    reducing_p90_us: float


def split(logs: Sequence[Log]) -> Split:
    """Match the members' logs, operation by operation.

    Raises:
        ValueError: the members did not do the same operations, or none.
    """
    called = [[(name, nbytes) for name, nbytes, _, _ in log.operations] for log in logs]
    if not called[0] or any(other != called[0] for other in called):
        raise ValueError(f"members did {sorted({len(one) for one in called})} operations, or different ones")
    wall_s = statistics.fmean(sum(end - begin for begin, end in log.iterations) for log in logs)
    reducing: list[float] = []
    last_member = 0.0
    waiting = [0.0] * len(logs)
    for entries in zip(*(log.operations for log in logs), strict=True):
        begins, ends = [entry[2] for entry in entries], [entry[3] for entry in entries]
        arrival_s = max(begins)
        reducing.append(max(ends) - arrival_s)
        last_member += ends[begins.index(arrival_s)] - arrival_s
        waiting = [sum_s + arrival_s - begin_s for sum_s, begin_s in zip(waiting, begins, strict=True)]
    largest = max(called[0], key=lambda call: call[1])
    of_largest = [cost_s for cost_s, call in zip(reducing, called[0], strict=True) if call == largest]
    inside = statistics.fmean(sum(end - begin for _, _, begin, end in log.operations) for log in logs)
    num_iterations = len(logs[0].iterations)
    return Split(
        iterations=num_iterations,
        iteration_s=wall_s / num_iterations,
        operations=len(reducing) / num_iterations,
        reducing_share=sum(reducing) / wall_s,
        last_member_share=last_member / wall_s,
        waiting_share=statistics.fmean(waiting) / wall_s,
        waiting_shares=tuple(seconds / wall_s for seconds in waiting),
        in_collectives_share=inside / wall_s,
        reducing_us=1e6 * statistics.median(of_largest),
        reducing_p90_us=1e6 * _p90(of_largest),
    )


def _p90(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


@dataclass(frozen=True, slots=True)
class TimestampedFactory:
    """Builds another factory's program on a communicator that keeps a log. Picklable."""

    inner: ProgramFactory

    def __call__(self, context: GmiContext) -> Program:
        """Build it in the GMI's process."""
        stamped = _Stamped(context.communicator)
        inside = GmiContext(identity=context.identity, communicator=stamped, device=context.device)  # type: ignore[arg-type]
        return _StampedProgram(self.inner(inside), stamped)


class _Stamped:
    """A communicator that notes when training's operations begin and end."""

    def __init__(self, inner: Communicator) -> None:
        self._inner = inner
        self.log = Log()

    def all_reduce(self, tensors: Tensors, op: ReduceOp = "sum") -> None:
        """Reduce in place."""
        nbytes = tensors.nbytes if isinstance(tensors, Tensor) else sum(t.nbytes for t in tensors)
        self._stamp("all_reduce", nbytes, lambda: self._inner.all_reduce(tensors, op))

    def reduce_scatter(self, tensor: Tensor, op: ReduceOp = "sum") -> tuple[int, int]:
        """Reduce this member's share in place."""
        share: tuple[int, int] = self._stamp(
            "reduce_scatter", tensor.nbytes, lambda: self._inner.reduce_scatter(tensor, op)
        )
        return share

    def barrier(self) -> None:
        """Wait for all."""
        self._stamp("barrier", 0, self._inner.barrier)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Stack every member's tensor."""
        return self._stamp("all_gather", tensor.nbytes, lambda: self._inner.all_gather(tensor))

    def _stamp(self, name: str, nbytes: int, do: Callable[[], Any]) -> Any:
        begin = time.perf_counter()  # CLOCK_MONOTONIC: the same for all processes of a host
        result = do()
        self.log.operations.append((name, nbytes, begin, time.perf_counter()))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _StampedProgram:
    """A program whose local state is its log, which begins anew each time that it is read."""

    def __init__(self, inner: Program, stamped: _Stamped) -> None:
        self._inner, self._stamped = inner, stamped

    def iterate(self) -> IterationResult:
        """One iteration."""
        begin = time.perf_counter()
        result = self._inner.iterate()
        self._stamped.log.iterations.append((begin, time.perf_counter()))
        return result

    def evaluate(self, num_episodes: int, seed: int) -> EvaluationResult:
        """Run whole episodes without learning."""
        return self._inner.evaluate(num_episodes, seed)

    def state_dict(self) -> StateDict:
        """The log since it was last asked for."""
        log, self._stamped.log = self._stamped.log, Log()
        return {"shared": {}, "local": log}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Not for what is only measured."""
        raise NotImplementedError("a program that is measured does not go on from a saved state")

    def close(self) -> None:
        """Release the simulators."""
        self._inner.close()
