"""Collector program: simulator and agent in one GMI; rollouts go to learners in other GMIs (GMI-DRL §3.1.1)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from actors.gmi import GmiContext
from actors.protocols import EnvFactory, EvaluationResult, IterationResult, StateDict
from actors.roles import Agent, LocalSimulator, check_finite, evaluate_in_new_envs
from actors.rollout import Rollout
from actors.stepping import RemoteSimulators
from collectives.experience.dispenser import Dispenser
from collectives.experience.errors import ChannelTimeoutError
from collectives.experience.migrator import Migrator
from rayagi import profiler
from rayagi.algorithms.dataflow import EXPERIENCE_CHANNEL, POLL_TIMEOUT_S, DataflowTopology
from rayagi.algorithms.program import Stepwise, collected_result, new_rollout
from rayagi.algorithms.publishing import ParameterSubscriber
from rayagi.algorithms.returns import discounted_returns
from rayagi.algorithms.trajectories import channel_plan, finals_of, rollout_over
from rayagi.config.spec import RunSpec
from rayagi.models.policy import new_policy


class CollectorProgram:
    """Writes rollouts into channel memory that learners read, acting with the newest published parameters.

    A rollout starts once a slot is free. A slot is freed after the learner has trained on its rollout and published the
    resulting parameters. So ``slots`` outstanding rollouts mean a policy lag of at most ``slots`` - 1.

    On a GPU slice the network is on the GPU; physics and channels stay on the host.
    """

    def __init__(self, spec: RunSpec, make_env: EnvFactory, context: GmiContext) -> None:
        """Make the environments and the channels. Learners are resolved on first use.

        Raises:
            ChannelError: no shared memory for the channels.
        """
        self.spec, self.context, self._make_env = spec, context, make_env
        self.dataflow = dataflow = DataflowTopology.for_gmi(spec, context.identity)
        self.number = number = dataflow.collectors.index(context.identity.index)
        dataflow.learner_group(context.communicator)  # all members form a group together
        self.first_env_index, num_envs = dataflow.first_env(number), dataflow.envs[number]
        self.simulator = self._simulator(num_envs)
        info = self.simulator.info
        self.policy = new_policy(spec, info, context.device)
        self.agent = Agent(self.policy)
        self._own = new_rollout(spec, self.policy, num_envs, context.device)
        self.collection = Stepwise(
            self.simulator, self.agent, self._own, seed=spec.seed, first_env_index=self.first_env_index
        )
        self._running = torch.zeros(num_envs)
        """Discounted return so far of each running episode."""
        self.rollouts = 0
        """Rollouts so far: the position in the environments' noise streams."""
        self._plan = channel_plan(info, spec.learning, self.policy.state_dim)
        self._dispenser = self._open_channels()
        self._parameters = ParameterSubscriber(
            self.policy,
            context.directory,
            dataflow.learner_of(number),
            remote_transport=context.remote_transport,
        )

    def _open_channels(self) -> Dispenser:
        """Producer rings for rollouts; a Migrator connects them to learners."""
        dataflow, rows = self.dataflow, self._own.num_envs
        dispenser = Dispenser(
            self._plan,
            rows=rows,
            producer=dataflow.producer_of(self.number),
            slots=dataflow.slots,
            ragged_rows=rows * self._own.num_steps,
        )
        learners, context = len(dataflow.learners), self.context
        Migrator(
            dispenser,
            context.directory,
            EXPERIENCE_CHANNEL,
            consumers=learners if dataflow.lockstep else None,
            together=learners,
            remote_route=context.remote_transport,
        )
        self._sent = 0
        return dispenser

    def _simulator(self, num_envs: int) -> LocalSimulator | RemoteSimulators:
        """The agent's step source: the environments of this GMI."""
        env = self._make_env(
            num_envs=num_envs,
            first_env_index=self.first_env_index,
            seed=self.spec.seed,
            num_threads=self.context.identity.slice.num_threads,
        )
        return LocalSimulator(env)

    @profiler.iteration()
    def iterate(self) -> IterationResult:
        """Collect and send one rollout. If free-running, returns an empty result when no slot is free for POLL_TIMEOUT_S.

        Raises:
            NonFiniteError: the simulator or the policy returned NaN or infinity.
            ChannelTimeoutError: no learner published, or took a rollout, within the time limit of collectives.
            ChannelError: the learner is on another host without a transport to it.
        """
        started, waiting = time.perf_counter(), profiler.timed_operation("wait")
        limit_s = self.spec.gmi.collective_timeout_s
        timeout_s = POLL_TIMEOUT_S if self.dataflow.free_running else limit_s
        try:
            # 1. A free slot, and only then the parameters: read before, they could be older than the update that freed it.
            with waiting, profiler.activity(profiler.Category.WAIT, "slot, parameters"):
                rows = self._dispenser.open(timeout_s)
                version = self._parameters.read(timeout_s)
        except ChannelTimeoutError:
            if not self.dataflow.free_running:
                raise
            return IterationResult(self.rollouts, {"wait_s": waiting.seconds})
        # 2. T steps, written in place into the slot, which no consumer reads before ``send`` commits it.
        rollout = self.collection.rollout = rollout_over(rows, self._own.obs, self._own.outputs)
        collect_s = self.collection.collect(self.rollouts)
        check_finite(rollout, self.rollouts + 1)
        # 3. What learners cannot compute, log mu(a|s) and R_t; 4. commit the slot with the version that acted.
        with profiler.operation("send"):
            self._complete(rollout)
            self._sent = self._dispenser.send(version, finals_of(rollout), limit_s)
        ended = time.perf_counter()
        self.rollouts += 1
        return collected_result(
            self.simulator,
            self.rollouts - 1,
            rollout.num_steps * rollout.num_envs,
            {
                "iteration_s": ended - started,
                **collect_s,
                "wait_s": waiting.seconds,
            },
        )

    @torch.inference_mode()
    def _complete(self, rollout: Rollout) -> None:
        """Fill the fields that only the collector knows: log mu(a|s) of the behaviour policy, and running returns."""
        assert rollout.log_probs is not None
        assert rollout.running_returns is not None
        actions = rollout.actions.to(self.context.device)
        rollout.log_probs.copy_(self.policy.model.head.log_prob(rollout.outputs, actions))
        done = rollout.terminated | rollout.truncated
        returns, self._running = discounted_returns(
            rollout.rewards, done, self._running, self.spec.learning.gamma
        )
        rollout.running_returns.copy_(returns)

    def evaluate(self, num_episodes: int, seed: int) -> EvaluationResult:
        """Whole episodes with the newest policy's mode, in separate environments.

        Before a learner has published, this is the initial policy.
        """
        with suppress(ChannelTimeoutError):
            self._parameters.read(0.0)
        threads = self.context.identity.slice.num_threads
        return evaluate_in_new_envs(self._make_env, self.policy, num_episodes, seed=seed, num_threads=threads)

    def state_dict(self) -> StateDict:
        """Shared: the newest published parameters. Local: environments, running episodes, and counts of sent rows."""
        local = {
            "simulator": self.simulator.state_dict(),
            "agent": self.agent.state_dict(),
            "running_returns": self._running.clone(),
            "rollouts": self.rollouts,
            "sample_counts": self._sample_counts(),
        }
        return {"shared": self._parameters.state_dict(), "local": local}

    def _sample_counts(self) -> dict[str, Any]:
        """Sample accounting: rows that this process sent, and those that no learner has released yet."""
        self._dispenser.progress()
        unreleased = set[int]().union(*(ring.unreleased() for ring in self._dispenser.rings))
        rows = self._own.num_envs
        return {
            "origin": self._dispenser.origin,
            "sent": self._sent * rows,
            "unreleased": len(unreleased) * rows,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; without ``local``, environments restart. Parameters come from the learner.

        Outstanding rollouts predate the state and are discarded.
        """
        self._parameters.forget()
        if self._sent:
            self._dispenser.close(timeout_s=0.0)
            self._dispenser = self._open_channels()
        local = state.get("local")
        self.rollouts = int(state["shared"]["iteration"] if local is None else local["rollouts"])
        self.simulator.load_state_dict(None if local is None else local["simulator"])
        # What belongs to running episodes goes with them.
        saved = local if local is not None and self.simulator.resumes_episodes else {}
        self.agent.load_state_dict(saved.get("agent", {}))
        self._running = saved["running_returns"].clone() if saved else torch.zeros_like(self._running)

    def close(self) -> None:
        """Close the channels, and release the simulators."""
        self._dispenser.close()
        self._parameters.close()
        self.simulator.close()
