"""VecEnv of a task: N environments whose physics any engine runs and whose task functions run on torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from actors.protocols import ActionSpec, EnvInfo, StateDict, StepResult
from rayagi.envs.errors import NamedFailures
from rayagi.envs.lifetime import ClosableEnv, while_open
from rayagi.envs.providers import check_num_envs, log_sim_errors, refuse_nonfinite
from rayagi.envs.tasks.random_uniforms import START, uniform
from rayagi.envs.tasks.task import Memory, State, StepOutcome, Task, TaskFunctions

SIM_ERRORS = ("unstable", "contact overflow", "constraint overflow")
"""Kinds of simulation errors. Unstable: a non-finite or huge state, or a singular inertia. Overflow: the capacity for
contacts or constraints is exceeded."""


class BatchedSim(Protocol):
    """N worlds of one model.

    Attributes:
        num_worlds: N
        device: device of the fields
        dtype: real type of the fields: float64 on mujoco_cpu, float32 on mujoco_warp
        fields: qpos, qvel and the requested MjData fields, (N, ...). Live: ``step`` and ``restart`` update these same
            tensors in place. Read-only for callers
    """

    num_worlds: int
    device: torch.device
    dtype: torch.dtype
    fields: dict[str, Tensor]

    @property
    def sim_errors(self) -> Mapping[str, int]:
        """Counts by ``SIM_ERRORS``, since construction."""

    def step(self, controls: Tensor, num_substeps: int) -> Tensor | None:
        """Advance every world; ``controls`` (N, nu).

        Returns:
            worlds with a simulation error, which must be restarted, (N,) bool; None if none has one.
        """

    def restart(self, ids: Tensor, qpos: Tensor, qvel: Tensor) -> None:
        """Reset worlds ``ids`` (M,) to a state, (M, nq) and (M, nv), and compute the derived fields (forward pass)."""

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything that the next step depends on."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state_dict``'s values: on the CPU the next step is bit-identical."""

    def close(self) -> None:
        """Release threads and memory."""


def describe(env_id: str, engine: str, task: Task, max_episode_steps: int | None) -> EnvInfo:
    """Sizes and limits of a task's environments."""
    low, high = (-1.0,) * task.action_dim, (1.0,) * task.action_dim
    action = ActionSpec(kind="continuous", dim=task.action_dim, low=low, high=high)
    return EnvInfo(
        env_id=env_id,
        engine=engine,
        obs_dim=task.obs_dim,
        action=action,
        max_episode_steps=max_episode_steps,
        reward_terms=task.reward_terms,
    )


def stacked_terms(task: Task, outcome: StepOutcome, broken: Tensor | None) -> Tensor | None:
    """A step's reward terms as columns, (N, terms), 0 in worlds with a simulation error; None if the task has none."""
    if not task.reward_terms:
        return None
    terms = torch.stack([outcome.terms[name].to(outcome.rewards.dtype) for name in task.reward_terms], -1)
    return terms if broken is None else terms.masked_fill(broken.unsqueeze(-1), 0.0)


