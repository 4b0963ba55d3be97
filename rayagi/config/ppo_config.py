"""PPOConfig: PPO on GMIs, in RLlib's words. Only the driver imports this module."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from ray.rllib.algorithms.algorithm_config import NotProvided
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

    A run without a seed has seed 0, as ``rayagi train`` has: Tune's ``num_samples`` repeats the same run unless the
    seed differs too, as with ``debugging(seed=tune.randint(0, 2**31))``.
    """

    algorithm: ClassVar[Algorithm] = "ppo"

    def training(
        self,
        *,
        rollout_length: int = NotProvided,
        num_minibatches: int = NotProvided,
        lr_schedule: str = NotProvided,
        adam_eps: float = NotProvided,
        normalize_advantages: bool = NotProvided,
        normalize_obs: bool = NotProvided,
        normalize_rewards: bool = NotProvided,
        obs_clip: float = NotProvided,
        total_env_steps: int | None = NotProvided,
        **rllib_settings: Any,
    ) -> Self:
        """PPO's settings: RLlib's names, and rayagi's own, which are fields of rayagi.config.spec.PPOSpec.

        Of RLlib's, ``lr, gamma, lambda_, clip_param, vf_clip_param, vf_loss_coeff, entropy_coeff, grad_clip,
        num_epochs, kl_target, minibatch_size, train_batch_size, train_batch_size_per_learner`` are honoured.
        Batch sizes become a rollout length and a number of minibatches, and must be ones that ``num_envs``
        environments can make. ``lr_schedule`` is "constant", "linear" (to zero at ``total_env_steps``) or
        "kl_adaptive" (holds ``kl_target``).

        Raises:
            ConfigError: neither RLlib nor rayagi has a setting of that name.
        """
        self._refuse_unknown(rllib_settings)
        super().training(**rllib_settings)
        return self._set(
            rollout_length=rollout_length,
            num_minibatches=num_minibatches,
            lr_schedule=lr_schedule,
            adam_eps=adam_eps,
            normalize_advantages=normalize_advantages,
            normalize_obs=normalize_obs,
            normalize_rewards=normalize_rewards,
            obs_clip=obs_clip,
            total_env_steps=total_env_steps,
        )
