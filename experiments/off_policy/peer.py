"""SAC as another library trains it, with its own defaults: one environment, one update of 256 transitions a step.

    PEERS/base/bin/python -m experiments.off_policy.peer sb3 --task Ant-v5 --seconds 240 --seed 0

Prints the curve as JSON: rows of [training seconds, environment steps, mean return, its standard deviation]. Evaluations are
of the policy's mode; the clock stands still meanwhile, and while the library is imported and its networks are made.
PEERS: the folder of experiments/peers/setup.sh.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

Act = Callable[[np.ndarray], np.ndarray]
"""An observation -> the policy's mode, within the environment's bounds."""

START, BATCH, CAPACITY, GAMMA, TAU = 5_000, 256, 1_000_000, 0.99, 0.005
"""CleanRL's settings of sac_continuous_action.py."""


class TimeUpError(Exception):
    """The training time is over."""


class Clock:
    """Training time, and evaluations at equal intervals of it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self._envs = gymnasium.make_vec(given.task, given.episodes, vectorization_mode="sync")
        self.rows: list[list[float]] = []
        self._next_s, self._paused_s, self._started = given.every, 0.0, time.perf_counter()

    def tick(self, steps: int, act: Act) -> None:
        """Told after every environment step.

        Raises:
            TimeUpError: the training time is over; the last evaluation was made.
        """
        now = time.perf_counter()
        trained_s = now - self._started - self._paused_s
        if trained_s < self._next_s:
            return
        self._next_s += self._given.every
        returns = self._evaluate(act)
        self.rows.append([trained_s, steps, float(returns.mean()), float(returns.std())])
        self._paused_s += time.perf_counter() - now
        if trained_s >= self._given.seconds:
            raise TimeUpError

    def _evaluate(self, act: Act) -> np.ndarray:
        """Undiscounted returns of one episode of each environment."""
        obs, _ = self._envs.reset(seed=10_000 + self._given.seed)
        returns, running = np.zeros(self._given.episodes), np.ones(self._given.episodes, bool)
        while running.any():
            obs, rewards, terminated, truncated, _ = self._envs.step(act(obs))
            returns += rewards * running
            running &= ~(terminated | truncated)
        return returns


def train_sb3(given: argparse.Namespace, clock: Callable[[], Clock]) -> list[list[float]]:
    """Stable-Baselines3's SAC with its defaults."""
    from stable_baselines3 import SAC
    from stable_baselines3.common.callbacks import BaseCallback

    model = SAC("MlpPolicy", gymnasium.make(given.task), seed=given.seed, device="cpu")
    running = clock()

    class Ticking(BaseCallback):
        def _on_step(self) -> bool:
            running.tick(self.num_timesteps, lambda obs: model.predict(obs, deterministic=True)[0])
            return True

    with contextlib.suppress(TimeUpError):
        model.learn(total_timesteps=10**9, callback=Ticking())
    return running.rows


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers of 256 with ReLU."""
    return nn.Sequential(
        nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs)
    )


class CleanRL:
    """The loop of CleanRL's sac_continuous_action.py, with its settings: no step of the library's is left out."""

    def __init__(self, env: gymnasium.Env, seed: int) -> None:
        self.env, self.rng = env, np.random.default_rng(seed)
        box = env.action_space
        assert isinstance(box, gymnasium.spaces.Box)
        obs_dim, self.dim = env.observation_space.shape[0], box.shape[0]
        self.scale = torch.as_tensor((box.high - box.low) / 2, dtype=torch.float32)
        self.bias = torch.as_tensor((box.high + box.low) / 2, dtype=torch.float32)
        self.actor = network(obs_dim, 2 * self.dim)
        self.critics, self.targets = (
            nn.ModuleList(network(obs_dim + self.dim, 1) for _ in range(2)) for _ in range(2)
        )
        self.targets.load_state_dict(self.critics.state_dict())
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.critic_steps = torch.optim.Adam(self.critics.parameters(), lr=1e-3)
        self.actor_steps = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.alpha_steps = torch.optim.Adam([self.log_alpha], lr=1e-3)
        width = 2 * obs_dim + self.dim + 2
        self.rows = np.zeros((CAPACITY, width), np.float32)
        self.cuts = (obs_dim, self.dim, 1, 1, obs_dim)

    def sample(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Squashed Gaussian actions, and their log probabilities (B, 1)."""
        mean, log_std = self.actor(obs).chunk(2, -1)
        log_std = -5 + 0.5 * 7 * (log_std.tanh() + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        drawn = normal.rsample()
        squashed = drawn.tanh()
        log_prob = normal.log_prob(drawn) - (self.scale * (1 - squashed.square()) + 1e-6).log()
        return squashed * self.scale + self.bias, log_prob.sum(1, keepdim=True)

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> np.ndarray:
        """The policy's mode."""
        mean, _ = self.actor(torch.as_tensor(obs, dtype=torch.float32)).chunk(2, -1)
        return (mean.tanh() * self.scale + self.bias).numpy()

    def _values(self, critics: nn.ModuleList, obs: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (critic(torch.cat((obs, actions), 1)) for critic in critics)
        return first, second

    def update(self, count: int, number: int) -> None:
        """One step of the critics; every other time, two of the actor and the temperature."""
        drawn = torch.from_numpy(self.rows[self.rng.integers(0, count, BATCH)])
        obs, actions, rewards, terminated, next_obs = drawn.split(self.cuts, 1)
        alpha = self.log_alpha.exp().detach()
        with torch.no_grad():
            next_actions, log_prob = self.sample(next_obs)
            least = torch.min(*self._values(self.targets, next_obs, next_actions)) - alpha * log_prob
            target = rewards + GAMMA * (1 - terminated) * least
        loss = sum((found - target).square().mean() for found in self._values(self.critics, obs, actions))
        self._step(self.critic_steps, loss)
        for _ in range(2 if number % 2 == 0 else 0):
            new, log_prob = self.sample(obs)
            alpha = self.log_alpha.exp().detach()
            self._step(
                self.actor_steps, (alpha * log_prob - torch.min(*self._values(self.critics, obs, new))).mean()
            )
            with torch.no_grad():
                _, log_prob = self.sample(obs)
            self._step(self.alpha_steps, (-self.log_alpha.exp() * (log_prob - self.dim)).mean())
        with torch.no_grad():
            for target, own in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                target.copy_(TAU * own + (1 - TAU) * target)

    def _step(self, optimiser: torch.optim.Optimizer, loss: Tensor) -> None:
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    def explore(self, obs: np.ndarray, steps: int) -> np.ndarray:
        """Uniform actions before training starts, then the policy's."""
        if steps < START:
            return self.env.action_space.sample()
        with torch.no_grad():
            return self.sample(torch.as_tensor(obs, dtype=torch.float32).unsqueeze(0))[0][0].numpy()


def train_cleanrl(given: argparse.Namespace, clock: Callable[[], Clock]) -> list[list[float]]:
    """CleanRL's loop."""
    env = gymnasium.make(given.task)
    env.action_space.seed(given.seed)
    loop = CleanRL(env, given.seed)
    running = clock()
    obs, _ = env.reset(seed=given.seed)
    steps = 0
    try:
        while True:
            action = loop.explore(obs, steps)
            next_obs, reward, terminated, truncated, _ = env.step(action)
            loop.rows[steps % CAPACITY] = np.concatenate((obs, action, [reward, terminated], next_obs))
            obs = env.reset()[0] if terminated or truncated else next_obs
            steps += 1
            if steps > START:
                loop.update(min(steps, CAPACITY), steps)
            running.tick(steps, loop.act)
    except TimeUpError:
        return running.rows


PEERS = {"sb3": train_sb3, "cleanrl": train_cleanrl}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=tuple(PEERS))
    parser.add_argument("--task", default="Ant-v5")
    parser.add_argument("--seconds", type=float, default=240.0, help="of training")
    parser.add_argument("--every", type=float, default=20.0, help="seconds of training between evaluations")
    parser.add_argument("--episodes", type=int, default=10, help="of an evaluation")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    print(json.dumps(PEERS[given.peer](given, lambda: Clock(given))))


if __name__ == "__main__":
    main()
