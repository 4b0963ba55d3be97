"""RLlib's PPOConfig with a ``gmi`` section; ends in a frozen RunSpec. Only the driver imports this module."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.algorithms.ppo.ppo import PPOConfig as RllibPPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.utils import force_list

from rayagi.config.batch_sizes import GivenSizes, rollout_and_minibatches
from rayagi.config.convert import merged, nearest, run_spec_from_dict, run_spec_to_dict
from rayagi.config.errors import NO_VALUE, ConfigError
from rayagi.config.presets import preset
from rayagi.config.rllib_settings import (
    BATCH_SETTINGS,
    PRESET,
    SPEC_PATHS,
    UNSET_BY_RAYAGI,
    model_changes,
    no_environment,
    refuse_algorithm_only,
    refuse_unhonoured,
    user_name,
)
from rayagi.config.rules import checked
from rayagi.config.spec import RunSpec

_DRIVER_CALLBACKS = frozenset(
    {"on_algorithm_init", "on_checkpoint_loaded", "on_evaluate_start", "on_evaluate_end", "on_train_result"}
)


class PPOConfig(RllibPPOConfig):
    """PPO on GMIs, in RLlib's words.

    Whatever is not set comes from the task's preset. A setting of RLlib that rayagi does not honour raises
    ConfigError, which names what to use instead, when the algorithm is built::

        config = PPOConfig().environment("Ant-v5").gmi(num_gmis=2, num_envs=32).training(lr=3e-4)
        algo = config.build_algo()
        result = algo.train()

    A run without a seed has seed 0, as ``rayagi train`` has: Tune's ``num_samples`` repeats the same run unless the
    seed differs too, as with ``debugging(seed=tune.randint(0, 2**31))``.
    """

    def __init__(self, algo_class: type | None = None) -> None:
        if algo_class is None:
            from rayagi.algorithm import PPO  # the algorithm's default config is this class

            algo_class = PPO
        super().__init__(algo_class=algo_class)
        self._is_online, self.num_env_runners = False, 0  # RLlib must never build environment runners
        for name in UNSET_BY_RAYAGI:
            setattr(self, name, PRESET)

    def gmi(
        self,
        *,
        backend: str = NotProvided,
        template: str = NotProvided,
        num_gmis: int | str | None = NotProvided,
        gmis_per_gpu: int | str | None = NotProvided,
        num_envs: int | str = NotProvided,
        threads_per_gmi: int | None = NotProvided,
        slices: Sequence[float] | None = NotProvided,
        transport: str = NotProvided,
        composition: str = NotProvided,
        reserve_timeout_s: float = NotProvided,
        collective_timeout_s: float = NotProvided,
    ) -> Self:
        """How the machine is cut; fields of rayagi.config.spec.GmiSpec.

        Args:
            backend: "cpu" (sets of cores), "direct" (processes share whole GPUs), "mps", "mig", "green" or "auto"
            template: which roles share a GMI
            num_gmis: GMIs in all; "auto": as a search on the machine finds best
            gmis_per_gpu: GMIs on each GPU, or "auto"
            num_envs: environments of one GMI, or "auto"
            threads_per_gmi: cores and threads of one GMI
            slices: unequal GMIs: the cores of each, or its share of a GPU
            transport: what gradients travel by: "shm", "gloo" or "auto"
            composition: how GMIs reduce, e.g. "ip_only" or "hybrid:1", or "auto"
            reserve_timeout_s: how long to wait for Ray to grant the placement group, seconds
            collective_timeout_s: how long a collective operation waits for the other GMIs, seconds
        """
        return self._set(
            gmi_backend=backend,
            gmi_template=template,
            num_gmis=num_gmis,
            gmis_per_gpu=gmis_per_gpu,
            num_envs=num_envs,
            threads_per_gmi=threads_per_gmi,
            slices=slices,
            transport=transport,
            composition=composition,
            reserve_timeout_s=reserve_timeout_s,
            collective_timeout_s=collective_timeout_s,
        )

    def environment(
        self, env: str | None = NotProvided, *, engine: str = NotProvided, **rllib_settings: Any
    ) -> Self:
        """The task: ``env`` is an id that `rayagi envs` lists or that gymnasium knows.

        Args:
            env: environment id
            engine: "mujoco_cpu", "gymnasium" or "auto"
            rllib_settings: RLlib's own; ``env_config`` holds keyword arguments for the environment
        """
        super().environment(env, **rllib_settings)
        return self._set(env_engine=engine)

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
        own = {name for name in inspect.signature(PPOConfig.training).parameters if name != "rllib_settings"}
        known = own | _parameters(RllibPPOConfig.training) | _parameters(AlgorithmConfig.training)
        for name, value in rllib_settings.items():
            if name not in known:
                raise ConfigError(
                    f"training({name}=)", value, "no such setting", nearest(name, sorted(known - {"self"}))
                )
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

    def _set(self, **settings: Any) -> Self:
        for name, value in settings.items():
            if value is not NotProvided:
                setattr(self, name, value)  # refuses once frozen, as every RLlib setting does
        return self

    def validate(self) -> None:
        """Check everything, as building the algorithm does."""
        self.to_run_spec()

    def to_run_spec(self) -> RunSpec:
        """The frozen, checked run that this config describes.

        Raises:
            ConfigError: a setting that rayagi does not honour, does not know, or cannot use.
        """
        refuse_unhonoured(self.to_dict(), _pristine())
        self._check_callbacks()
        if self.env is None:
            raise no_environment()
        if not isinstance(self.env, str):
            suggestion = "give it to gymnasium.register and use its id"
            raise ConfigError("environment(env=)", self.env, "must be an environment's id", suggestion)
        base = preset(self.env)
        try:
            # Twice: sizes can only be worked out from settings that have the right types.
            spec = run_spec_from_dict(merged(run_spec_to_dict(base), self._changes()))
            if self.kl_target is not PRESET and spec.ppo.lr_schedule != "kl_adaptive":
                reason = f"has no effect with lr_schedule={spec.ppo.lr_schedule!r}"
                raise ConfigError("ppo.target_kl", self.kl_target, reason, 'use lr_schedule="kl_adaptive"')
            length, minibatches = self._sizes(spec, base)
            sized = dataclasses.replace(spec.ppo, rollout_length=length, num_minibatches=minibatches)
            return checked(dataclasses.replace(spec, ppo=sized))
        except ConfigError as error:
            raise error.at(user_name(error.path)) from None

    def refuse_algorithm_settings(self) -> None:
        """For who takes the RunSpec alone: refuse what it cannot carry.

        Raises:
            ConfigError: a setting, such as callbacks, that only the algorithm of ``build_algo()`` honours.
        """
        refuse_algorithm_only(self.to_dict(), _pristine())

    def _given(self, name: str) -> Any:
        value = getattr(self, name)
        return None if value is PRESET else value

    def _changes(self) -> dict[str, Any]:
        """What the user set, as a nested dictionary of RunSpec's keys."""
        changes: dict[str, Any] = {}
        for name, (path, _) in SPEC_PATHS.items():
            value = getattr(self, name)
            if value is PRESET or (name == "seed" and value is None):
                continue
            _put(changes, path, _in_our_words(name, value))
        for path, value in model_changes(_given_model_config(self._model_config)).items():
            _put(changes, path, value)
        return changes

    def _sizes(self, spec: RunSpec, base: RunSpec) -> tuple[int, int]:
        for name in ("train_batch_size", "_train_batch_size_per_learner", "minibatch_size"):
            value = getattr(self, name)
            if value is not PRESET and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f"training({name.lstrip('_')}=)", value, "must be a whole number")
        given = GivenSizes(
            rollout_length=None if self.rollout_length is PRESET else spec.ppo.rollout_length,
            num_minibatches=None if self.num_minibatches is PRESET else spec.ppo.num_minibatches,
            train_batch_size=self._given("train_batch_size"),
            train_batch_size_per_learner=self._given("_train_batch_size_per_learner"),
            minibatch_size=self._given("minibatch_size"),
        )
        num_envs, num_gmis = spec.gmi.num_envs, spec.gmi.num_gmis
        if num_envs == "auto" or num_gmis == "auto":
            for name in BATCH_SETTINGS:
                if self._given(name) is not None:
                    reason = "needs the numbers of GMIs and environments, and a search is to decide them"
                    raise ConfigError(
                        user_name(name), self._given(name), reason, "give rollout_length instead"
                    )
            num_envs, num_gmis = 1, None
        if num_envs < 1 or (num_gmis or 1) < 1 or spec.ppo.rollout_length < 1:
            return spec.ppo.rollout_length, spec.ppo.num_minibatches  # the rules say what is wrong
        return rollout_and_minibatches(
            given,
            num_envs=num_envs,
            num_gmis=num_gmis,
            preset_length=base.ppo.rollout_length,
            preset_minibatches=base.ppo.num_minibatches,
        )

    def _check_callbacks(self) -> None:
        for cls in force_list(self.callbacks_class):
            for name in dir(RLlibCallback):
                overridden = name.startswith("on_") and getattr(cls, name, None) is not getattr(
                    RLlibCallback, name
                )
                if overridden and name not in _DRIVER_CALLBACKS:
                    raise ConfigError(
                        f"callbacks({cls.__name__}.{name})",
                        NO_VALUE,
                        "would never be called: the loop runs inside the GMIs",
                        f"use one of {', '.join(sorted(_DRIVER_CALLBACKS))}",
                    )


def _parameters(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD}


def _in_our_words(name: str, value: Any) -> Any:
    """A value of RLlib's that means the same in a RunSpec but is written otherwise there."""
    if name == "grad_clip" and value is None:
        return 0.0
    if name == "evaluation_interval" and value is None:
        return 0
    if name == "vf_clip_param" and isinstance(value, float) and math.isinf(value):
        return None
    return value


def _given_model_config(model_config: Mapping[str, Any] | DefaultModelConfig) -> dict[str, Any]:
    """What a user set. Of a DefaultModelConfig: sizes, activation, and what differs from its defaults."""
    if isinstance(model_config, Mapping):
        return dict(model_config)
    defaults = dataclasses.asdict(DefaultModelConfig())
    always = ("fcnet_hiddens", "fcnet_activation")
    given = dataclasses.asdict(model_config)
    return {key: value for key, value in given.items() if key in always or value != defaults[key]}


def _put(data: dict[str, Any], path: str, value: Any) -> None:
    *sections, leaf = path.split(".")
    for section in sections:
        data = data.setdefault(section, {})
    data[leaf] = value


def _pristine() -> dict[str, Any]:
    return PPOConfig(algo_class=object).to_dict()
