"""Base of serving programs with a simulator: environments, and a sink that records their steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from actors.gmi import GmiContext
from actors.simulator import Simulator
from rayagi.envs import make_env_factory
from rayagi.serving.program import ServingJob, ServingProgram, ServingResult
from rayagi.serving.recording import open_sink

_CLOSE_S = 3.0
"""Time limit for the writer on ``close`` without ``finish``; it continues by itself."""


class SimulatingProgram(ServingProgram):
    """A serving program that simulates and records."""

    def __init__(self, job: ServingJob, context: GmiContext, envs: Sequence[int]) -> None:
        """Create the environments, and open the sink.

        Args:
            job: what to serve
            context: of this GMI
            envs: number of environments of each GMI

        Raises:
            DiskError, WriterError: the writer cannot start or write.
        """
        spec, index = job.spec, context.identity.index
        self.num_envs, self.first_env_index = envs[index], sum(envs[:index])
        make_env = make_env_factory(spec.env.id, engine=spec.env.engine, kwargs=dict(spec.env.kwargs))
        env = make_env(
            num_envs=self.num_envs,
            first_env_index=self.first_env_index,
            seed=job.seed,
            num_threads=context.identity.slice.num_threads,
        )
        self.simulator = Simulator(env)
        self.sink = open_sink(
            job,
            context,
            env.info,
            num_envs=self.num_envs,
            first_env_index=self.first_env_index,
            total_envs=sum(envs),
        )

    @contextmanager
    def measured(self, num_steps: int) -> Iterator[ServingResult]:
        """Yield the result of ``num_steps`` steps of every environment, and fill it in after the block."""
        result, waited_s, begin = ServingResult(), self.sink.wait_s, time.perf_counter()
        yield result
        result.wall_s = time.perf_counter() - begin
        result.env_steps = num_steps * self.num_envs
        result.write_wait_s = self.sink.wait_s - waited_s
        result.episode_returns, result.episode_lengths = self.simulator.take_finished()

    def finish(self, timeout_s: float) -> None:
        """Wait until everything recorded is written.

        Raises:
            DiskError, WriterError: it could not be written.
        """
        self.sink.close(timeout_s)

    def close(self) -> None:
        """Close the sink and the environments; the writer finishes by itself."""
        try:
            self.sink.close(_CLOSE_S)
        finally:
            self.simulator.close()
