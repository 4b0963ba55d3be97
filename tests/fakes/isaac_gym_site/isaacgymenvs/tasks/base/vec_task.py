"""The interface of VecTask as rayagi uses it: names, shapes, types, and the order of things within a step."""

import numpy as np
import torch


class Box:
    """gym's box, which has these."""

    def __init__(self, low, high):
        self.low, self.high, self.shape = low, high, low.shape


class VecTask:
    """Environments on a device (here always the CPU). One simulation per process."""

    made = 0

    def __init__(self, config, rl_device, sim_device, graphics_device_id, headless):
        VecTask.made += 1
        if VecTask.made > 1:
            raise RuntimeError("this process has a simulation already")
        self.cfg, self.rl_device, self.device = config, "cpu", "cpu"
        env = config["env"]
        self.num_envs, self.num_obs, self.num_acts = env["numEnvs"], env["numObservations"], env["numActions"]
        self.clip_obs, self.clip_actions = env["clipObservations"], env["clipActions"]
        self.action_space = Box(-np.ones(self.num_acts, np.float32), np.ones(self.num_acts, np.float32))
        self.obs_buf = torch.zeros((self.num_envs, self.num_obs))
        self.rew_buf = torch.zeros(self.num_envs)
        self.reset_buf = torch.ones(self.num_envs, dtype=torch.long)
        self.progress_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.extras, self.obs_dict = {}, {}

    def zero_actions(self):
        return torch.zeros((self.num_envs, self.num_acts))

    def step(self, actions):
        self.pre_physics_step(torch.clamp(actions, -self.clip_actions, self.clip_actions))
        self.post_physics_step()
        self.extras["time_outs"] = (self.progress_buf >= self.max_episode_length - 1) & (self.reset_buf != 0)
        self.obs_dict["obs"] = torch.clamp(self.obs_buf, -self.clip_obs, self.clip_obs)
        return self.obs_dict, self.rew_buf, self.reset_buf, self.extras

    def reset(self):
        self.obs_dict["obs"] = torch.clamp(self.obs_buf, -self.clip_obs, self.clip_obs)
        return self.obs_dict
