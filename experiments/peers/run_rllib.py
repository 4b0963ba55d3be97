"""RLlib's PPO on Gymnasium's vectorised environments, in rayagi's own environment, which has RLlib.

As many remote env runners as threads, each with its share of the 64 environments, and the learner in this process.
"""

from __future__ import annotations

import math

import gymnasium
import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env

from experiments.peers import DISCRETE, PIXELS
from experiments.peers.common import (
    BATCH,
    CONVOLUTIONS,
    ENVS,
    EPOCHS,
    FEATURES,
    HIDDEN,
    IMAGE_HIDDEN,
    MINIBATCH,
    STEPS,
    Meter,
    flags,
)


class Images(gymnasium.Env):
    """An EnvPool of one environment, with channels last as RLlib has them."""

    def __init__(self, seed: int) -> None:
        import envpool  # an extra of rayagi's

        self._env = envpool.make(PIXELS, env_type="gymnasium", num_envs=1, num_threads=1, seed=seed)
        self.observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(int(self._env.action_space.n))

    def reset(self, *, seed=None, options=None):
        """A new episode."""
        return self._env.reset()[0][0].transpose(1, 2, 0), {}

    def step(self, action):
        """One step."""
        obs, reward, terminated, truncated, _ = self._env.step(np.array([action], np.int32))
        is_end = bool(terminated[0])
        return obs[0].transpose(1, 2, 0), float(reward[0]), is_end, bool(truncated[0]) and not is_end, {}


def network(task: str) -> DefaultModelConfig:
    """In RLlib's words; for images the 512 units have ELU, too, and RLlib leaves bytes as they are."""
    common = {"vf_share_layers": False, "free_log_std": task not in DISCRETE}
    if task == PIXELS:
        return DefaultModelConfig(
            conv_filters=[list(each) for each in CONVOLUTIONS],
            conv_activation="relu",
            head_fcnet_hiddens=[FEATURES, *IMAGE_HIDDEN],
            head_fcnet_activation="elu",
            **common,
        )
    return DefaultModelConfig(fcnet_hiddens=list(HIDDEN), fcnet_activation="elu", **common)


def main() -> None:
    """Command line."""
    given = flags("RLlib")
    meter = Meter("rllib", given)
    ray.init(address="local", num_cpus=given.threads + 1, include_dashboard=False, log_to_driver=False)
    register_env("images", lambda context: Images(given.seed + 100 * context.worker_index))
    config = (
        PPOConfig()
        .environment("images" if given.task == PIXELS else given.task)
        .env_runners(
            num_env_runners=given.threads,
            num_envs_per_env_runner=ENVS // given.threads,
            rollout_fragment_length=STEPS,
            num_cpus_per_env_runner=1,
        )
        .learners(num_learners=0)
        .rl_module(model_config=network(given.task))
        .training(
            lr=3e-4,
            gamma=0.99,
            lambda_=0.95,
            clip_param=0.2,
            vf_clip_param=math.inf,
            use_kl_loss=False,
            vf_loss_coeff=0.5,
            entropy_coeff=0.0,
            grad_clip=0.5,
            grad_clip_by="global_norm",
            num_epochs=EPOCHS,
            minibatch_size=MINIBATCH,
            train_batch_size_per_learner=BATCH,
        )
        .debugging(seed=given.seed, log_level="ERROR")
    )
    algo = config.build_algo()
    over = False
    while not over:
        told = algo.train()["env_runners"]
        mean = told.get("episode_return_mean", math.nan)
        if not math.isnan(mean):
            meter.returns.clear()
            meter.returns.append(mean)
        over = meter.over(int(told["num_env_steps_sampled_lifetime"]))
    meter.report(
        ray.__version__, f"{given.threads} remote env runners; Gymnasium's environments, not EnvPool's"
    )
    algo.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
