"""Environments that reset within the step, with the interface of DirectRLEnv and ManagerBasedRLEnv."""

import gymnasium as gym
import numpy as np
import torch

from isaaclab.app import RUNNING

if not RUNNING:
    raise ModuleNotFoundError("No module named 'omni.physics': AppLauncher comes first")


class DirectRLEnv(gym.Env):
    """A height that actions add to, and that starts between 0 and 0.5. Above 3 an episode ends; so does it after 4 steps.

    Observation of the policy: height and steps. Reward: the height. Tensors here are on the CPU.
    """

    metadata = {"render_modes": [None, "human", "rgb_array"]}

    def __init__(self, cfg, render_mode=None, **kwargs):
        self.cfg, self.num_envs, self.device = cfg, cfg.scene.num_envs, "cpu"
        assert cfg.sim.device == "cuda:0"
        self.max_episode_length = 4
        self.single_observation_space = gym.spaces.Dict()
        self.single_observation_space["policy"] = gym.spaces.Box(-np.inf, np.inf, (2,))
        self.single_observation_space["critic"] = gym.spaces.Box(-np.inf, np.inf, (7,))
        self.single_action_space = gym.spaces.Box(-np.inf, np.inf, (1,))
        self.height = torch.zeros(self.num_envs)
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.extras = {}

    def reset(self, seed=None, options=None):
        if seed is not None:
            torch.manual_seed(seed)
        self._reset_idx(torch.arange(self.num_envs))
        return self._get_observations(), self.extras

    def step(self, action):
        self.height += action.to(self.device)[:, 0]
        self.episode_length_buf += 1
        terminated = self.height > 3
        time_outs = self.episode_length_buf >= self.max_episode_length
        reward = self.height.clone()
        ended = (terminated | time_outs).nonzero().squeeze(-1)
        if len(ended):
            self._reset_idx(ended)
        return self._get_observations(), reward, terminated, time_outs, self.extras

    def _reset_idx(self, env_ids):
        self.height[env_ids] = 0.5 * torch.rand(len(env_ids))
        self.episode_length_buf[env_ids] = 0

    def _get_observations(self):
        seen = torch.stack([self.height, self.episode_length_buf.float()], dim=-1)
        return {"policy": seen, "critic": torch.zeros((self.num_envs, 7))}


class ManagerBasedRLEnv(DirectRLEnv):
    """Has groups of observations, whose terms may be left apart."""

    def __init__(self, cfg, render_mode=None, **kwargs):
        super().__init__(cfg, render_mode, **kwargs)
        if not cfg.concatenate_terms:
            term = gym.spaces.Box(-np.inf, np.inf, (1,))
            self.single_observation_space["policy"] = gym.spaces.Dict({"height": term, "steps": term})
