"""Serving with simulators and agents in different GMIs (GMI-DRL §3.1.1, Figures 5a and 5b).

They exchange observations and actions at every step. dp_mp has one agent per simulator, mp_dp one agent for several. The GMI
with the simulator records.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from actors.gmi import GmiContext
from actors.partners import close_on_error
from actors.protocols import StepResult
from actors.simulator import Simulator
from rayagi.algorithms.role_assignment import RoleAssignment, connect_simulators, connect_step_server
from rayagi.envs import make_env_factory
from rayagi.models.policy import load_policy
from rayagi.serving.latency import Latencies
from rayagi.serving.program import RowSink, ServingJob, ServingProgram, ServingResult
from rayagi.serving.serving_agent import ServingAgent
from rayagi.serving.simulating import SimulatingProgram


@dataclass(frozen=True, slots=True)
class TaskDedicatedServingFactory:
    """Picklable: carries the job to the GMI's process and builds the program of its role there."""

    job: ServingJob

    def __call__(self, context: GmiContext) -> SimulatorServing | AgentServing:
        """Build the simulator or the agent on this GMI's slice."""
        assignment = RoleAssignment.for_gmi(context.identity, self.job.spec.gmi)
        program = SimulatorServing if context.identity.roles == ("simulator",) else AgentServing
        return program(self.job, context, assignment)


class SimulatorServing(SimulatingProgram):
    """Steps its environments with the actions of another GMI's agent, and records every step."""

    def __init__(self, job: ServingJob, context: GmiContext, assignment: RoleAssignment) -> None:
        super().__init__(job, context, assignment.envs)
        self._recorded = _RecordingSimulator(self.simulator, self.sink)
        limit_s = job.spec.gmi.collective_timeout_s
        self._server = connect_step_server(self._recorded, self.simulator.info, context, assignment, limit_s)
        self._requests = 0

    def serve(self, num_steps: int) -> ServingResult:
        """Make ``num_steps`` steps of every environment, with the agent's actions.

        Raises:
            DiskError, WriterError: experience cannot be written.
            SimulationError: a simulation became unstable.
            PartnerLostError, ChannelTimeoutError: the agent died or does not answer.
        """
        with self.measured(num_steps) as result, close_on_error(self._server):
            self._recorded.simulate = result.simulate
            self._server.begin(self._requests)
            for _ in range(num_steps):
                started = time.perf_counter()
                self._server.step()
                result.step.add(time.perf_counter() - started)
        self._requests += 1
        return result

    def close(self) -> None:
        """Disconnect from the agent, then close sink and environments."""
        try:
            self._server.close()
        finally:
            super().close()


class AgentServing(ServingProgram):
    """Acts for the simulators of other GMIs.

    On a GPU slice the policy lives there; observations and actions pass through the host. [unverified on GPU]
    """

    def __init__(self, job: ServingJob, context: GmiContext, assignment: RoleAssignment) -> None:
        spec = job.spec
        make_env = make_env_factory(spec.env.id, engine=spec.env.engine, kwargs=dict(spec.env.kwargs))
        self._simulators = connect_simulators(make_env, context, assignment, spec.gmi.collective_timeout_s)
        policy = load_policy(job.shared, spec, self._simulators.info, context.device)
        self.agent = ServingAgent(
            job,
            policy,
            self._simulators.info,
            num_envs=self._simulators.num_envs,
            first_env_index=assignment.first_env_index_of(context.identity.index),
        )
        self._requests = 0

    def serve(self, num_steps: int) -> ServingResult:
        """Act for ``num_steps`` steps of all its simulators, which count them.

        Raises:
            PartnerLostError, ChannelTimeoutError: a simulator died or does not answer.
        """
        result, clock = ServingResult(), time.perf_counter
        begin, simulators = clock(), self._simulators
        with close_on_error(simulators):
            simulators.begin(self._requests)
            for _ in range(num_steps):
                started = clock()
                actions = self.agent.act(simulators.obs)
                result.act.add(clock() - started)
                self.agent.reset(simulators.step(actions).final_ids)
        self._requests += 1
        result.wall_s = clock() - begin
        return result

    def finish(self, timeout_s: float) -> None:
        """Nothing to do: an agent records nothing."""

    def close(self) -> None:
        """Disconnect from the simulators."""
        self._simulators.close()


class _RecordingSimulator:
    """A simulator that times and records its steps."""

    def __init__(self, simulator: Simulator, sink: RowSink) -> None:
        self._simulator, self._sink = simulator, sink
        self.simulate = Latencies()

    @property
    def obs(self) -> Tensor:
        """The current observations."""
        return self._simulator.obs

    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment, and record it."""
        self._sink.record_actions(self._simulator.obs, actions)
        started = time.perf_counter()
        result = self._simulator.step(actions)
        self.simulate.add(time.perf_counter() - started)
        self._sink.record_step(result)
        return result
