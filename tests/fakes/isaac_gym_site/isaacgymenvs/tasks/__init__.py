"""Tasks that can be reckoned by hand."""

import os

import torch

from isaacgymenvs.tasks.base.vec_task import VecTask


class Climb(VecTask):
    """A height that actions add to, and that starts between 0 and 0.5. Above 3 an episode ends; so does it after 5 steps.

    Observation: height and progress. Reward: the height. Environments are reset as those of Ant are: within the next step,
    whose physics is thrown away.
    """

    max_episode_length = 5

    def __init__(
        self, cfg, rl_device, sim_device, graphics_device_id, headless, virtual_screen_capture, force_render
    ):
        cfg["env"]["numObservations"], cfg["env"]["numActions"] = 2, 1
        super().__init__(cfg, rl_device, sim_device, graphics_device_id, headless)
        self.height = torch.zeros(self.num_envs)

    def pre_physics_step(self, actions):
        self.actions = actions.clone()
        self.height += self.actions[:, 0]

    def post_physics_step(self):
        self.progress_buf += 1
        ended = self.reset_buf.nonzero().flatten()
        if len(ended):
            self.reset_idx(ended)
        self.compute_observations()
        self.compute_reward()

    def compute_observations(self):
        self.obs_buf[:] = torch.stack([self.height, self.progress_buf.float()], dim=-1)

    def reset_idx(self, env_ids):
        self.height[env_ids] = 0.5 * torch.rand(len(env_ids))
        self.progress_buf[env_ids] = 0
        self.reset_buf[env_ids] = 0

    def compute_reward(self):
        self.rew_buf[:] = self.height
        over = (self.height > 3) | (self.progress_buf >= self.max_episode_length - 1)
        self.reset_buf[:] = torch.where(over, torch.ones_like(self.reset_buf), self.reset_buf)


class Patient(Climb):
    """Waits for its trainer to reset it, as the tasks of AMP do."""

    def post_physics_step(self):
        self.progress_buf += 1
        self.compute_observations()
        self.compute_reward()


class Dying(Climb):
    """Its process ends in the first step, as PhysX ends one that is out of memory."""

    def pre_physics_step(self, actions):
        print("PxgCudaDeviceMemoryAllocator fail to allocate memory", flush=True)
        os._exit(139)


class Hopeless(Climb):
    """There is no simulation, whereupon Isaac Gym quits."""

    def __init__(self, *args, **kwargs):
        print("*** Failed to create sim")
        raise SystemExit


isaacgym_task_map = {"Climb": Climb, "Patient": Patient, "Dying": Dying, "Hopeless": Hopeless}
