"""Stand-in of IsaacGymEnvs 1.5.1: ``make`` with its arguments."""

import isaacgym  # noqa: F401

from isaacgymenvs.tasks import isaacgym_task_map


class MissingConfigException(Exception):
    """Hydra's, for a task without a configuration file."""


def make(
    seed,
    task,
    num_envs,
    sim_device,
    rl_device,
    graphics_device_id=-1,
    headless=False,
    multi_gpu=False,
    virtual_screen_capture=False,
    force_render=True,
    cfg=None,
):
    if task not in isaacgym_task_map:
        raise MissingConfigException(f"In 'config': Could not find 'task/{task}'")
    assert headless
    assert not force_render
    assert (sim_device, rl_device) == ("cuda:0", "cuda:0")
    config = {"env": {"numEnvs": num_envs, "clipObservations": 5.0, "clipActions": 1.0}}
    return isaacgym_task_map[task](
        cfg=config,
        rl_device=rl_device,
        sim_device=sim_device,
        graphics_device_id=graphics_device_id,
        headless=headless,
        virtual_screen_capture=virtual_screen_capture,
        force_render=force_render,
    )
