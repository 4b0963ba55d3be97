"""Sample Factory's asynchronous APPO with EnvPool as one batched environment."""

from __future__ import annotations

import tempfile
from importlib.metadata import version

import gymnasium
import numpy as np
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

from experiments.peers import PIXELS
from experiments.peers.common import (
    ENVS,
    EPOCHS,
    FEATURES,
    HIDDEN,
    IMAGE_HIDDEN,
    MINIBATCH,
    MINIBATCHES,
    STEPS,
    Meter,
    Pool,
    flags,
)

GIVEN = flags("Sample Factory")
"""Read when the module is imported: the processes that it spawns need torch's threads, too."""

# Sample Factory 2.1.1 wants a Gymnasium whose wrappers pass attributes on, the tasks want a later one.
gymnasium.Wrapper.__getattr__ = lambda self, name: getattr(object.__getattribute__(self, "env"), name)


class PoolEnv(gymnasium.Env):
    """EnvPool, as agents of one environment."""

    is_multiagent, num_agents, render_mode = True, ENVS, None

    def __init__(self) -> None:
        self._pool = Pool(GIVEN)
        self.observation_space, self.action_space = self._pool.observations, self._pool.actions

    def reset(self, **_):
        """All of them."""
        return self._pool.reset(), {}

    def step(self, actions):
        """With time limits told apart."""
        obs, rewards, terminated, truncated, _ = self._pool.step(np.asarray(actions))
        return obs, rewards, terminated, truncated, {"time_outs": truncated} if truncated.any() else {}


def make_env(full_env_name, cfg=None, env_config=None, render_mode=None):
    """Called in Sample Factory's own processes."""
    return PoolEnv()


class Clock(AlgoObserver):
    """Ends training when the time is up."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def on_training_step(self, runner, training_iteration_since_resume):
        """After each iteration."""
        rewards = runner.policy_avg_stats.get("reward")
        if rewards and len(rewards[0]):
            self._meter.returns.clear()
            self._meter.returns.extend(float(np.mean(each)) for each in rewards[0])
        if self._meter.over(training_iteration_since_resume * ENVS * STEPS):
            runner.cfg.train_for_env_steps = -1


def settings(folder: str) -> list[str]:
    """Sample Factory's, as its command line takes them."""
    named = {
        "env": "pool", "experiment": "peers", "train_dir": folder, "device": "cpu", "seed": GIVEN.seed,
        "serial_mode": False, "async_rl": True, "batched_sampling": True, "num_workers": 1,
        "num_envs_per_worker": 1, "worker_num_splits": 1, "rollout": STEPS, "batch_size": MINIBATCH,
        "num_batches_per_epoch": MINIBATCHES, "num_epochs": EPOCHS, "shuffle_minibatches": True, "recurrence": 1,
        "use_rnn": False, "nonlinearity": "elu", "actor_critic_share_weights": False, "adaptive_stddev": False,
        "normalize_input": False, "normalize_returns": False, "value_bootstrap": True, "gamma": 0.99,
        "gae_lambda": 0.95, "learning_rate": 3e-4, "lr_schedule": "constant", "ppo_clip_ratio": 0.2,
        "ppo_clip_value": 1e9, "max_grad_norm": 0.5, "value_loss_coeff": 0.5, "exploration_loss_coeff": 0.0,
        "kl_loss_coeff": 0.0, "with_vtrace": False, "save_every_sec": 10**6, "save_best_every_sec": 10**6,
        "reward_clip": 1e9,
    }  # fmt: skip
    layers = {"encoder_mlp_layers": HIDDEN}
    if GIVEN.task == PIXELS:
        named |= {"encoder_conv_architecture": "convnet_atari", "obs_scale": 255.0}
        layers = {"encoder_conv_mlp_layers": (FEATURES,), "decoder_mlp_layers": IMAGE_HIDDEN}
    return [
        *(f"--{name}={value}" for name, value in named.items()),
        *(word for name, sizes in layers.items() for word in (f"--{name}", *map(str, sizes))),
    ]


def main() -> None:
    """Command line."""
    meter = Meter("sf-async", GIVEN)
    register_env("pool", make_env)
    with tempfile.TemporaryDirectory() as folder:
        parser, _ = parse_sf_args(settings(folder))
        _, runner = make_runner(parse_full_cfg(parser, settings(folder)))
        runner.register_observer(Clock(meter))
        runner.init()
        runner.run()
    meter.report(
        version("sample-factory"),
        "the ratio's clip is [1 / 1.2, 1.2]; minibatches of whole rollouts, shuffled",
    )


if __name__ == "__main__":
    main()
