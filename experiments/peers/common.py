"""What all runners share: flags, the clock and its JSON line, EnvPool's environments as batches, networks.

Everybody trains with 64 environments x 32 steps, 4 epochs x 4 minibatches of 512, separate 256-128-64 ELU networks, gamma
0.99, lambda 0.95, clip 0.2, Adam 3e-4, value coefficient 0.5, no entropy bonus, gradient norm 0.5, initial log std 0, and
neither normalises observations nor rewards. For images a network is the Nature CNN with 512 units and a layer of 256.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from itertools import pairwise

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from experiments.peers import DISCRETE, TASKS

ENVS, STEPS, EPOCHS, MINIBATCHES = 64, 32, 4, 4
BATCH = ENVS * STEPS
MINIBATCH = BATCH // MINIBATCHES
HIDDEN = (256, 128, 64)
CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
"""Channels, size and stride of each (Mnih et al. 2015)."""
IMAGE, CONVOLVED, FEATURES, IMAGE_HIDDEN = (4, 84, 84), 64 * 7 * 7, 512, (256,)


def flags(peer: str) -> argparse.Namespace:
    """The command line; sets torch's threads and seed by it."""
    parser = argparse.ArgumentParser(
        description=f"{peer}: PPO with the settings that all peers have in common"
    )
    parser.add_argument("--task", choices=(*TASKS, *DISCRETE), default="Ant-v5")
    parser.add_argument("--seconds", type=float, default=20.0, help="to train after the first iteration")
    parser.add_argument("--threads", type=int, default=2, help="of torch and of EnvPool")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--started", type=float, default=time.time(), help="time.time() of the caller")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    return given


class TimeUpError(Exception):
    """Raised inside a library's loop by Meter.iteration."""


class Meter:
    """Counts what is trained after the first iteration."""

    def __init__(self, peer: str, given: argparse.Namespace) -> None:
        self._peer, self._given = peer, given
        self._first: tuple[float, int] | None = None
        self._last = (0.0, 0)
        self._iterations = 0
        self.returns: collections.deque[float] = collections.deque(maxlen=100)

    def over(self, steps: int) -> bool:
        """Told after each iteration of the environment steps so far. Whether the time is up."""
        now = time.time()
        self._iterations += 1
        self._first = self._first or (now, steps)
        self._last = (now, steps)
        return now - self._first[0] >= self._given.seconds

    def iteration(self, steps: int) -> None:
        """As ``over``.

        Raises:
            TimeUpError: it is.
        """
        if self.over(steps):
            raise TimeUpError

    def report(self, version: str, notes: str) -> None:
        """Print the JSON line. ``notes``: where the library's settings are not the common ones."""
        if self._first is None:
            raise SystemExit(f"{self._peer} has not finished an iteration")
        seconds, steps = self._last[0] - self._first[0], self._last[1] - self._first[1]
        line = {
            "peer": self._peer,
            "version": version,
            "task": self._given.task,
            "env_steps": steps,
            "train_seconds": round(seconds, 2),
            "steps_per_s": round(steps / max(seconds, 1e-9), 1),
            "mean_return_last": round(float(np.mean(self.returns)), 2) if self.returns else None,
            "iterations": self._iterations - 1,
            "startup_s": round(self._first[0] - self._given.started, 2),
            "notes": notes,
        }
        print(json.dumps(line), flush=True)


class Pool:
    """EnvPool's environments as batches, reset in the step that ends an episode. Images are bytes, all else is float32.

    EnvPool by itself spends a step on each reset, in which the action is ignored: here all steps that count are physics.

    Attributes:
        observations, actions: spaces of one environment
        obs_shape: (obs_dim,), or (4, 84, 84)
        outputs: of a policy network: means of actions, or logits of choices
        is_discrete: whether there are choices
        steps: so far, of all environments
    """

    def __init__(self, given: argparse.Namespace, meter: Meter | None = None) -> None:
        import envpool  # not in the environment of RLlib's runner

        self._env = envpool.make(
            given.task, env_type="gymnasium", num_envs=ENVS, num_threads=given.threads, seed=given.seed
        )
        self._meter = meter
        self.obs_shape, actions = self._env.observation_space.shape, self._env.action_space
        self.is_image = len(self.obs_shape) > 1
        self.is_discrete = isinstance(actions, gymnasium.spaces.Discrete)
        if self.is_image:
            self.observations = gymnasium.spaces.Box(0, 255, self.obs_shape, np.uint8)
        else:
            self.observations = gymnasium.spaces.Box(-np.inf, np.inf, self.obs_shape, np.float32)
        if self.is_discrete:
            self.actions, self.outputs = gymnasium.spaces.Discrete(actions.n), int(actions.n)
        else:
            self._low, self._high = actions.low.astype(np.float32), actions.high.astype(np.float32)
            self.actions, self.outputs = gymnasium.spaces.Box(self._low, self._high), actions.shape[0]
        self.returns, self.lengths = np.zeros(ENVS), np.zeros(ENVS, np.int64)
        self.steps = 0

    def reset(self) -> np.ndarray:
        """Observations, (64, *obs_shape)."""
        self.returns[:], self.lengths[:] = 0, 0
        return self._env.reset()[0].astype(self.observations.dtype)

    def step(
        self, actions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
        """Observations after resets, rewards, terminated, truncated; the observations before resets, if there was one."""
        if self.is_discrete:
            given = np.asarray(actions).reshape(ENVS).astype(np.int32)
        else:
            given = np.clip(actions, self._low, self._high).astype(np.float64)
        obs, rewards, terminated, truncated, _ = self._env.step(given)
        obs = obs.astype(self.observations.dtype)
        truncated = truncated & ~terminated
        self.steps += ENVS
        self.returns += rewards
        self.lengths += 1
        done, final = np.flatnonzero(terminated | truncated), None
        if len(done):
            final = obs.copy()
            obs[done] = self._env.reset(done.astype(np.int32))[0]
            if self._meter is not None:
                self._meter.returns.extend(self.returns[done])
            self.returns[done], self.lengths[done] = 0, 0
        return obs, rewards.astype(np.float32), terminated, truncated, final


class Images(nn.Module):
    """Layers over images: (..., 4, 84, 84) or (..., 4 * 84 * 84), of bytes or floats, -> (..., outputs)."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, images: Tensor) -> Tensor:
        """Scaled to [0, 1]."""
        batch = images.shape[:-3] if images.shape[-3:] == IMAGE else images.shape[:-1]
        return self.layers(images.reshape(-1, *IMAGE).float() / 255).view(*batch, -1)


def widths(obs_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Inputs of the first layer with ELU, behind the convolutions, and units of each."""
    return (obs_shape[0], *HIDDEN) if len(obs_shape) == 1 else (FEATURES, *IMAGE_HIDDEN)


def network(obs_shape: tuple[int, ...], outputs: int) -> nn.Module:
    """For images the Nature CNN and its 512 units; hidden layers with ELU; all initialised as torch does."""
    layers, channels, is_image = list[nn.Module](), IMAGE[0], len(obs_shape) > 1
    if is_image:
        for filters, size, stride in CONVOLUTIONS:
            layers += [nn.Conv2d(channels, filters, size, stride), nn.ReLU()]
            channels = filters
        layers += [nn.Flatten(), nn.Linear(CONVOLVED, FEATURES), nn.ReLU()]
    sizes = widths(obs_shape)
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ELU()]
    found = nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))
    return Images(found) if is_image else found
