"""Serving with simulators and agents in different GMIs (GMI-DRL §3.1.1, Figures 5a and 5b): they exchange every step.

dp_mp has an agent for each simulator, mp_dp an agent for several. The GMI with the simulator records.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from actors.agent import Agent
from actors.gmi import GmiContext
from actors.partners import leaving_on_error
from actors.protocols import StepResult
from actors.simulator import Simulator
from rayagi.algorithms.crew import Crew, connected_server, connected_simulators
from rayagi.algorithms.policy import load_policy
from rayagi.envs import make_env_factory
from rayagi.serving.dp_only import CLOSE_S
from rayagi.serving.exploration import exploration_of
from rayagi.serving.latency import Latencies
from rayagi.serving.program import RowSink, ServingJob, ServingProgram, ServingResult
from rayagi.serving.recording import open_sink


@dataclass(frozen=True, slots=True)
class ApartServingFactory:
    """Picklable: carries the job to the GMI's process and builds the program of its role there."""

    job: ServingJob

    def __call__(self, context: GmiContext) -> SimulatorServing | AgentServing:
        """Build the simulator or the agent on this GMI's slice."""
        crew = Crew.of(context.identity, self.job.spec.gmi)
        program = SimulatorServing if context.identity.roles == ("simulator",) else AgentServing
        return program(self.job, context, crew)


class SimulatorServing(ServingProgram):
    """Steps its environments as the agent of another GMI asks, and records what comes of it."""

    def __init__(self, job: ServingJob, context: GmiContext, crew: Crew) -> None:
        spec, index = job.spec, context.identity.index
        num_envs, first_env_index = crew.envs[index], crew.first_env_index(index)
        make_env = make_env_factory(spec.env.id, engine=spec.env.engine, kwargs=dict(spec.env.kwargs))
        env = make_env(
            num_envs=num_envs,
            first_env_index=first_env_index,
            seed=job.seed,
            num_threads=context.identity.slice.num_threads,
        )
        self.simulator = Simulator(env)
        self._sink = open_sink(
            job,
            context,
            env.info,
            num_envs=num_envs,
            first_env_index=first_env_index,
            total_envs=sum(crew.envs),
        )
        self._recorded = _Recorded(self.simulator, self._sink)
        self._server = connected_server(
            self._recorded, env.info, context, crew, spec.gmi.collective_timeout_s
        )
        self._requests = 0

    def serve(self, num_steps: int) -> ServingResult:
        """So many steps of every environment, with the agent's actions.

        Raises:
            DiskError, WriterError: what was recorded cannot be written.
            SimulationError: a simulation became unstable.
            PartnerLostError, ChannelTimeoutError: the agent is gone or silent.
        """
        result, clock = ServingResult(), time.perf_counter
        self._recorded.simulate = result.simulate
        waited_s, begin = self._sink.wait_s, clock()
        with leaving_on_error(self._server):
            self._server.begin(self._requests)
            for _ in range(num_steps):
                started = clock()
                self._server.step()
                result.step.add(clock() - started)
        self._requests += 1
        result.wall_s = clock() - begin
        result.env_steps = num_steps * self._server.num_envs
        result.write_wait_s = self._sink.wait_s - waited_s
        result.episode_returns, result.episode_lengths = self.simulator.take_finished()
        return result

    def finish(self, timeout_s: float) -> None:
        """Have everything written that was recorded.

        Raises:
            DiskError, WriterError: it was not written.
        """
        self._sink.close(timeout_s)

    def close(self) -> None:
        """Leave the agent, release the environments, and let the writer finish."""
        try:
            self._server.close()
            self._sink.close(CLOSE_S)
        finally:
            self.simulator.env.close()


class AgentServing(ServingProgram):
    """Acts for the simulators of other GMIs.

    On a GPU slice the policy lives there; observations and actions pass through the host. [unverified on GPU]
    """

    def __init__(self, job: ServingJob, context: GmiContext, crew: Crew) -> None:
        spec = job.spec
        make_env = make_env_factory(spec.env.id, engine=spec.env.engine, kwargs=dict(spec.env.kwargs))
        self._simulators = connected_simulators(make_env, context, crew, spec.gmi.collective_timeout_s)
        policy = load_policy(job.shared, spec, self._simulators.info, context.device)
        self.agent = Agent(policy)
        self._device = context.device
        self._noise = exploration_of(
            job,
            policy,
            num_envs=self._simulators.num_envs,
            first_env_index=crew.first_env_index_of(context.identity.index),
        )
        self._requests = 0

    def serve(self, num_steps: int) -> ServingResult:
        """So many steps of every environment of its simulators, which count them.

        Raises:
            PartnerLostError, ChannelTimeoutError: a simulator is gone or silent.
        """
        result, clock = ServingResult(), time.perf_counter
        begin, simulators = clock(), self._simulators
        with leaving_on_error(simulators):
            simulators.begin(self._requests)
            for _ in range(num_steps):
                started = clock()
                actions = self._act(simulators.obs)
                result.act.add(clock() - started)
                simulators.step(actions)
        self._requests += 1
        result.wall_s = clock() - begin
        return result

    def _act(self, obs: Tensor) -> Tensor:
        if self._noise is None:
            return self.agent.act_greedily(obs)
        _, _, actions = self.agent.act(obs, self._noise.next().to(self._device))
        return actions.cpu()

    def finish(self, timeout_s: float) -> None:
        """Nothing is recorded here."""

    def close(self) -> None:
        """Leave the simulators."""
        self._simulators.close()


class _Recorded:
    """A simulator whose steps go to a sink, and are timed."""

    def __init__(self, simulator: Simulator, sink: RowSink) -> None:
        self._simulator, self._sink = simulator, sink
        self.simulate = Latencies()

    @property
    def obs(self) -> Tensor:
        """What to act on next."""
        return self._simulator.obs

    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment, and record it."""
        self._sink.acted(self._simulator.obs, actions)
        started = time.perf_counter()
        result = self._simulator.step(actions)
        self.simulate.add(time.perf_counter() - started)
        self._sink.stepped(result)
        return result
