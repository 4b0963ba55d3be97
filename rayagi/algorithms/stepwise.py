"""Programs of the templates with simulators and agents in separate GMIs: ``e_at`` and ``dp_mp`` (GMI-DRL §3.1.1).

The algorithm is that of ``dp_only``: the agent runs the same loop with the same noise, which is keyed by each
environment's global index.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from actors.gmi import GmiContext
from actors.partners import close_on_error
from actors.protocols import EnvFactory, EvaluationResult, IterationResult, StateDict
from actors.roles import Agent, LocalSimulator
from actors.stepping import RemoteSimulators
from rayagi import profiler
from rayagi.algorithms.collector import CollectorProgram
from rayagi.algorithms.dataflow import DataflowTopology
from rayagi.algorithms.program import (
    Stepwise,
    SynchronousProgram,
    collected_result,
    make_learner,
    new_rollout,
)
from rayagi.algorithms.role_assignment import RoleAssignment, connect_simulators, connect_step_server
from rayagi.config.spec import RunSpec
from rayagi.models.policy import new_policy


class SimulatorProgram:
    """Steps its environments with the actions of another GMI's agent, T steps per iteration."""

    def __init__(self, spec: RunSpec, make_env: EnvFactory, context: GmiContext) -> None:
        self.spec, self.context = spec, context
        index, assignment = context.identity.index, RoleAssignment.for_gmi(context.identity, spec.gmi)
        DataflowTopology.for_gmi(spec, context.identity).learner_group(
            context.communicator
        )  # all GMIs form it together
        env = make_env(
            num_envs=assignment.envs[index],
            first_env_index=assignment.first_env_index(index),
            seed=spec.seed,
            num_threads=context.identity.slice.num_threads,
        )
        self.simulator = LocalSimulator(env)
        self.iteration = 0
        limit_s = spec.gmi.collective_timeout_s
        self.server = connect_step_server(self.simulator, env.info, context, assignment, limit_s)

    @profiler.iteration()
    def iterate(self) -> IterationResult:
        """T steps of every environment, with the agent's actions.

        Raises:
            PartnerLostError, ChannelTimeoutError: the agent is lost or does not answer.
        """
        started = time.perf_counter()
        exchanging, simulating = profiler.timed_operation("exchange"), profiler.timed_operation("simulate")
        num_steps = self.spec.learning.rollout_length
        with close_on_error(self.server):
            self.server.begin(self.iteration)
            for _ in range(num_steps):
                self.server.step(exchanging, simulating)
        self.iteration += 1
        return collected_result(
            self.simulator,
            self.iteration - 1,
            num_steps * self.server.num_envs,
            {
                "iteration_s": time.perf_counter() - started,
                "simulate_s": simulating.seconds,
                "exchange_s": exchanging.seconds,
            },
        )

    def evaluate(self, num_episodes: int, seed: int) -> EvaluationResult:
        """An empty result: this GMI has no policy; the session evaluates on GMIs with an agent."""
        return EvaluationResult([], [])

    def state_dict(self) -> StateDict:
        """Shared: the iteration. Local: environments and running episodes."""
        return {"shared": {"iteration": self.iteration}, "local": {"simulator": self.simulator.state_dict()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; without ``local``, environments restart."""
        self.iteration = int(state["shared"]["iteration"])
        self.simulator.load_state_dict(state["local"]["simulator"] if "local" in state else None)

    def close(self) -> None:
        """Disconnect from the agent, and release the environments."""
        self.server.close()
        self.simulator.env.close()


class AgentTrainerProgram(SynchronousProgram):
    """Acts for the simulators of other GMIs, and trains: gradients are reduced over all GMIs of this kind.

    On a GPU slice the networks are on the GPU; observations and actions pass through the host. [unverified on GPU]
    """

    simulator: RemoteSimulators

    def __init__(self, spec: RunSpec, make_env: EnvFactory, context: GmiContext) -> None:
        assignment = RoleAssignment.for_gmi(context.identity, spec.gmi)
        trainers = DataflowTopology.for_gmi(spec, context.identity).learner_group(context.communicator)
        assert trainers is not None
        simulators = connect_simulators(make_env, context, assignment, spec.gmi.collective_timeout_s)
        policy = new_policy(spec, simulators.info, context.device)
        agent, rollout = Agent(policy), new_rollout(spec, policy, simulators.num_envs, context.device)
        first_env_index = assignment.first_env_index_of(context.identity.index)
        learner = make_learner(
            spec,
            policy,
            communicator=trainers,
            num_envs=simulators.num_envs,
            first_env_index=first_env_index,
            total_envs=sum(assignment.envs),
        )
        collection = Stepwise(simulators, agent, rollout, seed=spec.seed, first_env_index=first_env_index)
        super().__init__(spec, make_env, context, agent=agent, collection=collection, learner=learner)

    def iterate(self) -> IterationResult:
        """T steps of every environment, then the update. The simulators' GMIs report the steps and episodes.

        Raises:
            NonFiniteError: a simulator, the policy or the update produced NaN or infinity.
            PartnerLostError, ChannelTimeoutError: a simulator is lost or does not answer.
        """
        with close_on_error(self.simulator):
            result = super().iterate()
        result.metrics["train_samples"] = result.metrics.pop("env_steps")
        del result.metrics["episodes"]
        return result


class AgentProgram(CollectorProgram):
    """Acts for the simulators of other GMIs, and sends whole rollouts to the learner: a collector without environments."""

    simulator: RemoteSimulators

    def _simulator(self, num_envs: int) -> RemoteSimulators:
        assignment = RoleAssignment.for_gmi(self.context.identity, self.spec.gmi)
        return connect_simulators(
            self._make_env, self.context, assignment, self.spec.gmi.collective_timeout_s
        )

    def iterate(self) -> IterationResult:
        """Collect and send one rollout. The simulators' GMIs report its steps and episodes.

        Raises:
            NonFiniteError: a simulator or the policy returned NaN or infinity.
            ChannelTimeoutError: no learner took a rollout within the time limit of collectives.
            PartnerLostError, ChannelTimeoutError: a simulator is lost or does not answer.
        """
        with close_on_error(self.simulator):
            result = super().iterate()
        for theirs in ("env_steps", "episodes"):
            del result.metrics[theirs]
        return result
