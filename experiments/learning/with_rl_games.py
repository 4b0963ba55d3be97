"""rl_games' PPO on EnvPool, with the settings that its package has for the task."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch
import yaml
from rl_games.common import env_configurations, vecenv
from rl_games.common.algo_observer import AlgoObserver
from rl_games.torch_runner import Runner

from experiments.learning.peer import Clock, TimeUpError
from experiments.peers.common import ENVS, Pool
from experiments.peers.run_rl_games import PoolVecEnv


class TickingVecEnv(PoolVecEnv):
    """EnvPool, which says after each step how many there have been."""

    def __init__(self, pool: Pool, tick: Callable[[], None]) -> None:
        super().__init__(pool)
        self._tick = tick

    def step(self, actions):
        """As of the pool."""
        found = super().step(actions)
        self._tick()
        return found


class Observer(AlgoObserver):
    """Starts the clock when the networks are made."""

    def __init__(self, given: argparse.Namespace, pool: Pool) -> None:
        self._given, self._pool = given, pool
        self.clock: Clock

    def after_init(self, algo):
        """Of a run."""
        self._algo, self.clock = algo, Clock(self._given)

    def tick(self) -> None:
        """After each step of the pool."""
        self.clock.tick(self._pool.steps, self._act)

    def _act(self, obs):
        """The mode, scaled to the task's range as in training."""
        with torch.no_grad():
            found = self._algo.model(
                {
                    "is_train": False,
                    "prev_actions": None,
                    "obs": torch.as_tensor(obs, dtype=torch.float32),
                    "rnn_states": None,
                }
            )
        return self._algo.preprocess_actions(found["mus"])


def settings(task: str, seed: int, folder: str) -> dict[str, Any]:
    """The package's file for the task's version 4 on EnvPool, on the CPU, without an end.

    Raises:
        FileNotFoundError: it has none.
    """
    name = f"{task.partition('-')[0].lower()}_envpool.yaml"
    found = yaml.safe_load((files("rl_games") / "configs" / "mujoco" / name).read_text())["params"]
    assert found["config"]["num_actors"] == ENVS, found["config"]["num_actors"]
    found["seed"] = seed
    found["config"] |= {
        "env_name": "pool", "env_config": {}, "device": "cpu", "device_name": "cpu", "mixed_precision": False,
        "print_stats": False, "max_epochs": 10**9, "save_best_after": 10**9, "train_dir": folder,
    }  # fmt: skip
    return found


def train(given: argparse.Namespace) -> Clock:
    """Until the time is over."""
    pool = Pool(given)
    observer = Observer(given, pool)
    vecenv.register("POOL", lambda name, count, **_: TickingVecEnv(pool, observer.tick))
    made = {"env_creator": lambda **_: PoolVecEnv(pool), "vecenv_type": "POOL"}
    env_configurations.register("pool", made)
    runner = Runner(observer)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(TimeUpError):
        runner.load({"params": settings(given.task, given.seed, folder)})
        runner.run({"train": True, "play": False})
    return observer.clock
