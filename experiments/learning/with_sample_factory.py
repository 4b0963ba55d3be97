"""Sample Factory's PPO with the settings of its MuJoCo examples, on as many processes as there are cores.

They train on Gymnasium's environments. Its processes cannot be stopped for evaluations: it writes checkpoints, which are
evaluated after training. Its clock begins with the end of its first iteration: its processes take seconds to start.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.algo.utils.action_distributions import argmax_actions
from sample_factory.algo.utils.make_env import make_env_func_batched
from sample_factory.algo.utils.rl_utils import prepare_and_normalize_obs
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.model.actor_critic import ActorCritic, create_actor_critic
from sample_factory.model.model_utils import get_rnn_size
from sample_factory.train import make_runner
from sample_factory.utils.attr_dict import AttrDict
from sf_examples.mujoco.mujoco_params import mujoco_override_defaults

from experiments.learning.peer import Clock

ENVS = 64
"""Of its examples: 8 processes of 8."""

# Sample Factory 2.1.1 wants a Gymnasium whose wrappers pass attributes on, the tasks want a later one.
gymnasium.Wrapper.__getattr__ = lambda self, name: getattr(object.__getattribute__(self, "env"), name)


def make_env(full_env_name, cfg=None, env_config=None, render_mode=None):
    """Called in Sample Factory's own processes."""
    return gymnasium.make(full_env_name, render_mode=render_mode)


class Stopper(AlgoObserver):
    """Ends training when the time is up."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self.started = seconds, 0.0

    def on_training_step(self, runner, training_iteration_since_resume):
        """After each iteration."""
        self.started = self.started or time.time()
        if time.time() - self.started >= self._seconds:
            runner.cfg.train_for_env_steps = -1


def settings(given: argparse.Namespace, folder: str) -> AttrDict:
    """Those of the examples, but for processes, checkpoints and the CPU."""
    workers = len(os.sched_getaffinity(0))
    changed = {
        "env": given.task, "experiment": "peer", "train_dir": folder, "device": "cpu", "seed": given.seed,
        "num_workers": workers, "num_envs_per_worker": ENVS // workers,
        "save_every_sec": max(1, round(given.every)), "keep_checkpoints": 10**6,
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in changed.items()]
    parser, partial = parse_sf_args(arguments)
    mujoco_override_defaults(partial.env, parser)
    return parse_full_cfg(parser, arguments)


def load(path: Path, cfg: AttrDict) -> ActorCritic:
    """The networks of a checkpoint."""
    env = make_env_func_batched(cfg, AttrDict(worker_index=0, vector_index=0, env_id=0))
    found = create_actor_critic(cfg, env.observation_space, env.action_space)
    found.eval()
    # Its own loading predates torch's refusal of what is no tensor. This process has just written the file.
    found.load_state_dict(torch.load(path, map_location="cpu", weights_only=False)["model"])
    return found


def train(given: argparse.Namespace) -> Clock:
    """Until the time is over, and the evaluation of each checkpoint."""
    register_env(given.task, make_env)
    clock = Clock(given)
    with tempfile.TemporaryDirectory() as folder:
        cfg = settings(given, folder)
        _, runner = make_runner(cfg)
        stopper = Stopper(given.seconds)
        runner.register_observer(stopper)
        runner.init()
        runner.run()
        for path in sorted(
            Path(folder).rglob("checkpoint_*.pth")
        ):  # their names begin with the training step
            trained_s = path.stat().st_mtime - stopper.started
            if trained_s <= 0:
                continue
            actor = load(path, cfg)

            def act(obs: np.ndarray, actor: ActorCritic = actor) -> np.ndarray:
                with torch.no_grad():
                    normalised = prepare_and_normalize_obs(actor, {"obs": torch.as_tensor(obs).float()})
                    actor(normalised, torch.zeros(len(obs), get_rnn_size(cfg)))
                    return argmax_actions(actor.action_distribution()).numpy()

            env_steps = int(path.stem.rpartition("_")[2])
            clock.add(trained_s, env_steps, act)
    return clock
