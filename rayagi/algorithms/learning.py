"""Learner program: a trainer in its own GMI, which trains on the rollouts of collectors (GMI-DRL §3.1.1)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from actors.gmi import GmiContext
from actors.protocols import EnvFactory, EvaluationResult, IterationResult, StateDict
from actors.roles import check_finite
from collectives.experience.batcher import Batcher, Experience
from collectives.experience.errors import ChannelTimeoutError
from rayagi import profiler
from rayagi.algorithms.dataflow import EXPERIENCE_CHANNEL, POLL_TIMEOUT_S, DataflowTopology
from rayagi.algorithms.program import make_learner
from rayagi.algorithms.publishing import ParameterPublisher
from rayagi.algorithms.trajectories import channel_plan, rollout_of
from rayagi.config.spec import RunSpec
from rayagi.models.policy import new_policy


class LearnerProgram:
    """Takes experience, updates, publishes the parameters, and only then releases the experience.

    Observation and reward statistics are updated here and published with the parameters. On a GPU slice the networks are
    on the GPU and read batches from the Batcher's page-locked memory.
    """

    def __init__(self, spec: RunSpec, make_env: EnvFactory, context: GmiContext) -> None:
        """Open the consumer endpoints and announce them. Parameters are first published by ``iterate`` or a restore.

        Raises:
            ChannelError: no shared memory for the channels.
        """
        self.spec, self.context = spec, context
        self.dataflow = dataflow = DataflowTopology.for_gmi(spec, context.identity)
        self.number = number = dataflow.learners.index(context.identity.index)
        gradients = dataflow.learner_group(context.communicator)
        assert gradients is not None
        self._learners = gradients
        sample = make_env(num_envs=1, first_env_index=0, seed=spec.seed, num_threads=1)
        sample.close()
        policy = new_policy(spec, sample.info, context.device)
        self.learner = make_learner(
            spec,
            policy,
            communicator=gradients,
            num_envs=dataflow.rows(number),
            first_env_index=dataflow.first_env(dataflow.served_simulators(number).start),
            total_envs=dataflow.total_rows,
        )
        self._plan = channel_plan(sample.info, spec.learning, policy.state_dim)
        self._recurrent = policy.state_dim > 0
        self.batcher = self._open_channels()
        self._own = [dataflow.producer_of(collector) for collector in dataflow.served_simulators(number)]
        self.lags: Counter[int] = Counter()
        """Number of trained rollout rows by policy lag, in updates."""
        self._publisher = ParameterPublisher(policy, context.directory, number, node=context.node)
        self._stale_rows = self._counted_stale_rows = 0

    def _open_channels(self) -> Batcher:
        """Open consumer endpoints, and announce them to collectors."""
        rows = self.dataflow.rows(self.number)
        consumers = 1 if self.dataflow.lockstep else len(self.dataflow.learners)
        batcher = Batcher(self._plan, rows=rows, consumers=consumers, device=self.context.device)
        batcher.announce(self.context.directory, EXPERIENCE_CHANNEL, self.number, node=self.context.node)
        return batcher

    @profiler.iteration()
    def iterate(self) -> IterationResult:
        """One update. If free-running, returns an empty result when no experience arrives within POLL_TIMEOUT_S.

        Raises:
            NonFiniteError: experience or the update contains NaN or infinity.
            ChannelTimeoutError: too little experience came within the time limit of collectives.
            CommunicatorError: another learner is lost.
        """
        started = time.perf_counter()
        iteration = self.learner.iteration
        if self._publisher.version < 0:
            self._publisher.publish(iteration)
        # 1. Wait for the rows of an update.
        with (
            profiler.timed_operation("wait") as waiting,
            profiler.activity(profiler.Category.WAIT, "experience"),
        ):
            experience = self._next()
        waited = {"wait_s": waiting.seconds, "stale_samples": self._stale_samples()}
        if experience is None:
            return IterationResult(iteration, waited)
        # 2. Update; 3. publish; 4. release the rows, at the end of the block: what a rollout led to is published before its
        # slot is free, which bounds the policy lag by the number of slots.
        with experience:
            lags = iteration - experience.versions
            metrics = self._learn(experience)
            with profiler.operation("publish"):
                self._publisher.publish(self.learner.iteration)
        iteration_s = time.perf_counter() - started
        self.lags.update(lags.tolist())
        return IterationResult(
            iteration=iteration,
            metrics={
                "train_samples": float(len(lags) * self.spec.learning.rollout_length),
                "iteration_s": iteration_s,
                **waited,
                "policy_lag_mean": float(lags.double().mean()),
                "policy_lag_max": float(lags.max()),
                **(
                    {}
                    if self.dataflow.max_lag is None
                    else {"policy_lag_bound": float(self.dataflow.max_lag)}
                ),
                **metrics,
            },
            histograms=self.learner.histograms,
            notes=self.learner.notes,
        )

    def _next(self) -> Experience | None:
        """The experience of the next update; None if free-running and none arrived in time."""
        dataflow, batcher = self.dataflow, self.batcher
        limit_s = POLL_TIMEOUT_S if dataflow.free_running else self.spec.gmi.collective_timeout_s
        oldest = -1 if dataflow.max_lag is None else self.learner.iteration - dataflow.max_lag
        try:
            if not dataflow.lockstep:
                return batcher.next(limit_s, lambda version: version >= oldest)
            return batcher.round(self._expected(), limit_s, lambda version: version >= oldest)
        except ChannelTimeoutError:
            if dataflow.free_running:
                return None
            raise

    def _expected(self) -> list[int]:
        """Producers of the next round: without lost collectors until they rejoin, if the others' rows can be learned from.

        Minibatches of whole sequences need whole groups of environments; else the round waits for the successors.
        """
        batcher, collectors = self.batcher, self.dataflow.served_simulators(self.number)
        lost = set(batcher.lost) - {*batcher.producers, *batcher.waiting}
        left = {
            producer: self.dataflow.envs[collector]
            for producer, collector in zip(self._own, collectors, strict=True)
            if producer not in lost
        }
        group = self.spec.learning.envs_per_shuffle if self._recurrent else 1
        return self._own if not left or sum(left.values()) % group else list(left)

    def _stale_samples(self) -> float:
        """Steps dropped as stale since the last call."""
        rows, self._stale_rows = self.batcher.stale_rows - self._stale_rows, self.batcher.stale_rows
        return float(rows * self.spec.learning.rollout_length)

    def _learn(self, experience: Experience) -> dict[str, float]:
        rollout = rollout_of(experience.tensors, experience.ragged)
        check_finite(rollout, self.learner.iteration + 1)
        dropped = self._exchange_counts(rollout.num_envs) if self.dataflow.free_running else 0
        with profiler.timed_operation("learn") as learning:
            metrics = self.learner.learn(rollout)
        # A run ends after the steps that were made, so its schedules (learning rate, exploration) count dropped ones too.
        self.learner.env_steps += dropped * rollout.num_steps
        return {"update_s": learning.seconds - metrics["sync_s"], **metrics}

    def _exchange_counts(self, rows: int) -> int:
        """Tell the learner the rows of this update; returns those that all learners dropped since the last. Collective."""
        dropped = self.batcher.stale_rows - self._counted_stale_rows
        self._counted_stale_rows = self.batcher.stale_rows
        own = torch.tensor([rows, dropped])
        all_rows, all_dropped = map(int, self._learners.all_gather(own).sum(0))
        self.learner.set_envs_of_update(rows, all_rows)
        return all_dropped

    def evaluate(self, num_episodes: int, seed: int) -> EvaluationResult:
        """Learners have no agent. Raises RuntimeError: always."""
        raise RuntimeError("a learner has no agent: ask collectors")

    def state_dict(self) -> StateDict:
        """Shared: model, optimiser, statistics, iteration. Local: histogram of policy lags, and sample accounting."""
        return {
            "shared": self.learner.shared_state(),
            "local": {"lags": dict(self.lags), "sample_counts": self._sample_counts()},
        }

    def _sample_counts(self) -> dict[str, Any]:
        """Sample accounting: rows trained on and dropped; and by sender, rows received and released.

        Where an update takes part of a rollout, the part counts once the whole rollout is released. Until then it is
        outstanding, and is sent again if this process ends.
        """
        batcher = self.batcher
        released = sum(done for _, done in batcher.received.values())
        taken = released - batcher.stale_rows - batcher.left_rows
        return {"taken": taken, "dropped": batcher.stale_rows, "received": batcher.received}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state and publish its parameters. Experience received earlier is discarded."""
        self.learner.load_state(state["shared"], None)
        if "local" in state:
            self.lags = Counter(state["local"]["lags"])
        if self.batcher.received:
            self.batcher.close()
            self.batcher = self._open_channels()
            self._stale_rows = self._counted_stale_rows = 0
        self._publisher.publish(self.learner.iteration)

    def close(self) -> None:
        """Close the channels, and mark the parameters as finished."""
        self.batcher.close()
        self._publisher.close()
