"""Serving templates and the programs of their GMIs (GMI-DRL §3.1.1, Figure 5).

dp_only has simulator and agent in one GMI: no data crosses GMIs. In dp_mp and mp_dp they are in different GMIs, which
exchange observations and actions at every step: dp_mp has one agent per simulator, mp_dp one agent for several. The
GMI with the simulator records.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from torch import Tensor

from actors.gmi import GmiContext, WorkloadFactory
from actors.partners import close_on_error
from actors.protocols import StepResult
from actors.roles import LocalSimulator
from placement.types import Machine
from placement.unequal_slices import env_counts
from rayagi.algorithms.role_assignment import RoleAssignment, connect_simulators, connect_step_server
from rayagi.coordinator import template_choice
from rayagi.models.policy import load_policy
from rayagi.planning import serving_plan_of
from rayagi.serving.latency import Latencies
from rayagi.serving.program import ServingJob, ServingProgram, ServingResult, merged_results
from rayagi.serving.recording import RowSink
from rayagi.serving.simulating import ServingAgent, SimulatingProgram


def chosen_template(
    job: ServingJob,
    asked: str,
    *,
    num_agents: int | None,
    machine: Callable[[], Machine],
    log: Callable[[str], None],
) -> str:
    """The requested template; for ``auto``, the fastest by the throughput model and short runs, with the reason logged.

    Args:
        job: what is served, without a recording
        asked: a template, or "auto"
        num_agents: GMIs with an agent only; only mp_dp has a number of them
        machine: reads the machine
        log: called with sentences

    Raises:
        PlanError: no serving template fits.
        GmiLostError, GmiSilentError, ClusterUnreachableError, ReservationError: unit costs could not be measured.
    """
    if asked != "auto":
        return asked
    if num_agents is not None:
        log("Template mp_dp: it is the only one with a number of agents.")
        return "mp_dp"
    return template_choice.chosen(
        job.spec,
        machine(),
        log=log,
        serving=True,
        measure=lambda spec, template: served_steps_per_s(job, template),
    )


def served_steps_per_s(job: ServingJob, template: str) -> float:
    """Environment steps per second of a short run on a template. A request has as many steps as a rollout."""
    # Imported here, as above.
    from rayagi.coordinator.probe import VALIDATION
    from rayagi.coordinator.session import Session
    from rayagi.coordinator.template_probe import steps_per_s_of

    spec = job.spec
    with Session(
        spec,
        factory=serving_factory(job, template),
        make_plan=lambda machine: serving_plan_of(spec.gmi, template, machine),
    ) as session:

        def serve(count: int) -> float:
            steps = count * spec.learning.rollout_length
            served = session.run("serve", steps, timeout_s=VALIDATION.hang_s * count)
            return float(merged_results(served).env_steps)

        return steps_per_s_of(serve)


def serving_factory(job: ServingJob, template: str) -> WorkloadFactory:
    """The factory of each GMI's program."""
    return partial(DpOnlyServing if template == "dp_only" else _of_role, job)


def _of_role(job: ServingJob, context: GmiContext) -> SimulatorServing | AgentServing:
    assignment = RoleAssignment.for_gmi(context.identity, job.spec.gmi)
    program = SimulatorServing if context.identity.roles == ("simulator",) else AgentServing
    return program(job, context, assignment)


class DpOnlyServing(SimulatingProgram):
    """On a GPU slice the policy runs on the GPU and physics on the host. [unverified on GPU]"""

    def __init__(self, job: ServingJob, context: GmiContext) -> None:
        gmi = job.spec.gmi
        super().__init__(job, context, env_counts(gmi.envs, context.identity.num_gmis, gmi.sizes))
        policy = load_policy(job.shared, job.spec, self.simulator.info, context.device)
        self.agent = ServingAgent(job, policy, num_envs=self.num_envs, first_env_index=self.first_env_index)

    def serve(self, num_steps: int) -> ServingResult:
        """Make ``num_steps`` steps of every environment.

        Raises:
            DiskError, WriterError: experience cannot be written.
            SimulationError: a simulation became unstable.
        """
        simulator, sink, clock = self.simulator, self.sink, time.perf_counter
        with self.measured(num_steps) as result:
            for _ in range(num_steps):
                started = clock()
                actions = self.agent.act(simulator.obs)
                acted = clock()
                sink.record_actions(simulator.obs, actions, self.agent.log_probs())
                recorded = clock()
                step = simulator.step(actions)
                simulated = clock()
                self.agent.reset(step.final_ids)
                sink.record_step(step)
                result.act.add(acted - started)
                result.simulate.add(simulated - recorded)
                result.step.add(clock() - started)
        return result


class SimulatorServing(SimulatingProgram):
    """Steps its environments with the actions of another GMI's agent, and records every step."""

    def __init__(self, job: ServingJob, context: GmiContext, assignment: RoleAssignment) -> None:
        super().__init__(job, context, assignment.envs)
        self._recorded = _RecordingSimulator(self.simulator, self.sink)
        limit_s = job.spec.gmi.collective_timeout_s
        self._server = connect_step_server(
            self._recorded, self.simulator.info, context, assignment, limit_s, log_probs=True
        )
        assert self._server.log_probs is not None
        self._recorded.log_probs = self._server.log_probs
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
        limit_s = spec.gmi.collective_timeout_s
        self._simulators = connect_simulators(
            spec.env.factory(), context, assignment, limit_s, log_probs=True
        )
        policy = load_policy(job.shared, spec, self._simulators.info, context.device)
        self.agent = ServingAgent(
            job,
            policy,
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
                self.agent.reset(simulators.step(actions, self.agent.log_probs()).final_ids)
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

    def __init__(self, simulator: LocalSimulator, sink: RowSink) -> None:
        self._simulator, self._sink = simulator, sink
        self.simulate = Latencies()
        self.log_probs: Tensor
        """Of the actions of the next ``step``; the step server fills it."""

    @property
    def obs(self) -> Tensor:
        """The current observations."""
        return self._simulator.obs

    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment, and record it."""
        self._sink.record_actions(self._simulator.obs, actions, self.log_probs)
        started = time.perf_counter()
        result = self._simulator.step(actions)
        self.simulate.add(time.perf_counter() - started)
        self._sink.record_step(result)
        return result
