"""ImpalaConfig and A3CConfig: asynchronous training on GMIs, in RLlib's words. Only the driver imports this module."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from ray.rllib.algorithms.algorithm_config import NotProvided
from ray.rllib.algorithms.impala.impala import IMPALAConfig as RllibIMPALAConfig

from rayagi.config.rllib_config import GmiConfig
from rayagi.config.spec import Algorithm


class ImpalaConfig(GmiConfig, RllibIMPALAConfig):
    """IMPALA on GMIs, in RLlib's words; on the ``decoupled`` template, whose learners and collectors keep their own pace.

    As with ``rayagi.PPOConfig``, the task's preset decides what is not set, and what is not honoured is refused::

        config = ImpalaConfig().environment("Ant-v5").gmi(num_gmis=3, num_learners=1).training(max_lag=2)
        algo = config.build_algo()
        result = algo.train()
    """

    algorithm: ClassVar[Algorithm] = "impala"

    def training(
        self,
        *,
        rollouts_per_update: int | None = NotProvided,
        max_lag: int = NotProvided,
        on_stale: str = NotProvided,
        c_bar: float = NotProvided,
        lambda_: float = NotProvided,
        clip_param: float | None = NotProvided,
        kl_target: float = NotProvided,
        **settings: Any,
    ) -> Self:
        """What IMPALA has beside the settings of every algorithm; rayagi's own are fields of rayagi.config.spec.ImpalaSpec.

        Of RLlib's, ``lr, gamma, vtrace_clip_rho_threshold, vf_loss_coeff, entropy_coeff, grad_clip, num_epochs`` are
        honoured. ``clip_param``, ``lambda_`` and ``kl_target`` mean what they mean in PPO; ``clip_param=None`` is the
        paper's plain gradient. An update takes ``rollouts_per_update`` rollouts of ``num_envs * rollout_length`` steps.

        Raises:
            ConfigError: neither RLlib nor rayagi has a setting of that name.
        """
        super().training(**settings)
        return self._set(
            rollouts_per_update=rollouts_per_update,
            max_lag=max_lag,
            on_stale=on_stale,
            c_bar=c_bar,
            lambda_=lambda_,
            clip_param=clip_param,
            kl_target=kl_target,
        )


class A3CConfig(ImpalaConfig):
    """A3C on GMIs: as ImpalaConfig, without V-trace and its bounds. RLlib itself no longer has it."""

    algorithm: ClassVar[Algorithm] = "a3c"
