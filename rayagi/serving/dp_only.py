"""Serving with simulator and agent in one GMI (GMI-DRL §3.1.1, Figure 5c): nothing crosses GMIs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from actors.agent import Agent
from actors.gmi import GmiContext
from actors.simulator import Simulator
from placement.unequal import env_counts
from rayagi.algorithms.policy import load_policy
from rayagi.envs import make_env_factory
from rayagi.serving.exploration import exploration_of
from rayagi.serving.program import ServingJob, ServingProgram, ServingResult
from rayagi.serving.recording import open_sink

CLOSE_S = 3.0
"""For the writer where nobody asked to finish: it goes on by itself."""


@dataclass(frozen=True, slots=True)
class DpOnlyServingFactory:
    """Picklable: carries the job to the GMI's process and builds the program there."""

    job: ServingJob

    def __call__(self, context: GmiContext) -> DpOnlyServing:
        """Build simulator and agent on this GMI's slice."""
        return DpOnlyServing(self.job, context)


class DpOnlyServing(ServingProgram):
    """On a GPU slice the policy lives there and physics stays on the host. [unverified on GPU]"""

    def __init__(self, job: ServingJob, context: GmiContext) -> None:
        spec, index = job.spec, context.identity.index
        counts = env_counts(spec.gmi.envs, context.identity.num_gmis, spec.gmi.slices or ())
        num_envs, first_env_index = counts[index], sum(counts[:index])
        make_env = make_env_factory(spec.env.id, engine=spec.env.engine, kwargs=dict(spec.env.kwargs))
        env = make_env(
            num_envs=num_envs,
            first_env_index=first_env_index,
            seed=job.seed,
            num_threads=context.identity.slice.num_threads,
        )
        self.simulator = Simulator(env)
        policy = load_policy(job.shared, spec, env.info, context.device)
        self.agent = Agent(policy)
        self._noise = exploration_of(job, policy, num_envs=num_envs, first_env_index=first_env_index)
        self._device = context.device
        self._sink = open_sink(
            job, context, env.info, num_envs=num_envs, first_env_index=first_env_index, total_envs=sum(counts)
        )

    def serve(self, num_steps: int) -> ServingResult:
        """So many steps of every environment.

        Raises:
            DiskError, WriterError: what was recorded cannot be written.
            SimulationError: a simulation became unstable.
        """
        result, clock = ServingResult(), time.perf_counter
        waited_s, begin = self._sink.wait_s, clock()
        simulator, sink = self.simulator, self._sink
        for _ in range(num_steps):
            started = clock()
            actions = self._act(simulator.obs)
            acted = clock()
            sink.acted(simulator.obs, actions)
            recorded = clock()
            step = simulator.step(actions)
            simulated = clock()
            sink.stepped(step)
            result.act.add(acted - started)
            result.simulate.add(simulated - recorded)
            result.step.add(clock() - started)
        result.wall_s = clock() - begin
        result.env_steps = num_steps * simulator.env.num_envs
        result.write_wait_s = sink.wait_s - waited_s
        result.episode_returns, result.episode_lengths = simulator.take_finished()
        return result

    def _act(self, obs: Tensor) -> Tensor:
        if self._noise is None:
            return self.agent.act_greedily(obs)
        _, _, actions = self.agent.act(obs, self._noise.next().to(self._device))
        return actions.cpu()

    def finish(self, timeout_s: float) -> None:
        """Have everything written that was recorded.

        Raises:
            DiskError, WriterError: it was not written.
        """
        self._sink.close(timeout_s)

    def close(self) -> None:
        """Release the simulators, and let the writer finish."""
        try:
            self._sink.close(CLOSE_S)
        finally:
            self.simulator.env.close()
