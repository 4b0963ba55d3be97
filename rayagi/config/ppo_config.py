"""PPOConfig: PPO on GMIs, in RLlib's words. Only the driver imports this module."""

from __future__ import annotations

from typing import ClassVar

from ray.rllib.algorithms.ppo.ppo import PPOConfig as RllibPPOConfig

from rayagi.config.rllib_config import GmiConfig
from rayagi.config.spec import Algorithm


class PPOConfig(GmiConfig, RllibPPOConfig):
    """PPO on GMIs, in RLlib's words.

    Whatever is not set comes from the task's preset. A setting of RLlib that rayagi does not honour raises
    ConfigError, which names what to use instead, when the algorithm is built::

        config = PPOConfig().environment("Ant-v5").gmi(num_gmis=2, num_envs=32).training(lr=3e-4)
        algo = config.build_algo()
        result = algo.train()

    ``training()`` honours, of RLlib's settings, ``lr, gamma, lambda_, clip_param, vf_clip_param, vf_loss_coeff,
    entropy_coeff, grad_clip, num_epochs, kl_target, minibatch_size, train_batch_size, train_batch_size_per_learner``. Batch
    sizes become a rollout length and a number of minibatches, and must be ones that ``num_envs`` environments can make.

    A run without a seed has seed 0, as ``rayagi train`` has: Tune's ``num_samples`` repeats the same run unless the
    seed differs too, as with ``debugging(seed=tune.randint(0, 2**31))``.
    """

    algorithm: ClassVar[Algorithm] = "ppo"
