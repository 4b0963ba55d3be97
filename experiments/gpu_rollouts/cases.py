"""Ways of making the same rollouts and updates on a GPU, and what is counted of each. [unverified on GPU]"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actors.roles import Agent, LocalSimulator, collect
from actors.rollout import Rollout
from collectives.solo import SoloCommunicator
from rayagi.algorithms.device_rollouts import DeviceRollouts, normal_noise
from rayagi.algorithms.ppo import PPOSpec
from rayagi.algorithms.program import make_learner
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import default_hidden, make_env_factory
from rayagi.envs.tasks.masked import MaskedTaskVecEnv
from rayagi.models.policy import NetworkPolicy, new_policy
from rayagi.profiler.gpu import activities_of

MODES = ("captured", "uncaptured", "host loop")
"""One graph; the same operations launched one by one; and the ordinary loop, whose observations pass through the host."""
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


@dataclass(frozen=True, slots=True)
class Case:
    """One run: N environments of a task, T steps a rollout, in one of the modes."""

    task: str
    num_envs: int
    num_steps: int
    mode: str
    update: bool
    """Whether each rollout is followed by PPO's update; else rollouts alone."""


def spec_of(case: Case) -> RunSpec:
    """The papers' network for the task; four epochs of four minibatches."""
    return RunSpec(
        env=EnvSpec(id=case.task, engine="mujoco_warp"),
        gmi=GmiSpec(num_envs=case.num_envs),
        network=NetworkSpec(hidden=default_hidden(case.task)),
        learning=PPOSpec(rollout_length=case.num_steps, num_epochs=4, num_minibatches=4),
        seed=1,
    )


def iteration_of(case: Case, spec: RunSpec, env: MaskedTaskVecEnv) -> Callable[[int], None]:
    """A function that makes iteration i."""
    policy = new_policy(spec, env.info, env.device)
    if case.mode == "host loop":
        rollout, fill = _host_loop(case, spec, env, policy)
    else:
        device = DeviceRollouts(env, policy, num_steps=case.num_steps, seed=spec.seed)
        rollout = device.rollout
        fill = device.collect if case.mode == "captured" else _one_by_one(device)
    if not case.update:
        return fill
    training = make_learner(
        spec,
        policy,
        captured="update" if case.mode == "captured" else "nothing",
        communicator=SoloCommunicator(),
        num_envs=case.num_envs,
        first_env_index=0,
        total_envs=case.num_envs,
    )

    def both(iteration: int) -> None:
        fill(iteration)
        training.learn(rollout)

    return both


def _one_by_one(device: DeviceRollouts) -> Callable[[int], None]:
    def fill(iteration: int) -> None:
        device.iteration.fill_(iteration)
        device.run()

    return fill


def _host_loop(
    case: Case, spec: RunSpec, env: MaskedTaskVecEnv, policy: NetworkPolicy
) -> tuple[Rollout, Callable[[int], None]]:
    simulator, agent = LocalSimulator(env), Agent(policy)
    rollout = Rollout.allocate(case.num_steps, case.num_envs, env.info, env.device)

    def fill(iteration: int) -> None:
        at = torch.full((), iteration, dtype=torch.int64, device=env.device)
        noise = normal_noise(spec.seed, env.world_indices, at, case.num_steps, env.info.action.dim)
        collect(simulator, agent, rollout, noise)

    return rollout, fill


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Steps per second after two iterations to warm up, launches of one iteration, and the share of time the GPU works.

    ``peak_bytes`` is torch's memory, without Warp's.
    """
    gc.collect()  # graphs and worlds of the case before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    spec = spec_of(case)
    make_env = make_env_factory(case.task, engine="mujoco_warp")
    env = make_env(num_envs=case.num_envs, first_env_index=0, seed=spec.seed, num_threads=1)
    assert isinstance(env, MaskedTaskVecEnv)
    try:
        iterate = iteration_of(case, spec, env)
        began = time.perf_counter()
        iterate(0)
        torch.cuda.synchronize()
        first_s = time.perf_counter() - began
        iterate(1)
        torch.cuda.synchronize()
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            iterate(2 + done)
            done += 1
        torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - began
        counts = profiled(lambda: iterate(2 + done))
        return {
            **{name: getattr(case, name) for name in case.__slots__},
            "steps_per_s": round(done * case.num_envs * case.num_steps / elapsed_s, 1),
            "iterations": done,
            "first_iteration_s": round(first_s, 2),
            "peak_bytes": torch.cuda.max_memory_reserved(),
            "faults": dict(env.sim_errors),
            **counts,
        }
    finally:
        env.close()


def profiled(work: Callable[[], None]) -> dict[str, Any]:
    """Calls that launch something, and the share of wall time in which the GPU runs any kernel or copy.

    From Kineto's events: torch makes objects of Python of them, which takes half a minute for a rollout.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        elapsed_s = time.perf_counter() - began
    assert profile.profiler is not None  # set by its start
    found = list(activities_of(profile.profiler.kineto_results.events(), {}))
    calls = [each.name for each in found if not each.category.is_gpu]
    launches = {name: sum(call.startswith(name) for call in calls) for name in _LAUNCHES}
    spans = [(each.start_ns, each.end_ns) for each in found if each.category.is_gpu]
    return {
        "launches": sum(launches.values()),
        "launches_by_call": launches,
        "gpu_share": round(covered(spans) * 1e-9 / elapsed_s, 4),
    }


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def ratios(runs: list[Mapping[str, Any]]) -> dict[str, float]:
    """By mode, steps per second against the host loop's in the same round."""
    by_mode = {run["mode"]: run["steps_per_s"] for run in runs}
    host = by_mode.get("host loop")
    return {mode: rate / host for mode, rate in by_mode.items()} if host else {}