class TaskVecEnv(ClosableEnv):
    """Implements VecEnv for a task on any engine. Actions are clipped to [-1, 1].

    A world with a simulation error (such as a non-finite state), or for which the task computes a non-finite reward or
    observation, is counted in ``sim_errors``, terminates with a reward of 0, and is reset.
    """

    resumes_episodes = True

    def __init__(
        self,
        info: EnvInfo,
        rules: TaskFunctions[Any],
        worlds: BatchedSim,
        *,
        first_env_index: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.info, self.num_envs = info, worlds.num_worlds
        self._rules, self._worlds, self._task = rules, worlds, rules.task
        self._first_env_index, self._seed = first_env_index, seed
        device, n = worlds.device, self.num_envs
        self._limit = 2**62 if info.max_episode_steps is None else info.max_episode_steps
        self._indices = torch.arange(first_env_index, first_env_index + n, device=device)
        self._elapsed = torch.zeros(n, dtype=torch.int64, device=device)
        self._episode = torch.full((n,), -1, dtype=torch.int64, device=device)
        self._memory: Memory = {}
        self._actions = torch.zeros((n, self._task.action_dim), dtype=worlds.dtype, device=device)
        self._obs = torch.zeros((n, info.obs_dim), dtype=worlds.dtype, device=device)
        self._num_unfit = torch.zeros((), dtype=torch.int64, device=device)
        """Steps in which the physics was right, and the task's reward or observation not finite."""

    @property
    def sim_errors(self) -> Mapping[str, int]:
        """Counts of simulation errors by kind, since construction: see BatchedSim."""
        found = dict(self._worlds.sim_errors)
        found["unstable"] += int(self._num_unfit)
        return found

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """MjData fields of the worlds, live: see BatchedSim."""
        return self._worlds.fields

    @while_open
    def reset(self) -> Tensor:
        """Start a new episode everywhere. Returns (N, obs_dim) float32."""
        everything = torch.arange(self.num_envs, device=self._worlds.device)
        with NamedFailures(self.info.env_id, lambda: "reset"):
            self._begin(everything)
            self._obs = self._rules.observe(self._state()).clone()
        return self._obs.to("cpu", torch.float32)

    @while_open
    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment.

        Raises:
            EnvironmentFailedError: a function of the task raised an exception.
            SimulationError: an action is not finite.
        """
        with NamedFailures(self.info.env_id, self._where):
            return self._step(actions)

    def _where(self) -> str:
        return f"step {int(self._elapsed.max())} of the longest episode here"

    def _remember(self, changed: Memory) -> None:
        """Copies: what a task remembers may be a field, which the next step changes."""
        self._memory |= {name: value.clone() for name, value in changed.items()}

    def _with_unfit(self, broken: Tensor | None, rewards: Tensor, obs: Tensor) -> Tensor:
        """The broken worlds, and those whose reward or observation is not finite in float32; the latter are counted."""
        fit = rewards.to(torch.float32).isfinite() & obs.to(torch.float32).isfinite().all(-1)
        unfit = ~fit if broken is None else ~(fit | broken)
        self._num_unfit += unfit.sum()
        return unfit if broken is None else broken | unfit

    def _step(self, actions: Tensor) -> StepResult:
        rules, worlds = self._rules, self._worlds
        self._elapsed += 1
        self._actions = actions.detach().to(worlds.device, worlds.dtype).clamp(-1.0, 1.0)
        refuse_nonfinite(actions, "action", self._first_env_index, self._elapsed)
        # 1. Actions to actuator controls.
        state = self._state()
        controls, changed = rules.control(state)
        self._remember(changed)
        # 2. Physics, frame_skip substeps. broken: worlds with a simulation error.
        broken = worlds.step(controls, self._task.frame_skip)
        # 3. Rewards, terminations and observations of the state reached.
        state = self._state(draws=state.draws)
        outcome = rules.reward_and_done(state)
        self._remember(outcome.memory)
        obs = rules.observe(state).clone()
        rewards, terminated = outcome.rewards, outcome.terminated
        broken = self._with_unfit(broken, rewards, obs)
        terms = stacked_terms(self._task, outcome, broken)
        # 4. Broken worlds: terminated, reward 0, the last valid observation.
        rewards, terminated = rewards.masked_fill(broken, 0.0), terminated | broken
        obs = torch.where(broken.unsqueeze(-1), self._obs, obs)
        truncated = self._elapsed >= self._limit
        # 5. Reset the worlds whose episode ended; obs is then the new episode's first observation.
        ids = (terminated | truncated).nonzero().squeeze(-1)
        final_obs = obs[ids]
        if len(ids):
            self._begin(ids)
            obs[ids] = rules.observe(self._state(ids))
        self._obs = obs
        return StepResult(
            obs=obs.to("cpu", torch.float32),
            rewards=rewards.to("cpu", torch.float32),
            terminated=terminated.cpu(),
            truncated=truncated.cpu(),
            final_ids=ids.cpu(),
            final_obs=final_obs.to("cpu", torch.float32),
            reward_terms=None if terms is None else terms.to("cpu", torch.float32),
        )

    def _state(self, ids: Tensor | None = None, draws: Tensor | None = None) -> State:
        """Input of the task's functions, for all worlds or for ``ids``.

        For all worlds ``State.memory`` is this object's dictionary itself, so later updates show in it. ``draws``: the
        step's random numbers if they are computed already, since that is costly.
        """
        fields, memory, actions = self._worlds.fields, self._memory, self._actions
        if ids is not None:
            fields = {name: values[ids] for name, values in fields.items()}
            memory = {name: values[ids] for name, values in memory.items()}
            actions = actions[ids]
        if draws is None:
            draws = self._draws(ids, self._task.num_step_draws)
        return State(fields, memory, actions, draws)

    def _draws(self, ids: Tensor | None, count: int, *, start: bool = False) -> Tensor:
        if not count:
            return self._actions.new_empty((self.num_envs if ids is None else len(ids), 0))
        rows = slice(None) if ids is None else ids
        steps = START if start else self._elapsed[rows]
        draws = uniform(self._seed, self._indices[rows], self._episode[rows], steps, count)
        return draws.to(self._worlds.dtype)

    def _begin(self, ids: Tensor) -> None:
        """Start new episodes in worlds ``ids``."""
        self._elapsed[ids] = 0
        self._episode[ids] += 1
        begun = self._rules.start(self._draws(ids, self._task.num_start_draws, start=True))
        self._worlds.restart(ids, begun.qpos, begun.qvel)
        self._actions = self._actions.index_fill(0, ids, 0.0)
        for name, values in begun.memory.items():
            if name not in self._memory:
                self._memory[name] = values.new_zeros((self.num_envs, *values.shape[1:]))
            self._memory[name] = self._memory[name].index_copy(0, ids, values)

    @while_open
    def state_dict(self) -> StateDict:
        """Physics, memory, elapsed steps and episode counters: on the CPU the continuation is bit-identical."""
        return {
            "worlds": self._worlds.state_dict(),
            "memory": {name: values.cpu().clone() for name, values in self._memory.items()},
            "actions": self._actions.cpu().clone(),
            "obs": self._obs.cpu().clone(),
            "elapsed": self._elapsed.cpu().clone(),
            "episode": self._episode.cpu().clone(),
        }

    @while_open
    def load_state_dict(self, state: Mapping[str, Any]) -> Tensor:
        """Restore a saved state of as many environments. Returns the observation to act on next."""
        check_num_envs(self.info.env_id, len(state["elapsed"]), self.num_envs)
        device = self._worlds.device
        self._worlds.load_state_dict(state["worlds"])
        self._memory = {name: values.to(device).clone() for name, values in state["memory"].items()}
        self._actions, self._obs = state["actions"].to(device).clone(), state["obs"].to(device).clone()
        self._elapsed, self._episode = (
            state["elapsed"].to(device).clone(),
            state["episode"].to(device).clone(),
        )
        return self._obs.to("cpu", torch.float32)

    def _release(self) -> None:
        """Release the worlds, and log their simulation errors for users without metrics."""
        log_sim_errors(self.info.env_id, self.sim_errors)
        self._worlds.close()
