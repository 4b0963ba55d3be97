"""Configurations by the tasks' names."""

import gymnasium as gym


def parse_env_cfg(task_name, device="cuda:0", num_envs=None, use_fabric=None):
    cfg = gym.spec(task_name).kwargs["env_cfg_entry_point"]()
    cfg.sim.device = device
    if num_envs is not None:
        cfg.scene.num_envs = num_envs
    return cfg
