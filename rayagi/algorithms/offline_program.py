"""Program of the ``offline`` template: gradient steps on a recorded dataset, a shard of it in each GMI."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

from torch import Tensor

from actors.gmi import GmiContext
from actors.protocols import EnvFactory, EvaluationResult, IterationResult, StateDict
from actors.roles import evaluate_in_new_envs
from placement.errors import counted
from rayagi import profiler
from rayagi.algorithms.action_range import clipped
from rayagi.algorithms.normalisers import Moments
from rayagi.algorithms.offline_data import OfflineData, scan, source_of
from rayagi.algorithms.offline_learner import OfflineLearner
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.offline import OfflineSpec
from rayagi.config.spec import RunSpec
from rayagi.models.policy import NetworkPolicy, new_policy, vector_columns
from rayagi.serving.errors import DatasetError


class OfflineProgram:
    """Learns without environment steps. Environments are made for evaluations only.

    An iteration is K gradient steps, each on B timesteps of the whole dataset: with any number of GMIs the same ones.
    """

    def __init__(self, spec: RunSpec, make_env: EnvFactory, context: GmiContext) -> None:
        """Read this GMI's shard of the dataset.

        Raises:
            DatasetError: it cannot be read, is of another task, or has values that are not finite or of other units.
            ReplayError: the shard does not fit into memory.
        """
        assert isinstance(spec.learning, OfflineSpec)
        self.spec, self.learning, self.context, self._make_env = spec, spec.learning, context, make_env
        sample = make_env(num_envs=1, first_env_index=0, seed=spec.seed, num_threads=1)
        sample.close()
        self.policy = new_policy(spec, sample.info, context.device)
        self.learner = make_offline_learner(spec, self.policy, context)
        data = spec.data
        assert data.path is not None
        recorded = source_of(data.path, sample.info, imitation=self.learning.imitates, obs_keys=data.obs_keys)
        self.statistics = scan(recorded, sample.info)
        self._notes = self.statistics.notes
        self.source = clipped(recorded, sample.info)
        self.data = OfflineData(
            self.source, context.communicator, subscriptions=self.learner.subscriptions, seed=spec.seed
        )
        if self.policy.normaliser is not None:
            moments = _of_columns(self.statistics.observations, vector_columns(sample.info))
            self.policy.normaliser.set_moments(moments)
        self._reward_scale = self._scale_of_rewards()
        self.iteration = 0
        """Number of iterations so far."""

    def _scale_of_rewards(self) -> float:
        """1000 / (best return - worst return) with ``normalize_rewards``, unless they are equal."""
        returns = self.statistics.returns or [0.0]
        spread = max(returns) - min(returns)
        return 1000.0 / spread if self.learning.normalize_rewards and spread > 0 else 1.0

    @profiler.iteration()
    def iterate(self) -> IterationResult:
        """K gradient steps.

        Raises:
            NonFiniteError: a loss or gradient became NaN or infinite.
            CommunicatorError: another GMI is lost.
        """
        started = time.perf_counter()
        self._drawing, self._own_steps = profiler.timed_operation("draw batch"), 0
        with profiler.timed_operation("learn") as learning:
            metrics = self.learner.learn(self._batches(), self.iteration + 1)
        iteration, self.iteration = self.iteration, self.iteration + 1
        notes, self._notes = self._notes, ()
        iteration_s = time.perf_counter() - started
        return IterationResult(
            iteration=iteration,
            metrics={
                "env_steps": 0.0,
                "train_samples": float(self._own_steps),
                "iteration_s": iteration_s,
                "wait_s": self._drawing.seconds,
                "update_s": learning.seconds - self._drawing.seconds - self.learner.sync_s,
                "sync_s": self.learner.sync_s,
                **metrics,
            },
            notes=notes,
        )

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        """This GMI's parts of the iteration's batches, on the policy's device, observations normalised."""
        spec = self.learning
        first = self.iteration * spec.num_updates
        for draw in range(first, first + spec.num_updates):
            with self._drawing:
                batch = self._prepared(self.data.batch(spec.batch_size, draw))
            self._own_steps += len(next(iter(batch.values())))
            yield batch

    def _prepared(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ready = {name: values.to(self.policy.device) for name, values in batch.items()}
        for name in ("obs", "next_obs"):
            if name in ready:
                ready[name] = self.policy.observe(ready[name])
        ready["action"] = self.policy.model.head.from_environment(ready["action"])
        if "reward" in ready and self._reward_scale != 1.0:
            ready["reward"] = self._reward_scale * ready["reward"]
        return ready

    def evaluate(self, num_episodes: int, seed: int) -> EvaluationResult:
        """Whole episodes with the policy's mode, in environments made for them."""
        threads = self.context.identity.slice.num_threads
        return evaluate_in_new_envs(self._make_env, self.policy, num_episodes, seed=seed, num_threads=threads)

    def state_dict(self) -> StateDict:
        """Shared: networks, optimiser, statistics, iteration, from which the next draw follows. Local: nothing."""
        shared = {
            "iteration": self.iteration,
            "dataset": self._size_of_dataset(),
            **self.learner.shared_state(),
        }
        return {"shared": shared, "local": {}}

    def _size_of_dataset(self) -> dict[str, int]:
        return {"episodes": len(self.source.lengths), "steps": self.source.num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state.

        Raises:
            DatasetError: the dataset has another size than when the state was saved: draws would be of other timesteps.
        """
        before, now = state["shared"]["dataset"], self._size_of_dataset()
        if before != now:
            raise DatasetError(
                str(self.source.path),
                f"has {counted(now['episodes'], 'episode')} of {counted(now['steps'], 'step')} where this run began with "
                f"{before['episodes']:,} of {before['steps']:,}: restore it, or start a new run",
            )
        self.iteration = int(state["shared"]["iteration"])
        self.learner.load_state(state["shared"])

    def close(self) -> None:
        """Release the shard."""
        self.data.close()


def make_offline_learner(spec: RunSpec, policy: NetworkPolicy, context: GmiContext) -> OfflineLearner[Any]:
    """The learner of a run's offline algorithm. Collective: every GMI makes one."""
    build: type[OfflineLearner[Any]] = resolve_name(DEFINITIONS[spec.algorithm].learner)
    return build(
        policy=policy,
        spec=spec.learning,
        network=spec.network,
        seed=spec.seed,
        communicator=context.communicator,
    )


def _of_columns(moments: Moments, columns: tuple[int, ...] | None) -> Moments:
    """The moments of some columns; None: of all."""
    kept = slice(None) if columns is None else list(columns)
    return Moments(count=moments.count, mean=moments.mean[kept], m2=moments.m2[kept])
