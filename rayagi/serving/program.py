"""What a GMI runs when it serves, whatever the template: the interface between programs, recording and the driver.

The loop that a serving ``dp_only`` GMI runs, written against these interfaces::

    sink = open_sink(job, context, simulator)          rayagi.serving.recording
    for _ in range(num_steps):
        actions = act(simulator.obs)
        sink.acted(simulator.obs, actions)
        sink.stepped(simulator.step(actions))

Where roles are apart, the GMI with the simulator records: it has the observations, and the actions that came back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

from actors.protocols import StepResult
from rayagi.config.spec import RunSpec
from rayagi.serving.latency import Latencies

Request = Literal["serve", "finish"]
FileFormat = Literal["parquet", "arrow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Where experience goes, and what is told with it; picklable."""

    folder: str
    """Of the dataset, as every host knows it."""
    format: FileFormat
    session: int
    """Which time this is that the dataset is written to, from 0."""
    first_episode: int
    """Number of this session's first episode."""
    rows_per_file: int
    bytes_per_file: int
    about: Mapping[str, Any] = field(default_factory=dict)
    """What a file says of its origin: task, run, checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingJob:
    """What every GMI is to serve; picklable."""

    spec: RunSpec
    """Of the run, with ``gmi`` as it is to serve."""
    shared: Mapping[str, Any]
    """The checkpoint's shared state: the policy."""
    version: int
    """Updates that the policy has seen."""
    greedy: bool
    """The policy's mode; else samples, as in training."""
    seed: int
    recording: Recording | None = None
    """None: nothing is written."""


class RowSink(Protocol):
    """Takes every step of one GMI's environments, and costs it little."""

    wait_s: float
    """Seconds that the GMI has waited for room so far."""

    def record_actions(self, obs: Tensor, actions: Tensor) -> None:
        """What is about to be done, copied now: obs (N, obs_dim) float32, actions (N, dim) float32 or (N,) int64; host.

        Raises:
            DiskError: what was taken before could not be written.
        """
        ...

    def record_step(self, step: StepResult) -> None:
        """What came of it.

        Raises:
            DiskError: what was taken before could not be written.
        """
        ...

    def close(self, timeout_s: float) -> None:
        """Have everything written that was taken, within the time limit. Safe to call twice.

        Raises:
            DiskError: it could not be written.
            WriterError: the writer did not finish, or ended by itself.
        """
        ...


@dataclass(slots=True)
class ServingResult:
    """What one GMI did when it was asked for steps; several merge into one."""

    env_steps: int = 0
    """Of its own environments; 0 where it has none."""
    wall_s: float = 0.0
    step: Latencies = field(default_factory=Latencies)
    """Of a step of all environments of a GMI: inference, simulation and recording."""
    act: Latencies = field(default_factory=Latencies)
    """Of one inference."""
    simulate: Latencies = field(default_factory=Latencies)
    """Of the simulator's part of a step."""
    write_wait_s: float = 0.0
    """Waiting for the writer, the part of ``step`` that writing costs besides copying."""
    episode_returns: list[float] = field(default_factory=list)
    """Of the episodes that ended."""
    episode_lengths: list[int] = field(default_factory=list)


def merged_results(parts: Iterable[ServingResult]) -> ServingResult:
    """GMIs that worked at the same time as one: steps add up, the slowest tells the time."""
    whole = ServingResult()
    for part in parts:
        whole.env_steps += part.env_steps
        whole.wall_s = max(whole.wall_s, part.wall_s)
        for mine, other in ((whole.step, part.step), (whole.act, part.act), (whole.simulate, part.simulate)):
            mine.merge(other)
        whole.write_wait_s += part.write_wait_s
        whole.episode_returns += part.episode_returns
        whole.episode_lengths += part.episode_lengths
    return whole


class ServingProgram(ABC):
    """A workload (actors.protocols.Workload) that serves. Subclasses are built in their GMI from a ``ServingJob``."""

    def gmi_run(self, request: Request, *args: Any) -> Any:
        """``"serve", num_steps``: a ServingResult. ``"finish", timeout_s``: everything recorded is written."""
        return self.serve(*args) if request == "serve" else self.finish(*args)

    @abstractmethod
    def serve(self, num_steps: int) -> ServingResult:
        """So many steps of every environment; all GMIs are asked at once.

        Raises:
            DiskError: what was recorded cannot be written.
        """

    @abstractmethod
    def finish(self, timeout_s: float) -> None:
        """Have everything written that was recorded; nothing where this GMI records nothing.

        Raises:
            DiskError, WriterError: it was not written.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the program holds; called at the end, also after an error."""
