"""How a GMI collects rollouts, and the program of the ``dp_only`` template: simulator, agent and trainer in one process.

Collection is chosen here alone:

| implementation | where | needs |
|---|---|---|
| ``DeviceRollouts`` | one CUDA graph per rollout | simulator and policy on the same GPU, an MLP |
| ``WholeRollouts`` | one compiled call per rollout | an environment that evaluates the policy itself (RolloutEnv), an MLP |
| ``Stepwise`` | step by step: the agent, then the simulator, here or in other GMIs | nothing |
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import torch

from actors.gmi import GmiContext
from actors.protocols import EnvFactory, EvaluationResult, IterationResult, RolloutEnv, StateDict, VecEnv
from actors.roles import (
    Agent,
    LocalSimulator,
    check_finite,
    collect,
    evaluate_in_new_envs,
)
from actors.rollout import Rollout
from actors.stepping import RemoteSimulators
from placement.unequal_slices import env_counts
from rayagi import profiler
from rayagi.algorithms.device_rollouts import DeviceRollouts, on_one_device
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.algorithms.rollout_learner import OF_RUNNING_EPISODES, MergedLearner
from rayagi.config.spec import RunSpec
from rayagi.models.policy import NetworkPolicy, new_policy


class Stepwise:
    """Steps the agent and the simulator by turns. ``rollout`` may be replaced between rollouts."""

    def __init__(
        self,
        simulator: LocalSimulator | RemoteSimulators,
        agent: Agent,
        rollout: Rollout,
        *,
        seed: int,
        first_env_index: int,
    ) -> None:
        self.simulator, self.agent, self.rollout = simulator, agent, rollout
        self._seed, self._first_env_index = seed, first_env_index

    def collect(self, number: int) -> dict[str, float]:
        """Collect rollout ``number``. Returns ``act_s`` and ``simulate_s``, or ``exchange_s`` of other GMIs' simulators."""
        step = "exchange" if isinstance(self.simulator, RemoteSimulators) else "simulate"
        acting, stepping = profiler.timed_operation("act"), profiler.timed_operation(step)
        with profiler.operation("collect"):
            with stepping if step == "exchange" else nullcontext():
                self.simulator.begin(number)
            noise = self.agent.policy.noise(
                self.rollout.num_steps,
                self.rollout.num_envs,
                seed=self._seed,
                first_env_index=self._first_env_index,
                number=number,
            )
            collect(self.simulator, self.agent, self.rollout, noise, acting=acting, stepping=stepping)
        return {f"{step}_s": stepping.seconds, "act_s": acting.seconds}


class WholeRollouts:
    """One call of the environments' own compiled program, which also acts. All of its time counts as ``simulate_s``."""

    def __init__(self, simulator: LocalSimulator, policy: NetworkPolicy, rollout: Rollout) -> None:
        self.simulator, self.rollout, self._policy = simulator, rollout, policy

    def collect(self, number: int) -> dict[str, float]:
        """Collect rollout ``number``. Returns ``simulate_s`` and ``act_s``."""
        with profiler.timed_operation("collect") as collecting:
            self.simulator.collect_rollout(self.rollout, self._policy.tensors(), number)
        return {"simulate_s": collecting.seconds, "act_s": 0.0}


Collection = DeviceRollouts | WholeRollouts | Stepwise
"""Fills a rollout with T steps of every environment; the number of ``collect`` is the position in the noise streams."""


def choose_collection(
    spec: RunSpec,
    env: VecEnv,
    policy: NetworkPolicy,
    agent: Agent,
    *,
    first_env_index: int,
    device: torch.device,
) -> Collection:
    """How to collect with an environment and a policy in one GMI: the fastest way that fits both."""
    if on_one_device(env, device) and policy.model.fits_kernels:
        return DeviceRollouts(env, policy, num_steps=spec.learning.rollout_length, seed=spec.seed)
    simulator, rollout = LocalSimulator(env), new_rollout(spec, policy, env.num_envs, device)
    if isinstance(env, RolloutEnv) and device.type == "cpu" and policy.model.fits_kernels:
        return WholeRollouts(simulator, policy, rollout)
    return Stepwise(simulator, agent, rollout, seed=spec.seed, first_env_index=first_env_index)


def new_rollout(spec: RunSpec, policy: NetworkPolicy, num_envs: int, device: torch.device) -> Rollout:
    """The buffer for a run's rollouts, with room for the states of a recurrent policy."""
    return Rollout.allocate(
        spec.learning.rollout_length,
        num_envs,
        policy.info,
        device,
        state_shape=(spec.learning.sequences, policy.state_dim) if policy.state_dim else None,
    )


Captured = Literal["nothing", "steps", "update"]


def make_learner(
    spec: RunSpec, policy: NetworkPolicy, *, captured: Captured = "nothing", **whose: Any
) -> MergedLearner[Any]:
    """The learner of a run's algorithm.

    Args:
        spec: the run
        policy: its model is trained; it also acts if agent and trainer share a GMI
        captured: what a GPU repeats as one graph, if the algorithm has such a learner, for a single trainer: the steps, or
            the whole update of rollouts that come from DeviceRollouts
        whose: ``communicator, num_envs, first_env_index, total_envs``, as MergedLearner takes them
    """
    definition = DEFINITIONS[spec.algorithm]
    place = {"steps": definition.captured_steps, "update": definition.captured_learner}.get(captured)
    if spec.data.path is not None:
        # Imported here: it loads readers of datasets.
        from rayagi.algorithms.offline_data import RecordedTransitions

        whose["recorded"] = RecordedTransitions(spec.data.path, policy.info, spec.data.obs_keys)
    training: type[MergedLearner[Any]] = resolve_name(place or definition.learner)
    return training(
        policy=policy,
        spec=spec.learning,
        seed=spec.seed,
        total_env_steps=spec.total_env_steps,
        **whose,
    )


