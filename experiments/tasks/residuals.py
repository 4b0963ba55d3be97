"""How far a step of each task is from one whose constraint solver has converged, by solver settings and engine.

    python -m experiments.tasks.residuals --output experiments/tasks/results/residuals.json
    python -m experiments.tasks.residuals --engine mujoco_warp --runs runs/tasks/FrankaCabinet-v0-seed0

Random actions, or with ``--runs`` the modes of trained policies: an arm that plays at random touches nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mujoco
import torch

from actors.roles import Agent
from experiments.scripts import origin, write_results
from rayagi.envs.providers import VecEnvArgs
from rayagi.envs.tasks.masked import MaskedTaskVecEnv
from rayagi.envs.tasks.provider import TASKS, make_batched_sim, make_task
from rayagi.envs.tasks.vec_env import TaskVecEnv, describe
from rayagi.serving.source import saved_policy

CONES = {"pyramidal": mujoco.mjtCone.mjCONE_PYRAMIDAL, "elliptic": mujoco.mjtCone.mjCONE_ELLIPTIC}
LIMIT_RAD_PER_S = 1e-3
"""A joint's or body's speed that differs by more after one step counts as a wrong step."""


@dataclass(frozen=True)
class Solver:
    """Settings of MuJoCo's constraint solver; None: the shipped model's."""

    iterations: int | None = None
    ls_iterations: int | None = None
    cone: str | None = None
    tolerance: float | None = None

    def apply(self, model: mujoco.MjModel) -> None:
        """Set what is not None."""
        for name, value in asdict(self).items():
            if value is not None:
                setattr(model.opt, name, CONES[value] if name == "cone" else value)


@dataclass(frozen=True)
class Residual:
    """Of all world-steps: the largest difference of a speed (m/s, rad/s) from the converged step."""

    steps: int
    median: float
    p99: float
    largest: float
    share_wrong: float
    """Of world-steps, beyond LIMIT_RAD_PER_S."""
    seconds: float
    """Of all steps."""


def make_env(env_id: str, engine: str, num_envs: int, solver: Solver, *, seed: int = 3) -> TaskVecEnv:
    """Environments of a task's shipped model with other settings of the solver."""
    task = make_task(env_id, {})
    model = task.load()
    solver.apply(model)
    worlds = make_batched_sim(engine, task, model, VecEnvArgs(num_envs, 0, seed, 1))
    rules = task.rules(model, device=worlds.device, dtype=worlds.dtype)
    kind = MaskedTaskVecEnv if engine == "mujoco_warp" else TaskVecEnv
    return kind(describe(env_id, engine, task, TASKS[env_id].max_episode_steps), rules, worlds, seed=seed)


def copy_state(source: TaskVecEnv, target: TaskVecEnv) -> None:
    """Let ``target`` go on from where ``source`` is, in its own real type."""
    dtype = target._worlds.dtype

    def converted(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    state = source.state_dict()
    state |= {name: converted(state[name]) for name in ("actions", "obs")}
    state["memory"] = {name: converted(value) for name, value in state["memory"].items()}
    target.load_state_dict(state)


def measure(
    env_id: str,
    engine: str,
    cases: Mapping[str, Solver],
    *,
    num_envs: int,
    num_steps: int,
    seed: int = 3,
    agent: Agent | None = None,
) -> dict[str, Residual]:
    """Play on the CPU with a converged solver, at random or by an agent; from each of its states every case makes one step.

    Returns:
        by case, the residual beside the converged step of the same cone on the CPU.
    """
    cones = {solver.cone for solver in cases.values()}
    players = {
        cone: make_env(env_id, "mujoco_cpu", num_envs, Solver(100, 50, cone, 0.0), seed=seed)
        for cone in cones
    }
    envs = {name: make_env(env_id, engine, num_envs, solver, seed=seed) for name, solver in cases.items()}
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in cases}
    seconds = dict.fromkeys(cases, 0.0)
    obs = {cone: player.reset() for cone, player in players.items()}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        actions = {
            cone: choose_actions(agent, seen, players[cone].info.action.dim, generator)
            for cone, seen in obs.items()
        }
        for name, env in envs.items():
            copy_state(players[cases[name].cone], env)
            begin = time.process_time()
            env.step(actions[cases[name].cone])
            seconds[name] += time.process_time() - begin
        for cone, player in players.items():
            result = player.step(actions[cone])
            obs[cone] = result.obs
            going_on = ~(result.terminated | result.truncated)
            for name, env in envs.items():
                if cases[name].cone == cone:
                    difference = env.fields["qvel"].cpu().double() - player.fields["qvel"]
                    errors[name].append(difference.abs().amax(-1)[going_on])
    return {name: _residual(torch.cat(errors[name]), seconds[name]) for name in cases}


def choose_actions(
    agent: Agent | None, obs: torch.Tensor, dim: int, generator: torch.Generator
) -> torch.Tensor:
    """The agent's mode, or actions at random in [-1, 1], (N, dim)."""
    if agent is None:
        return 2.0 * torch.rand((len(obs), dim), generator=generator) - 1.0
    return agent.act_greedily(obs.float())


def _residual(errors: torch.Tensor, seconds: float) -> Residual:
    quantiles = errors.quantile(torch.tensor([0.5, 0.99], dtype=errors.dtype)).tolist()
    wrong = (errors > LIMIT_RAD_PER_S).double().mean()
    return Residual(len(errors), *quantiles, float(errors.max()), float(wrong), seconds)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--engine", default="mujoco_cpu", choices=("mujoco_cpu", "mujoco_warp"))
    parser.add_argument("--iterations", nargs="+", type=int, default=[4, 6, 8, 12, 20])
    parser.add_argument("--ls-iterations", type=int, help="of all cases; without it, the model's own")
    parser.add_argument("--cones", nargs="+", default=["pyramidal", "elliptic"], choices=CONES)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--runs", type=Path, nargs="+", help="play by these runs' best policies")
    options = parser.parse_args()
    players: list[tuple[str, Agent | None]] = [(task, None) for task in options.tasks]
    if options.runs:
        policies = [saved_policy(run, "best") for run in options.runs]
        players = [(saved.spec.env.id, Agent(saved.policy)) for saved in policies]
    rows: list[dict[str, Any]] = []
    for task, agent in players:
        cases = {
            f"{cone} {n}": Solver(n, options.ls_iterations, cone)
            for cone in options.cones
            for n in options.iterations
        }
        cases["shipped"] = Solver()
        for name, found in measure(
            task, options.engine, cases, num_envs=options.num_envs, num_steps=options.steps, agent=agent
        ).items():
            play = "random" if agent is None else "trained"
            rows.append({"task": task, "play": play, "engine": options.engine, "case": name, **asdict(found)})
            print(
                f"{task:24} {name:14} median {found.median:.1e}  p99 {found.p99:.1e}  largest {found.largest:.1e}"
                f"  wrong {found.share_wrong:.2%}  {found.seconds:.2f} s",
                flush=True,
            )
    if options.output:
        write_results(options.output, {"origin": origin(), "rows": rows})


if __name__ == "__main__":
    main()
