"""Program of the ``dp_only`` template: synchronous training, with simulator, agent and trainer in one process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import torch

from actors.gmi import GmiContext
from actors.host_memory import resident_bytes
from actors.protocols import EnvFactory, EvaluationResult, IterationResult, StateDict
from actors.roles import Agent, LocalSimulator, Trainer, check_finite, evaluate_in_new_envs
from actors.stepping import RemoteSimulators
from placement.unequal_slices import env_counts
from rayagi import profiler
from rayagi.algorithms.collection import Collection, choose_collection
from rayagi.algorithms.device_rollouts import DeviceRollouts
from rayagi.algorithms.merged_learner import MergedLearner
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.spec import RunSpec
from rayagi.models.policy import NetworkPolicy, new_policy

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

        whose["recorded"] = RecordedTransitions(spec.data.path, policy.info)
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


class DpOnlyProgram:
    """Synchronous training in one process (GMI-DRL §3.1.1, Figure 6b). Only gradients are exchanged between GMIs.

    On a GPU slice the networks are on the GPU and physics stays on the host. With a GPU engine, a whole rollout is one
    CUDA graph launch.
    """

    def __init__(self, spec: RunSpec, make_env: EnvFactory, context: GmiContext) -> None:
        self.spec, self.context, self._make_env = spec, context, make_env
        index = context.identity.index
        left_out = spec.gmi.left_out
        num_planned = context.identity.num_gmis + len(left_out)
        counts = env_counts(spec.gmi.envs, num_planned, spec.gmi.sizes, left_out)
        num_envs, self.first_env_index = counts[index], sum(counts[:index])
        self._num_threads = context.identity.slice.num_threads
        env = make_env(
            num_envs=num_envs,
            first_env_index=self.first_env_index,
            seed=spec.seed,
            num_threads=self._num_threads,
        )
        policy = new_policy(spec, env.info, context.device)
        self.agent = Agent(policy)
        self.collection = choose_collection(
            spec, env, policy, self.agent, first_env_index=self.first_env_index, device=context.device
        )
        self.simulator, self.rollout = self.collection.simulator, self.collection.rollout
        self.learner = make_learner(
            spec,
            policy,
            captured=_captured(self.collection, policy, context),
            communicator=context.communicator,
            num_envs=num_envs,
            first_env_index=self.first_env_index,
            total_envs=sum(counts),
        )
        self.trainer = Trainer(self.learner)

    def iterate(self) -> IterationResult:
        """T steps of every environment, then the update.

        Raises:
            NonFiniteError: the simulator or the update produced NaN or infinity.
        """
        with profiler.iteration():
            started = time.perf_counter()
            iteration = self.trainer.iteration
            self.learner.refresh()
            with profiler.operation("collect"):
                times = self.collection.collect(iteration)
            check_finite(self.rollout, iteration + 1)
            with profiler.operation("learn"):
                metrics = self.trainer.update(self.rollout)
            iteration_s = time.perf_counter() - started
            return collected_result(
                self.simulator,
                iteration,
                self.rollout.num_steps * self.rollout.num_envs,
                {
                    "iteration_s": iteration_s,
                    "simulate_s": times.simulate_s,
                    "act_s": times.act_s,
                    **self._memory(),
                    **metrics,
                },
                self.learner.histograms,
            )

    def _memory(self) -> dict[str, float]:
        return memory_metrics(self.context.device)

    def evaluate(self, num_episodes: int, seed: int) -> EvaluationResult:
        """Whole episodes with the policy's mode, in separate environments."""
        self.learner.refresh()
        return evaluate_in_new_envs(
            self._make_env, self.agent.policy, num_episodes, seed=seed, num_threads=self._num_threads
        )

    def state_dict(self) -> StateDict:
        """Shared: model, optimiser, statistics, iteration. Local: environments and running episodes."""
        local = {
            "simulator": self.simulator.state_dict(),
            "agent": self.agent.state_dict(),
            "training": self.learner.local_state(),
        }
        return {"shared": self.trainer.shared_state(), "local": local}

    def save_replay(self, folder: Path) -> bool:
        """Write the learner's replay into a new folder. Returns False where there is none."""
        return self.learner.save_replay(folder)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; without ``local``, environments restart. ``replay``: folder of ``save_replay``."""
        local = state.get("local")
        # The trainer's local state sums over running episodes: it is dropped if the environments start new ones.
        resumes = self.simulator.resumes_episodes
        training = (
            {**local["training"], "replay": state.get("replay")} if local is not None and resumes else None
        )
        self.trainer.load_state(state["shared"], training)
        self.agent.load_state_dict(local.get("agent", {}) if local is not None and resumes else {})
        self.simulator.load_state_dict(None if local is None else local["simulator"])

    def close(self) -> None:
        """Release the simulators."""
        self.simulator.close()


def collected_result(
    simulator: LocalSimulator | RemoteSimulators,
    iteration: int,
    env_steps: int,
    metrics: Mapping[str, float],
    histograms: Mapping[str, Sequence[int]] | None = None,
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
        episode_returns=returns,
        episode_lengths=lengths,
        reward_terms=simulator.take_reward_terms(),
    )


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Resident memory, and torch's peak reserved GPU memory, without the CUDA context."""
    held = {"resident_bytes": float(resident_bytes())}
    if device.type == "cuda":
        held["device_bytes"] = float(torch.cuda.max_memory_reserved(device))
    return held
