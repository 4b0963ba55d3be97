"""RLlib's PPO on Gymnasium's vectorised environments, in rayagi's own environment, which has RLlib.

As many remote env runners as threads, each with its share of the 64 environments, and the learner in this process.
"""

from __future__ import annotations

import math

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from experiments.peers import DISCRETE, PIXELS
from experiments.peers.common import BATCH, ENVS, EPOCHS, HIDDEN, MINIBATCH, STEPS, Meter, flags


def main() -> None:
    """Command line."""
    given = flags("RLlib")
    if given.task == PIXELS:
        raise SystemExit(
            f"{PIXELS}: RLlib's env runners ended after a minute when each of its environments was an EnvPool"
        )
    meter = Meter("rllib", given)
    ray.init(address="local", num_cpus=given.threads + 1, include_dashboard=False, log_to_driver=False)
    config = (
        PPOConfig()
        .environment(given.task)
        .env_runners(
            num_env_runners=given.threads,
            num_envs_per_env_runner=ENVS // given.threads,
            rollout_fragment_length=STEPS,
            num_cpus_per_env_runner=1,
        )
        .learners(num_learners=0)
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=list(HIDDEN),
                fcnet_activation="elu",
                vf_share_layers=False,
                free_log_std=given.task not in DISCRETE,
            )
        )
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
        sampled = algo.train()["env_runners"]
        mean = sampled.get("episode_return_mean", math.nan)
        if not math.isnan(mean):
            meter.returns.clear()
            meter.returns.append(mean)
        over = meter.over(int(sampled["num_env_steps_sampled_lifetime"]))
    meter.report(
        ray.__version__, f"{given.threads} remote env runners; Gymnasium's environments, not EnvPool's"
    )
    algo.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
