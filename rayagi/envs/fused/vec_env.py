"""Fused environments one step at a time, and whole rollouts at once: what the simulator role owns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from actors.policy_tensors import PolicyTensors
from actors.protocols import EnvInfo, StateDict, StepResult
from actors.rollout import Episodes, Rollout
from rayagi.envs.errors import SimulationError
from rayagi.envs.families import check_saved
from rayagi.envs.fused.c.form import CForm
from rayagi.envs.fused.forms import Fleet, Form, Setting, Steps
from rayagi.envs.fused.rollout import FusedRollout


class FormVecEnv:
    """Implements VecEnv for any form on the host. Actions are clipped to the box."""

    resumes_episodes = True

    def __init__(self, info: EnvInfo, setting: Setting, form: Form) -> None:
        self.info, self.num_envs = info, setting.num_envs
        self._setting, self._form = setting, form
        self._out = Steps.allocate(1, setting.num_envs, info.obs_dim)

    def reset(self) -> Tensor:
        """Start a new episode everywhere. Returns (N, obs_dim) float32."""
        self._form.start()
        return self._rows(self._form.observe())

    def step(self, actions: Tensor) -> StepResult:
        """Advance every environment.

        Raises:
            SimulationError: an action is not finite.
        """
        continuous = self.info.action.kind == "continuous"
        given = actions.detach().to("cpu", torch.float32 if continuous else torch.int64)
        if continuous and not torch.isfinite(given.sum()):
            bad = (~torch.isfinite(given)).nonzero()
            if len(bad):
                env = int(bad[0, 0])
                step = int(self._form.fleet.elapsed[env]) + 1
                raise SimulationError(self._setting.first_env_index + env, step, "the action")
        out = self._out
        self._form.run(given.unsqueeze(0), out)
        ids = (out.terminated[0] | out.truncated[0]).nonzero().flatten()
        return StepResult(
            obs=self._rows(out.obs[0]),
            rewards=out.rewards[0].clone(),
            terminated=out.terminated[0].clone(),
            truncated=out.truncated[0].clone(),
            final_ids=ids,
            final_obs=out.final_obs[0][:, ids].t().contiguous(),
        )

    def state_dict(self) -> StateDict:
        """State, steps and number of every running episode."""
        fleet = self._form.fleet
        return {
            "state": fleet.state.clone(),
            "elapsed": fleet.elapsed.clone(),
            "episode": fleet.episode.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> Tensor:
        """Go on within the saved episodes of as many environments."""
        check_saved(self.info.env_id, len(state["elapsed"]), self.num_envs)
        self._form.fleet.copy_(Fleet(state["state"], state["elapsed"], state["episode"]))
        return self._rows(self._form.observe())

    def close(self) -> None:
        """Nothing is held."""

    @staticmethod
    def _rows(columns: Tensor) -> Tensor:
        return columns.t().contiguous()


class FusedVecEnv(FormVecEnv):
    """Implements RolloutEnv: the C form, which also acts."""

    _form: CForm

    def __init__(self, info: EnvInfo, setting: Setting, num_threads: int) -> None:
        super().__init__(info, setting, CForm(setting, num_threads))
        self._rollout = FusedRollout(self._form)

    def fill(self, rollout: Rollout, policy: PolicyTensors, iteration: int, running: Tensor) -> Episodes:
        """T steps in one call: see RolloutEnv."""
        return self._rollout.fill(rollout, policy, iteration, running)

    def close(self) -> None:
        """End the threads."""
        self._form.close()
