"""RLlib's AlgorithmConfig with a ``gmi`` section, converted to a frozen RunSpec. Only the driver imports this module."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar, Self

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig, NotProvided
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.utils import force_list
from ray.rllib.utils.serialization import NOT_SERIALIZABLE, serialize_type

from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.convert import merged, nearest, run_spec_from_dict, run_spec_to_dict
from rayagi.config.errors import NO_VALUE, ConfigError
from rayagi.config.learning import LearningSpec
from rayagi.config.presets import preset
from rayagi.config.rllib_settings import (
    BATCH_SETTINGS,
    DERIVED,
    DRIVER_CALLBACKS,
    PRESET,
    AlgorithmSettings,
    model_changes,
    num_trainers,
    refuse_algorithm_only,
)
from rayagi.config.rllib_values import (
    GivenSizes,
    given_model_config,
    is_schedule,
    module_changes,
    normalises,
    registered_env,
    rollout_and_minibatches,
    to_spec_value,
)
from rayagi.config.rules import checked
from rayagi.config.spec import RunSpec

_LENGTHS = ("rollout_length", "num_minibatches")
"""What batch sizes are converted to, and may also be given."""


class GmiConfig(AlgorithmConfig):
    """Base of the config classes; each is also a subclass of RLlib's own.

    Unset settings come from the task's preset, and reading one gives the value that it takes. An RLlib setting that
    rayagi does not support raises ConfigError when the algorithm is built; the message names the alternative.
    """

    algorithm: ClassVar[str]
    """Its name in rayagi.algorithms.registry."""

    def __init__(self, algo_class: type | None = None) -> None:
        if algo_class is None:
            from rayagi.algorithm import ALGORITHMS  # an algorithm's default config is of this class

            algo_class = ALGORITHMS[self.algorithm]
        super().__init__(algo_class=algo_class)
        self._is_online, self.num_env_runners = False, 0  # RLlib must never build environment runners
        # One iteration of the GMIs is one RLlib iteration, for every algorithm.
        self.min_time_s_per_iteration = None
        self.min_sample_timesteps_per_iteration = self.min_train_timesteps_per_iteration = 0
        for name in self._settings().unset:
            setattr(self, name, PRESET)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return self._settings().default(name, self._in_effect()) if value is PRESET else value

    def to_dict(self) -> dict[str, Any]:
        """The settings that rayagi has, and others that were changed. JSON, but for classes and functions of the user.

        Left out if unset: settings that follow from others (DERIVED), and all of them without a task.
        """
        given, pristine, settings = self._raw(), self._pristine(), self._settings()
        has_task, spec = isinstance(self.env, str | type | FunctionType), self._in_effect()
        shown: dict[str, Any] = {}
        for key, value in given.items():
            name = settings.attribute(key)
            if value is PRESET:
                if has_task and name not in DERIVED:
                    shown[key] = settings.default(name, spec)
            elif name in settings.paths or not settings.is_default(key, value, pristine):
                shown[key] = value
        if "_model_config" in shown:
            shown["_model_config"] = given_model_config(self._model_config)
        return shown

    def serialize(self) -> dict[str, Any]:
        """``to_dict()`` in JSON's types: classes by their paths, and functions of the user as RLlib marks them."""
        return {name: _json_value(value) for name, value in self.to_dict().items()}

    def _in_effect(self) -> RunSpec:
        """The run as configured so far; if it is not complete or not valid, the preset of its task."""
        try:
            return self.to_run_spec()
        except ConfigError:
            return preset(self.env if isinstance(self.env, str) else "", self.algorithm)

    def _given(self, name: str) -> Any:
        """A setting's value; PRESET if it is unset."""
        return vars(self).get(name, PRESET)

    def _raw(self) -> dict[str, Any]:
        """RLlib's dictionary of this config; unset settings are PRESET."""
        return dict(AlgorithmConfig.to_dict(SimpleNamespace(**vars(self))))

    @classmethod
    def _settings(cls) -> AlgorithmSettings:
        return AlgorithmSettings(definition=DEFINITIONS[cls.algorithm])

    def gmi(
        self,
        *,
        backend: str = NotProvided,
        template: str = NotProvided,
        num_gmis: int | str | None = NotProvided,
        num_learners: int | None = NotProvided,
        gmis_per_gpu: int | str | None = NotProvided,
        num_envs: int | str = NotProvided,
        threads_per_gmi: int | None = NotProvided,
        slices: Sequence[float] | str | None = NotProvided,
        left_out: Sequence[int] = NotProvided,
        transport: str = NotProvided,
        composition: str = NotProvided,
        reserve_timeout_s: float = NotProvided,
        collective_timeout_s: float = NotProvided,
        hang_timeout_s: float = NotProvided,
    ) -> Self:
        """How the machine is partitioned; fields of rayagi.config.spec.GmiSpec.

        Args:
            backend: how devices are shared: a name that `rayagi info` lists, or "auto"
            template: which roles share a GMI, or "auto"
            num_gmis: total number of GMIs; "auto": chosen by a search on this machine
            num_learners: GMIs that train, in templates with separate trainers
            gmis_per_gpu: GMIs on each GPU, or "auto"
            num_envs: environments of one GMI, or "auto"
            threads_per_gmi: cores and threads of one GMI
            slices: unequal GMIs: the cores of each, or its share of a GPU; or "auto"
            left_out: GMIs of this plan that are not started, by index
            transport: of gradients: "shm", "tcp", "gloo" or "auto"
            composition: how GMIs reduce, e.g. "ip_only" or "hybrid:1", or "auto"
            reserve_timeout_s: how long to wait for Ray to grant the placement group, seconds
            collective_timeout_s: how long a collective operation waits for the other GMIs, and the driver for a process
                that answers no pings, seconds
            hang_timeout_s: how long iterations may take beyond five times the slowest one so far, seconds
        """
        return self._set(
            gmi_backend=backend,
            gmi_template=template,
            num_gmis=num_gmis,
            gmi_num_learners=num_learners,
            gmis_per_gpu=gmis_per_gpu,
            num_envs=num_envs,
            threads_per_gmi=threads_per_gmi,
            slices=slices,
            left_out=left_out,
            transport=transport,
            composition=composition,
            reserve_timeout_s=reserve_timeout_s,
            collective_timeout_s=collective_timeout_s,
            hang_timeout_s=hang_timeout_s,
        )

    def environment(
        self,
        env: str | None = NotProvided,
        *,
        engine: str = NotProvided,
        max_unstable_share: float = NotProvided,
        **rllib_settings: Any,
    ) -> Self:
        """The task.

        Args:
            env: an id that `rayagi envs` lists or that Gymnasium knows, a name of ``tune.register_env``, or a
                gymnasium.Env class or function, which is called with ``env_config``
            engine: simulation engine, as listed by `rayagi envs`, or "auto"
            max_unstable_share: largest share of environment steps that may become unstable; more end the run
            rllib_settings: other RLlib settings; ``env_config`` holds keyword arguments of an environment by id
        """
        super().environment(env, **rllib_settings)
        return self._set(env_engine=engine, max_unstable_share=max_unstable_share)

    def offline_data(
        self,
        *,
        input_: str = NotProvided,
        obs_keys: Sequence[str] = NotProvided,
        **rllib_settings: Any,
    ) -> Self:
        """The dataset of an offline algorithm.

        Args:
            input_: its path, or the name of a dataset in Minari's folder; trials of Tune find it from other folders too
            obs_keys: parts of the dataset's observations that make up the environment's, joined in this order
            rllib_settings: other RLlib settings
        """
        # Imported here: only offline algorithms need readers of datasets.
        from rayagi.replay.loading import located

        if isinstance(input_, str | Path):
            input_ = str(located(input_))
        super().offline_data(input_=input_, **rllib_settings)
        return self._set(obs_keys=obs_keys)

    def training(
        self,
        *,
        rollout_length: int = NotProvided,
        num_minibatches: int = NotProvided,
        sequence_length: int | None = NotProvided,
        lr_schedule: str = NotProvided,
        adam_eps: float = NotProvided,
        normalize_advantages: bool = NotProvided,
        normalize_obs: bool = NotProvided,
        normalize_rewards: bool = NotProvided,
        obs_clip: float = NotProvided,
        total_env_steps: int | None = NotProvided,
        **settings: Any,
    ) -> Self:
        """Settings of the algorithm, by RLlib's names or by the fields of rayagi's settings.

        Names that RLlib's config lacks, such as ``max_lag``, are rayagi's.

        ``lr_schedule`` is "constant", "linear" (to zero at ``total_env_steps``) or "kl_adaptive" (holds ``kl_target``).

        Raises:
            ConfigError: neither RLlib nor rayagi has a setting of that name.
        """
        self._refuse_unknown(settings)
        if (
            "model" in settings
        ):  # RLlib merges it into its default, after which one that equals it has no trace
            self._settings().refuse("model", settings["model"])
        own = self._own_settings()
        super().training(**{name: value for name, value in settings.items() if name not in own})
        return self._set(
            **{name: value for name, value in settings.items() if name in own},
            rollout_length=rollout_length,
            num_minibatches=num_minibatches,
            sequence_length=sequence_length,
            lr_schedule=lr_schedule,
            adam_eps=adam_eps,
            normalize_advantages=normalize_advantages,
            normalize_obs=normalize_obs,
            normalize_rewards=normalize_rewards,
            obs_clip=obs_clip,
            total_env_steps=total_env_steps,
        )

    def _refuse_unknown(self, settings: Mapping[str, Any]) -> None:
        """Raise for the first argument of ``training()`` that neither RLlib nor rayagi has.

        Raises:
            ConfigError: the argument, and similar names.
        """
        known = self._own_settings() | _training_parameters(type(self))
        for name, value in settings.items():
            if name not in known:
                raise ConfigError(
                    f"training({name}=)",
                    value,
                    "no such setting",
                    nearest(name, sorted(each for each in known if not each.startswith("_"))),
                )

    def _own_settings(self) -> set[str]:
        """Settings of the algorithm that RLlib's ``training()`` does not know."""
        return set(self._settings().definition.training_names) - _training_parameters(type(self))

    def _set(self, **settings: Any) -> Self:
        for name, value in settings.items():
            if value is not NotProvided:
                setattr(self, name, value)  # raises once frozen, as for every RLlib setting
        return self

    def validate(self) -> None:
        """Validate all settings, as ``build_algo()`` does."""
        self.to_run_spec()
        if self.log_level not in logging.getLevelNamesMapping():
            names = ", ".join(logging.getLevelNamesMapping())
            raise ConfigError(
                "debugging(log_level=)",
                self.log_level,
                "is no level of Python's logging",
                f"use one of {names}",
            )
        window = self.metrics_num_episodes_for_smoothing
        if not isinstance(window, int) or window < 1:
            raise ConfigError(
                "reporting(metrics_num_episodes_for_smoothing=)",
                window,
                "must be a whole number of 1 or more",
            )

    def to_run_spec(self) -> RunSpec:
        """Convert to a frozen, validated RunSpec.

        Raises:
            ConfigError: a setting is unsupported, unknown, or invalid.
        """
        given = self._raw()
        module = module_changes(given.pop("_rl_module_spec", None))
        self._settings().refuse_unhonoured(given, self._pristine())
        self._check_callbacks()
        if self.env is None:
            example = 'for example .environment("Ant-v5")'
            raise ConfigError("environment(env=)", NO_VALUE, "is not given", example)
        env_id = registered_env(self.env)
        base = preset(env_id, self.algorithm)
        try:
            # Twice: batch sizes can only be computed from settings with valid types.
            spec = run_spec_from_dict(merged(run_spec_to_dict(base), merged(self._changes(env_id), module)))
            spec = dataclasses.replace(spec, learning=self._converted(spec))
            section, learning = spec.algorithm, spec.learning
            kl_target = self._given("kl_target")
            if kl_target is not PRESET and learning.lr_schedule != "kl_adaptive":
                reason = f"has no effect with lr_schedule={learning.lr_schedule!r}"
                raise ConfigError(f"{section}.target_kl", kl_target, reason, 'use lr_schedule="kl_adaptive"')
            length, minibatches = self._sizes(spec, base)
            sized = dataclasses.replace(learning, rollout_length=length, num_minibatches=minibatches)
            return checked(dataclasses.replace(spec, learning=sized))
        except ConfigError as error:
            raise error.at(self._settings().user_name(error.path)) from None

    def refuse_algorithm_settings(self) -> None:
        """Reject settings that a RunSpec cannot hold, for commands that use the RunSpec alone.

        Raises:
            ConfigError: a setting, such as callbacks, that works only with ``build_algo()``.
        """
        refuse_algorithm_only(self._raw(), self._pristine())

    def _changes(self, env_id: str) -> dict[str, Any]:
        """The user's settings as a nested dictionary with RunSpec's keys."""
        changes: dict[str, Any] = {}
        paths, training_names = self._settings().paths, self._settings().definition.training_names
        for name, (path, _) in paths.items():
            value = self._given(name)
            if value is PRESET or (name == "seed" and value is None):
                continue
            if name in training_names and name != "lr_schedule" and is_schedule(value):
                for own, found in self._of_schedule(name, value).items():
                    _put(changes, paths[own][0], found)
            else:
                _put(changes, path, to_spec_value(name, value))
        _put(changes, "env.id", env_id)
        if env_id != self.env and self.env_config:
            _put(changes, "env.kwargs", {"env_config": self.env_config})
        observation_filter = self._given("observation_filter")
        if observation_filter is not PRESET:
            section = self._settings().definition.name
            normalize_obs = changes.get(section, {}).get("normalize_obs")
            _put(changes, f"{section}.normalize_obs", normalises(observation_filter, normalize_obs))
        for path, value in model_changes(given_model_config(self._model_config)).items():
            _put(changes, path, value)
        self._refuse_own_length()
        return changes

    def _of_schedule(self, name: str, schedule: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Settings that stand for RLlib's schedule of one: of the learning rate, a line to 0.

        Raises:
            ConfigError: another schedule, or one that contradicts what was given.
        """
        where, (begin, first), rest = f"training({name}=)", schedule[0], schedule[1:]
        if name != "lr" or "lr_schedule" not in self._settings().definition.training_names:
            instead = f"use one number, such as training({name}={first!r})"
            raise ConfigError(where, schedule, "has no schedule in rayagi", instead)
        if begin != 0 or len(rest) != 1 or rest[0][1] != 0:
            reason = "is not a line to 0, the only schedule by steps that rayagi has"
            instead = f"use [[0, {first!r}], [STEPS, 0]], or one number, such as training(lr={first!r})"
            raise ConfigError(where, schedule, reason, instead)
        end = rest[0][0]
        steps = int(end) if isinstance(end, float) and end.is_integer() else end  # such as 1e6
        for own, found in (("lr_schedule", "linear"), ("total_env_steps", steps)):
            if self._given(own) not in (PRESET, None, found):
                reason = f"contradicts training({own}={self._given(own)!r})"
                raise ConfigError(where, schedule, reason, "give one of them")
        return {"lr": first, "lr_schedule": "linear", "total_env_steps": steps}

    def _refuse_own_length(self) -> None:
        """A DefaultModelConfig always has a length of sequences, 20 unless it is set."""
        model = self._model_config
        if (
            isinstance(model, DefaultModelConfig)
            and model.use_lstm
            and self._given("sequence_length") is PRESET
        ):
            reason = "is not what rayagi trains a recurrent network over: whole rollouts, unless it is told otherwise"
            where, instead = "rl_module(model_config=DefaultModelConfig(max_seq_len=))", "say which with"
            raise ConfigError(
                where, model.max_seq_len, reason, f"{instead} training(sequence_length=), or use a dictionary"
            )

    def _converted(self, spec: RunSpec) -> LearningSpec:
        """The settings with those that RLlib has in another form."""
        learning = spec.learning
        for name, conversion in self._settings().definition.rllib.converted.items():
            value = self._given(name)
            if value is PRESET:
                continue
            for field, found in conversion.to_fields(value, num_trainers(spec.gmi)).items():
                own = next(
                    key for key, leaf in self._settings().definition.training_names.items() if leaf == field
                )
                if self._given(own) not in (PRESET, found):
                    reason = f"contradicts training({own}={self._given(own)})"
                    raise ConfigError(self._settings().user_name(name), value, reason, "give one of them")
                learning = dataclasses.replace(learning, **{field: found})
        return learning

    def _sizes(self, spec: RunSpec, base: RunSpec) -> tuple[int, int]:
        settings, learning = self._settings(), spec.learning
        names = BATCH_SETTINGS if settings.definition.rllib.takes_batch_sizes else ()
        given = {name: self._given(name) for name in names}
        sizes = {name: value for name, value in given.items() if value is not PRESET and value is not None}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"training({name.lstrip('_')}=)", value, "must be a whole number")
        num_envs, num_gmis = spec.gmi.num_envs, spec.gmi.num_gmis
        if num_envs == "auto" or num_gmis == "auto":
            for name, value in sizes.items():
                reason = "needs the numbers of GMIs and environments, which a search will choose"
                raise ConfigError(settings.user_name(name), value, reason, "give rollout_length instead")
            num_envs, num_gmis = 1, None
        if num_gmis is not None:
            num_gmis -= len(spec.gmi.left_out)
        if num_envs < 1 or (1 if num_gmis is None else num_gmis) < 1 or learning.rollout_length < 1:
            return learning.rollout_length, learning.num_minibatches  # the rules report the error
        return rollout_and_minibatches(
            GivenSizes(
                **{name: getattr(learning, name) for name in _LENGTHS if self._given(name) is not PRESET},
                **{name.lstrip("_"): value for name, value in sizes.items()},
            ),
            num_envs=num_envs,
            num_gmis=num_gmis,
            preset_length=base.learning.rollout_length,
            preset_minibatches=base.learning.num_minibatches,
        )

    @classmethod
    @cache
    def _pristine(cls) -> dict[str, Any]:
        return cls(algo_class=object)._raw()

    def _check_callbacks(self) -> None:
        for cls in force_list(self.callbacks_class):
            for name in dir(RLlibCallback):
                overridden = name.startswith("on_") and getattr(cls, name, None) is not getattr(
                    RLlibCallback, name
                )
                if overridden and name not in DRIVER_CALLBACKS:
                    raise ConfigError(
                        f"callbacks({cls.__name__}.{name})",
                        NO_VALUE,
                        "would never be called: the loop runs inside the GMIs",
                        f"use one of {', '.join(sorted(DRIVER_CALLBACKS))}",
                    )


def _json_value(value: Any) -> Any:
    if isinstance(value, type):
        return serialize_type(value)
    if dataclasses.is_dataclass(value):
        return _json_value({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, Mapping):
        return {name: _json_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [_json_value(each) for each in value]
    return NOT_SERIALIZABLE if callable(value) else value


def _training_parameters(cls: type) -> set[str]:
    """Parameter names of ``training()`` in the class and its bases."""
    methods = [vars(base)["training"] for base in cls.__mro__ if "training" in vars(base)]
    return {
        parameter.name
        for method in methods
        for parameter in inspect.signature(method).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _put(data: dict[str, Any], path: str, value: Any) -> None:
    *sections, leaf = path.split(".")
    for section in sections:
        data = data.setdefault(section, {})
    data[leaf] = value
