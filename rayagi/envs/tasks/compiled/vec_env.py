"""VecEnv of a task on mujoco_cpu with compiled task functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actors.protocols import EnvInfo, StepResult
from rayagi.envs.errors import EnvironmentOptionError, SimulationError
from rayagi.envs.lifetime import while_open
from rayagi.envs.mujoco_cpu.batched_sim import CpuBatchedSim
from rayagi.envs.providers import check_num_envs
from rayagi.envs.tasks.compiled.program import CompiledTask
from rayagi.envs.tasks.compiled.trace import memory_name
from rayagi.envs.tasks.task import TaskFunctions
from rayagi.envs.tasks.vec_env import TaskVecEnv


class CompiledTaskVecEnv(TaskVecEnv):
    """TaskVecEnv with compiled functions. Results agree up to rounding, since sums are in another order.

    State dictionaries are interchangeable with TaskVecEnv's. Callers must not write into returned tensors.
    """

    _worlds: CpuBatchedSim

    def __init__(
        self,
        info: EnvInfo,
        rules: TaskFunctions[Any],
        worlds: CpuBatchedSim,
        program: CompiledTask,
        **env_args: Any,
    ) -> None:
        super().__init__(info, rules, worlds, **env_args)
        self._program, self._library = program, program.library
        shapes = program.traced.memory
        self._memory = {name: self._actions.new_zeros((self.num_envs, *shapes[name])) for name in shapes}
        self._obs = torch.zeros((self.num_envs, info.obs_dim), dtype=torch.float32)
        self._ended = torch.zeros(self.num_envs, dtype=torch.int64)
        self._no_finals = torch.empty(0, dtype=torch.int64), _float32(0, info.obs_dim)
        self._bind()

    def _bind(self) -> None:
        """Pass the tensors' addresses to the program. Repeated only after a state is loaded."""
        # A state saved by TaskVecEnv may have another dtype or layout.
        self._elapsed, self._episode = (
            counts.to(torch.int64).contiguous() for counts in (self._elapsed, self._episode)
        )
        self._actions = self._actions.double().contiguous()
        self._memory = {name: values.double().contiguous() for name, values in self._memory.items()}
        memory = {memory_name(name): values for name, values in self._memory.items()}
        counters = {"indices": self._indices, "elapsed": self._elapsed, "episode": self._episode}
        own = {"actions": self._actions, "controls": self._worlds.controls}
        rows = {**self._worlds.fields, **memory, **own}
        self._at = self._program.worlds(self._seed, self._limit, counters, rows)

    @while_open
    def reset(self) -> Tensor:
        """Start a new episode everywhere. Returns (N, obs_dim) float32."""
        obs = torch.zeros_like(self._obs)
        self._begin_and_observe(torch.arange(self.num_envs), obs)
        self._obs = obs
        return obs

    @while_open
    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment. Raises SimulationError: an action is not finite."""
        # 1. Clip actions, compute controls.
        self._actions.copy_(actions.detach())
        nonfinite = self._library.rayagi_control(self._at)
        if nonfinite >= 0:
            step = int(self._elapsed[nonfinite]) + 1
            raise SimulationError(int(self._indices[nonfinite]), step, "action")
        # 2. Physics.
        broken = self._worlds.step(self._worlds.controls, self._task.frame_skip)
        # 3. Rewards, terminations, observations.
        n = self.num_envs
        obs, rewards = _float32(n, self.info.obs_dim), _float32(n)
        terminated, truncated = torch.empty(n, dtype=torch.bool), torch.empty(n, dtype=torch.bool)
        terms = _float32(n, len(self.info.reward_terms))
        count = self._library.rayagi_after_physics(
            self._at,
            None if broken is None else broken.data_ptr(),
            *(
                tensor.data_ptr()
                for tensor in (
                    self._obs,
                    obs,
                    rewards,
                    terminated,
                    truncated,
                    self._ended,
                    terms,
                    self._num_unfit,
                )
            ),
        )
        # 4. Reset the worlds whose episode ended.
        ids, final_obs = self._no_finals
        if count:
            ids = self._ended[:count].clone()
            final_obs = self._begin_and_observe(ids, obs)
        self._obs = obs
        reward_terms = terms if self.info.reward_terms else None
        return StepResult(obs, rewards, terminated, truncated, ids, final_obs, reward_terms)

    def _begin_and_observe(self, ids: Tensor, obs: Tensor) -> Tensor:
        """Start new episodes in worlds ``ids`` and write their first observations to ``obs``. Returns the previous rows."""
        library, worlds, given = self._library, self._worlds, (self._at, ids.data_ptr(), len(ids))
        last = _float32(len(ids), self.info.obs_dim)
        worlds.clear(ids)
        library.rayagi_start(*given, obs.data_ptr(), last.data_ptr())
        worlds.derive(ids)
        library.rayagi_observe(*given, obs.data_ptr())
        return last

    @while_open
    def load_state_dict(self, state: Mapping[str, Any]) -> Tensor:
        """As ``TaskVecEnv.load_state_dict``.

        Raises:
            EnvironmentOptionError: a tensor has another shape than here. Nothing is changed then.
        """
        check_num_envs(self.info.env_id, len(state["elapsed"]), self.num_envs)
        saved = _tensors_of(state)
        for name, own in _tensors_of(self.state_dict()).items():
            if saved[name].shape != own.shape:
                raise EnvironmentOptionError(
                    self.info.env_id,
                    f"the saved state's {name} is {tuple(saved[name].shape)}, not {tuple(own.shape)}; "
                    "resume with the task that saved it",
                )
        self._obs = super().load_state_dict(state).contiguous()
        self._bind()
        return self._obs


def _float32(*shape: int) -> Tensor:
    """Uninitialised memory for the program's outputs, whatever torch's default type is."""
    return torch.empty(shape, dtype=torch.float32)


def _tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state of which the program has the addresses, and the observations."""
    memory = {f"memory {name!r}": values for name, values in state["memory"].items()}
    return {name: state[name] for name in ("actions", "obs", "elapsed", "episode")} | memory
