"""Serving with simulator and agent in one GMI (GMI-DRL §3.1.1, Figure 5c): no data crosses GMIs."""

from __future__ import annotations

import time
from dataclasses import dataclass

from actors.gmi import GmiContext
from placement.unequal_slices import env_counts
from rayagi.models.policy import load_policy
from rayagi.serving.program import ServingJob, ServingResult
from rayagi.serving.serving_agent import ServingAgent
from rayagi.serving.simulating import SimulatingProgram


@dataclass(frozen=True, slots=True)
class DpOnlyServingFactory:
    """Picklable: carries the job to the GMI's process and builds the program there."""

    job: ServingJob

    def __call__(self, context: GmiContext) -> DpOnlyServing:
        """Build simulator and agent on this GMI's slice."""
        return DpOnlyServing(self.job, context)


class DpOnlyServing(SimulatingProgram):
    """On a GPU slice the policy runs on the GPU and physics on the host. [unverified on GPU]"""

    def __init__(self, job: ServingJob, context: GmiContext) -> None:
        gmi = job.spec.gmi
        super().__init__(job, context, env_counts(gmi.envs, context.identity.num_gmis, gmi.slices or ()))
        policy = load_policy(job.shared, job.spec, self.simulator.info, context.device)
        self.agent = ServingAgent(
            job,
            policy,
            self.simulator.info,
            num_envs=self.num_envs,
            first_env_index=self.first_env_index,
        )

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
                sink.record_actions(simulator.obs, actions)
                recorded = clock()
                step = simulator.step(actions)
                simulated = clock()
                self.agent.reset(step.final_ids)
                sink.record_step(step)
                result.act.add(acted - started)
                result.simulate.add(simulated - recorded)
                result.step.add(clock() - started)
        return result
