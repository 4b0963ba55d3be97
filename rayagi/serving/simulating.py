"""What the serving GMIs with a simulator have in common: environments, and a sink for what they do."""

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
"""For the writer where nobody asked to finish: it goes on by itself."""


class SimulatingProgram(ServingProgram):
    """Has environments of its own, and records what they do."""

    def __init__(self, job: ServingJob, context: GmiContext, envs: Sequence[int]) -> None:
        """Make the environments, and open the sink.

        Args:
            job: what is to be served
            context: of this GMI
            envs: environments of each GMI

        Raises:
            DiskError, WriterError: nothing can be written.
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
        """The result of so many steps of every environment, which are made inside."""
        result, waited_s, begin = ServingResult(), self.sink.wait_s, time.perf_counter()
        yield result
        result.wall_s = time.perf_counter() - begin
        result.env_steps = num_steps * self.num_envs
        result.write_wait_s = self.sink.wait_s - waited_s
        result.episode_returns, result.episode_lengths = self.simulator.take_finished()

    def finish(self, timeout_s: float) -> None:
        """Have everything written that was recorded.

        Raises:
            DiskError, WriterError: it was not written.
        """
        self.sink.close(timeout_s)

    def close(self) -> None:
        """Release the environments, and let the writer finish."""
        try:
            self.sink.close(_CLOSE_S)
        finally:
            self.simulator.close()