def _captured(collection: Collection, policy: NetworkPolicy, context: GmiContext) -> Captured:
    """What of the update a GPU repeats as one graph: nothing that other trainers take part in."""
    if context.communicator.world_size > 1:
        return "nothing"
    if isinstance(collection, DeviceRollouts):
        return "update"
    return "steps" if context.device.type == "cuda" and policy.model.fits_kernels else "nothing"


class SynchronousProgram:
    """Agent and trainer in one process: a rollout, then the update. The simulator is here, or in other GMIs."""

    def __init__(
        self,
        spec: RunSpec,
        make_env: EnvFactory,
        context: GmiContext,
        *,
        agent: Agent,
        collection: Collection,
        learner: MergedLearner[Any],
    ) -> None:
        self.spec, self.context, self._make_env = spec, context, make_env
        self.agent, self.collection, self.learner = agent, collection, learner
        self.simulator, self.rollout = collection.simulator, collection.rollout

    def iterate(self) -> IterationResult:
        """T steps of every environment, then the update.

        Raises:
            NonFiniteError: the simulator, the policy or the update produced NaN or infinity.
        """
        with profiler.iteration():
            started = time.perf_counter()
            iteration = self.learner.iteration
            self.learner.refresh()
            collect_s = self.collection.collect(iteration)
            check_finite(self.rollout, iteration + 1)
            with profiler.timed_operation("learn") as learning:
                metrics = self.learner.learn(self.rollout)
            iteration_s = time.perf_counter() - started
            return collected_result(
                self.simulator,
                iteration,
                self.rollout.num_steps * self.rollout.num_envs,
                {
                    "iteration_s": iteration_s,
                    **collect_s,
                    "update_s": learning.seconds - metrics["sync_s"],
                    **metrics,
                },
                self.learner.histograms,
                self.learner.notes,
            )

    def evaluate(self, num_episodes: int, seed: int) -> EvaluationResult:
        """Whole episodes with the policy's mode, in separate environments."""
        self.learner.refresh()
        threads = self.context.identity.slice.num_threads
        return evaluate_in_new_envs(
            self._make_env, self.agent.policy, num_episodes, seed=seed, num_threads=threads
        )

    def state_dict(self) -> StateDict:
        """Shared: model, optimiser, statistics, iteration. Local: environments and running episodes."""
        local = {
            "simulator": self.simulator.state_dict(),
            "agent": self.agent.state_dict(),
            "training": self.learner.local_state(),
        }
        return {"shared": self.learner.shared_state(), "local": local}

    def save_replay(self, folder: Path) -> bool:
        """Write the learner's replay into a new folder. Returns False where there is none."""
        return self.learner.save_replay(folder)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; without ``local``, environments restart. ``replay``: folder of ``save_replay``."""
        local = state.get("local")
        resumes = self.simulator.resumes_episodes
        training = None if local is None else {**local["training"], "replay": state.get("replay")}
        if training is not None and not resumes:  # new episodes: sums over the old ones go, the replay stays
            for name in OF_RUNNING_EPISODES:
                training.pop(name, None)
        self.learner.load_state(state["shared"], training)
        self.agent.load_state_dict(local.get("agent", {}) if local is not None and resumes else {})
        self.simulator.load_state_dict(None if local is None else local.get("simulator"))

    def close(self) -> None:
        """Release the simulators."""
        self.simulator.close()


class DpOnlyProgram(SynchronousProgram):
    """Synchronous training in one process (GMI-DRL §3.1.1, Figure 6b). Only gradients are exchanged between GMIs.

    On a GPU slice the networks are on the GPU and physics stays on the host. With a GPU engine, a whole rollout is one
    CUDA graph launch.
    """

    def __init__(self, spec: RunSpec, make_env: EnvFactory, context: GmiContext) -> None:
        index, left_out = context.identity.index, spec.gmi.left_out
        num_planned = context.identity.num_gmis + len(left_out)
        counts = env_counts(spec.gmi.envs, num_planned, spec.gmi.sizes, left_out)
        num_envs, first_env_index = counts[index], sum(counts[:index])
        env = make_env(
            num_envs=num_envs,
            first_env_index=first_env_index,
            seed=spec.seed,
            num_threads=context.identity.slice.num_threads,
        )
        policy = new_policy(spec, env.info, context.device)
        agent = Agent(policy)
        collection = choose_collection(
            spec, env, policy, agent, first_env_index=first_env_index, device=context.device
        )
        learner = make_learner(
            spec,
            policy,
            captured=_captured(collection, policy, context),
            communicator=context.communicator,
            num_envs=num_envs,
            first_env_index=first_env_index,
            total_envs=sum(counts),
        )
        super().__init__(spec, make_env, context, agent=agent, collection=collection, learner=learner)


def collected_result(
    simulator: LocalSimulator | RemoteSimulators,
    iteration: int,
    env_steps: int,
    metrics: Mapping[str, float],
    histograms: Mapping[str, Sequence[int]] | None = None,
    notes: tuple[str, ...] = (),
) -> IterationResult:
    """The result of an iteration with environment steps: ended episodes and simulation errors beside ``metrics``."""
    returns, lengths = simulator.take_finished()
    return IterationResult(
        iteration=iteration,
        metrics={
            "env_steps": float(env_steps),
            "episodes": float(len(returns)),
            **simulator.take_sim_errors(),
            **metrics,
        },
        histograms=histograms or {},
        notes=notes,
        episode_returns=returns,
        episode_lengths=lengths,
        reward_terms=simulator.take_reward_terms(),
    )
