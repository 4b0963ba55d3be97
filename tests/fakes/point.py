"""A point that is pushed about: a small environment with exact, layout-independent dynamics that checks its callers."""

import numpy as np
import torch

from actors.protocols import ActionSpec, EnvInfo, StepResult

OBS_DIM, ACTION_DIM, LIMIT = 3, 2, 7


class PointEnv:
    """x' = 0.9 x + 0.1 push; the reward is -|x|^2; ends when a coordinate passes 0.95, or after LIMIT steps."""

    resumes_episodes = True

    def __init__(self, num_envs, first_env_index, seed, poison_step=None):
        self.num_envs, self.first, self.seed = num_envs, first_env_index, seed
        self.info = EnvInfo(
            env_id="Point", engine="fake", obs_dim=OBS_DIM,
            action=ActionSpec(kind="continuous", dim=ACTION_DIM, low=(-1.0,) * 2, high=(1.0,) * 2),
            max_episode_steps=LIMIT,
        )  # fmt: skip
        self.position = np.zeros((num_envs, ACTION_DIM))
        self.elapsed = np.zeros(num_envs, dtype=np.int64)
        self.episode = np.zeros(num_envs, dtype=np.int64)
        self.poison_step, self.steps = poison_step, 0

    def _start(self, i):
        generator = np.random.default_rng([self.seed, self.first + i, self.episode[i]])
        self.position[i] = generator.uniform(-1, 1, ACTION_DIM)
        self.elapsed[i] = 0
        self.episode[i] += 1

    def _obs(self):
        return torch.from_numpy(np.column_stack([self.position, self.elapsed / LIMIT]).astype(np.float32))

    def reset(self):
        for i in range(self.num_envs):
            self._start(i)
        return self._obs()

    def step(self, actions):
        assert actions.shape == (self.num_envs, ACTION_DIM), actions.shape
        assert actions.dtype == torch.float32
        self.steps += 1
        self.position = 0.9 * self.position + 0.1 * actions.clamp(-1, 1).double().numpy()
        self.elapsed += 1
        rewards = -(self.position**2).sum(1)
        if self.steps == self.poison_step:
            rewards[0] = np.nan
        terminated = np.abs(self.position).max(1) > 0.95
        truncated = ~terminated & (self.elapsed >= LIMIT)
        last = self._obs()
        ended = np.flatnonzero(terminated | truncated)
        for i in ended:
            self._start(i)
        return StepResult(
            obs=self._obs(), rewards=torch.from_numpy(rewards.astype(np.float32)),
            terminated=torch.from_numpy(terminated), truncated=torch.from_numpy(truncated),
            final_ids=torch.from_numpy(ended), final_obs=last[torch.from_numpy(ended)],
        )  # fmt: skip

    def state_dict(self):
        return {
            "position": self.position.copy(),
            "elapsed": self.elapsed.copy(),
            "episode": self.episode.copy(),
        }

    def load_state_dict(self, state):
        self.position, self.elapsed, self.episode = (
            state[k].copy() for k in ("position", "elapsed", "episode")
        )
        return self._obs()

    def close(self):
        pass


def make_point(*, num_envs, first_env_index, seed, num_threads):
    return PointEnv(num_envs, first_env_index, seed)


def make_poisoned_point(*, num_envs, first_env_index, seed, num_threads):
    """Returns a NaN reward on its 20th step."""
    return PointEnv(num_envs, first_env_index, seed, poison_step=20)
