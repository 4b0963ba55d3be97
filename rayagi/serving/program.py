"""Interfaces of serving: between a GMI's program, its recording and the driver.

The loop of a serving ``dp_only`` GMI::

    sink = open_sink(job, context, simulator)          rayagi.serving.recording
    for _ in range(num_steps):
        actions = act(simulator.obs)
        sink.record_actions(simulator.obs, actions, log_probs)
        sink.record_step(simulator.step(actions))

In the other templates the GMI with the simulator records: it has the observations and receives the actions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rayagi.config.spec import RunSpec
from rayagi.serving.latency import Latencies

Request = Literal["serve", "finish"]
FileFormat = Literal["parquet", "arrow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """Target of recording, and its metadata; picklable."""

    folder: str
    """Path of the dataset, the same on every host."""
    format: FileFormat
    session: int
    """Number of this session of the dataset, from 0."""
    first_episode: int
    """Number of this session's first episode."""
    rows_per_file: int
    bytes_per_file: int
    about: Mapping[str, Any] = field(default_factory=dict)
    """Origin, stored in every file: task, run, checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingJob:
    """What every GMI serves; picklable."""

    spec: RunSpec
    """The run's settings, with ``gmi`` as for serving."""
    shared: Mapping[str, Any]
    """The checkpoint's shared state: the policy."""
    version: int
    """Number of updates of the policy."""
    greedy: bool
    """Whether to act by the policy's mode; else it samples, as in training."""
    seed: int
    recording: Recording | None = None
    """None: write nothing."""


@dataclass(slots=True)
class ServingResult:
    """Result of one request to a GMI; several results merge."""

    env_steps: int = 0
    """Steps of its own environments; 0 without any."""
    wall_s: float = 0.0
    step: Latencies = field(default_factory=Latencies)
    """Latency of a step of all environments of a GMI: inference, simulation and recording."""
    act: Latencies = field(default_factory=Latencies)
    """Latency of one inference."""
    simulate: Latencies = field(default_factory=Latencies)
    """Latency of the simulator's part of a step."""
    write_wait_s: float = 0.0
    """Seconds of waiting for the writer, a part of ``step``."""
    episode_returns: list[float] = field(default_factory=list)
    """Returns of the ended episodes."""
    episode_lengths: list[int] = field(default_factory=list)


def merged_results(parts: Iterable[ServingResult]) -> ServingResult:
    """Merge results of GMIs that ran concurrently: steps add up, wall time is the maximum."""
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
        """Make ``num_steps`` steps of every environment; the driver calls all GMIs concurrently.

        Raises:
            DiskError: experience cannot be written.
        """

    @abstractmethod
    def finish(self, timeout_s: float) -> None:
        """Wait until everything recorded is written; returns at once if this GMI records nothing.

        Raises:
            DiskError, WriterError: it could not be written.
        """

    @abstractmethod
    def close(self) -> None:
        """Release resources; called at the end, also after an error."""
