"""Registers the tasks with gymnasium."""

from types import SimpleNamespace

import gymnasium as gym


def config(**settings):
    return lambda: SimpleNamespace(
        scene=SimpleNamespace(num_envs=4096), sim=SimpleNamespace(device="cuda:0"), seed=None, **settings
    )


for name, entry, settings in (
    ("Isaac-Climb-Direct-v0", "DirectRLEnv", {"is_finite_horizon": False}),
    ("Isaac-Climb-v0", "ManagerBasedRLEnv", {"is_finite_horizon": True, "concatenate_terms": True}),
    ("Isaac-Climb-Apart-v0", "ManagerBasedRLEnv", {"is_finite_horizon": False, "concatenate_terms": False}),
):
    gym.register(
        id=name,
        entry_point=f"isaaclab.envs:{entry}",
        disable_env_checker=True,
        kwargs={"env_cfg_entry_point": config(**settings)},
    )
