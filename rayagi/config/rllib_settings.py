"""RLlib settings that rayagi supports, their place in a RunSpec, and alternatives for the others.

Those of one algorithm are in its definition (rayagi.algorithms.definition.RllibFace).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from typing import Any, NoReturn

from rayagi.algorithms.definition import AlgorithmDefinition
from rayagi.config.convert import nearest
from rayagi.config.errors import ConfigError
from rayagi.config.off_policy import OffPolicySpec
from rayagi.config.offline import OfflineSpec
from rayagi.config.spec import GmiSpec, RunSpec


class Unset(Enum):
    """Marks a setting as unset inside a config, so that the task's preset applies instead of RLlib's default.

    Users see the preset's value instead (``AlgorithmSettings.default``). Checkpoints contain the mark.
    """

    PRESET = "preset"

    def __repr__(self) -> str:
        return "<preset>"


PRESET = Unset.PRESET

_GMI_SETTINGS = (
    "num_gmis", "gmis_per_gpu", "num_envs", "threads_per_gmi", "slices", "left_out", "transport", "composition",
    "reserve_timeout_s", "collective_timeout_s", "hang_timeout_s",
)  # fmt: skip
COMMON_PATHS: dict[str, tuple[str, str]] = {
    "env": ("env.id", "environment(env=)"),
    "env_engine": ("env.engine", "environment(engine=)"),
    "env_config": ("env.kwargs", "environment(env_config=)"),
    "max_unstable_share": ("env.max_unstable_share", "environment(max_unstable_share=)"),
    **{f"gmi_{name}": (f"gmi.{name}", f"gmi({name}=)") for name in ("backend", "template", "num_learners")},
    **{name: (f"gmi.{name}", f"gmi({name}=)") for name in _GMI_SETTINGS},
    "total_env_steps": ("total_env_steps", "training(total_env_steps=)"),
    "evaluation_interval": ("evaluation.interval", "evaluation(evaluation_interval=)"),
    "evaluation_duration": ("evaluation.num_episodes", "evaluation(evaluation_duration=)"),
    "seed": ("seed", "debugging(seed=)"),
}
"""Attribute of a config: (its path in a RunSpec, how a user writes it)."""

OFFLINE_PATHS: dict[str, tuple[str, str]] = {
    "input_": ("data.path", "offline_data(input_=)"),
    "obs_keys": ("data.obs_keys", "offline_data(obs_keys=)"),
}
"""The same for offline algorithms alone."""

MODEL_PATHS: dict[str, str] = {
    "fcnet_hiddens": "network.hidden",
    "fcnet_activation": "network.activation",
    "initial_log_std": "network.initial_log_std",
    "cnn": "network.cnn",
    "core": "network.core",
    "use_lstm": "network.core",
    "lstm_cell_size": "network.core_size",
    "core_size": "network.core_size",
    "vf_share_layers": "network.shared",
    "head": "network.head",
    "free_log_std": "network.free_log_std",
    "critic_only": "network.critic_only",
    "module": "network.module",
    "module_kwargs": "network.module_kwargs",
}
"""Key of rl_module(model_config=) -> its path in a RunSpec: RLlib's keys, and rayagi's own."""

_MODEL_VALUES: dict[tuple[str, Any], str] = {
    ("fcnet_activation", "swish"): "silu",
    ("use_lstm", True): "lstm",
    ("use_lstm", False): "none",
}
"""RLlib's word for a value -> rayagi's."""

FIXED_MODEL_KEYS: dict[str, Any] = {"head_fcnet_hiddens": []}
"""Keys of model_config with the only value that rayagi supports."""

BATCH_SETTINGS = ("train_batch_size", "_train_batch_size_per_learner", "minibatch_size")
"""Converted, with num_envs, to rollout_length and num_minibatches (rayagi.config.rllib_values)."""

DERIVED = frozenset(
    {
        *BATCH_SETTINGS,
        "rollout_length",
        "num_minibatches",
        "kl_target",
        "num_envs_per_env_runner",
        "rollout_fragment_length",
        "observation_filter",
        "replay_buffer_config",
    }
)
"""Settings that another one decides as long as they are unset."""

DRIVER_CALLBACKS = frozenset(
    {"on_algorithm_init", "on_checkpoint_loaded", "on_evaluate_start", "on_evaluate_end", "on_train_result"}
)
"""Callbacks that the driver calls; the others are of a loop that runs inside the GMIs."""

RLLIB_HONOURED = frozenset(
    {
        "_model_config",
        "num_cpus_for_main_process",
        "observation_filter",
        "callbacks",
        *(f"callbacks_{name}" for name in DRIVER_CALLBACKS),
        "disable_env_checking",
        "log_level",
        "metrics_num_episodes_for_smoothing",
        "min_time_s_per_iteration",
        "min_sample_timesteps_per_iteration",
        "min_train_timesteps_per_iteration",
    }
)
"""Settings that rayagi's Algorithm classes support directly, as RLlib's own do."""

ALGORITHM_ONLY = RLLIB_HONOURED - {"_model_config", "disable_env_checking", "observation_filter"}
"""Those that a RunSpec cannot hold: without an Algorithm they have no effect."""

_KEPT_DEFAULTS = frozenset({"env", "env_config", "evaluation_interval", "seed"})
"""Attributes whose RLlib default means unset."""

_FIXED = {"restart_failed_env_runners": False}
"""As ``RllibFace.fixed``, of every algorithm."""

_AS_IT_IS: tuple[tuple[str, Any], ...] = (
    ("evaluation_config", None),
    ("evaluation_config", {"explore": False}),
    ("_is_atari", False),
)
"""Values of settings, besides RLlib's default, that say what rayagi does anyway. Reading ``is_atari`` sets the last one."""

_INTERNAL_KEYS = frozenset({"class", "algo_class", "_is_frozen", "__stdout_file__", "__stderr_file__"})
"""Not settings: keys that RLlib stores beside them, and that Tune adds to a trial's config."""
_API_STACK = ("enable_rl_module_and_learner", "enable_env_runner_and_connector_v2")
_WRITTEN_AS = {
    "_rl_module_spec": "rl_module(rl_module_spec=)",
    "_learner_class": "learner_class",
    **{name: f"api_stack({name}=)" for name in _API_STACK},
}
"""Keys whose setting users write in another way."""
_DICT_NAMES = {"lambda": "lambda_", "input": "input_"}

_SUGGESTIONS: tuple[tuple[str, str], ...] = (
    (
        "|".join(_API_STACK),
        "leave it out: the policy is an RLModule of the new API stack, and rayagi has a loop of its own",
    ),
    (r"num_env_runners|num_learners|num_aggregator_actors_per_learner", "use gmi(num_gmis=)"),
    (r"num_envs_per_env_runner|gym_env_vectorize_mode|remote_worker_envs", "use gmi(num_envs=)"),
    (r"num_gpus.*|_fake_gpus|local_gpu_idx", 'use gmi(backend="direct", gmis_per_gpu=)'),
    (r"num_cpus_per_.*", "use gmi(threads_per_gmi=)"),
    (r"custom_resources_.*|placement_strategy", "rayagi reserves what the plan of gmi(...) needs"),
    (r"rollout_fragment_length|batch_mode", "use training(rollout_length=)"),
    (r".*worker_filter_stats|sync_filters.*", "use training(normalize_obs=)"),
    (r"clip_rewards", "use training(normalize_rewards=)"),
    (
        r"normalize_actions|clip_actions",
        "the environment receives the policy's actions, clipped to its action space; wrap it to change them",
    ),
    (r"grad_clip_by", "only 'global_norm' is offered: training(grad_clip=)"),
    (r"entropy_coeff_schedule", "use training(entropy_coeff=) with one number"),
    (r"shuffle_batch_per_epoch", "every epoch shuffles"),
    (
        r"model|_rl_module_spec|algorithm_config_overrides_per_module",
        "use rl_module(model_config={'fcnet_hiddens': ...})",
    ),
    (r"framework|tf_.*|local_tf_.*|eager_.*|enable_tf1.*", "rayagi is torch only"),
    (r"torch_.*|_torch_.*", "rayagi has a learner of its own: training(...)"),
    (r".*polic(y|ies).*|count_steps_by|observation_fn|_per_module.*", "rayagi trains one policy"),
    (
        r".*connector.*|preprocessor_pref|env_runner_cls",
        "wrap the environment and give it to gymnasium.register",
    ),
    (r"callbacks_on_.*", "the loop runs inside the GMIs: use callbacks_on_train_result"),
    (r"(observation|action)_space", "they are read from the environment"),
    (r"evaluation_duration_unit", "only 'episodes' is offered: evaluation(evaluation_duration=)"),
    (
        r"evaluation_.*|custom_eval.*|in_evaluation",
        "use evaluation(evaluation_interval=, evaluation_duration=)",
    ),
    (
        r".*(input|output|offline|off_policy|ope_|prelearner|materialize|iter_batches|dataset).*",
        "an offline algorithm, such as BCConfig, takes offline_data(input_=) alone; the others learn online",
    ),
    (r"train_batch_size", "use training(rollout_length=) and gmi(num_envs=)"),
    (
        r".*(restart|failure|health_probe|restore_timeout).*",
        "rayagi ends the run and restores its last checkpoint",
    ),
    (
        r"explore|exploration_config|_prior_exploration.*",
        "actions are sampled; evaluate() takes the policy's mode",
    ),
    (r"_?learner_.*|_?optimizer", "rayagi has a learner of its own: training(lr=, adam_eps=)"),
)


@dataclass(frozen=True, kw_only=True)
class AlgorithmSettings:
    """Settings of one algorithm's config, the common ones included."""

    definition: AlgorithmDefinition

    @property
    def paths(self) -> dict[str, tuple[str, str]]:
        """Attribute of the config: (its path in a RunSpec, how a user writes it)."""
        section, names = self.definition.name, self.definition.training_names
        own = {name: (f"{section}.{leaf}", f"training({name}=)") for name, leaf in names.items()}
        offline = issubclass(self.definition.settings, OfflineSpec)
        return {**COMMON_PATHS, **(OFFLINE_PATHS if offline else {}), **own}

    @property
    def unset(self) -> tuple[str, ...]:
        """Attributes that a new config sets to PRESET, to distinguish user values from RLlib's defaults."""
        return (
            *(name for name in self.paths if name not in _KEPT_DEFAULTS),
            *(BATCH_SETTINGS if self.definition.rllib.takes_batch_sizes else ()),
            *self.definition.rllib.converted,
            *self.fixed,
            *self.definition.rllib.elsewhere,
            "num_envs_per_env_runner",
            "rollout_fragment_length",
            "observation_filter",
            "num_cpus_for_main_process",
        )

    @property
    def fixed(self) -> Mapping[str, Any]:
        """Settings that must be unset, or have this value."""
        return {**_FIXED, **self.definition.rllib.fixed}

    @staticmethod
    def attribute(key: str) -> str:
        """Attribute of the config behind a key of RLlib's dictionary."""
        return _DICT_NAMES.get(key, key)

    def default(self, name: str, spec: RunSpec) -> Any:
        """Value, as RLlib writes it, of an attribute that is unset in a run.

        None: a number that is not known before the machine is, or what rayagi does not have.
        """
        if name in self.fixed:
            return self.fixed[name]
        if name in self.definition.rllib.converted:
            return self.definition.rllib.converted[name].from_settings(spec.learning, num_trainers(spec.gmi))
        if name in self.paths:
            path = self.paths[name][0].replace(f"{self.definition.name}.", "learning.")
            value = reduce(getattr, path.split("."), spec)
            if name == "grad_clip" and value == 0:
                return None
            return list(value) if isinstance(value, tuple) else value
        if name == "train_batch_size" and isinstance(spec.learning, OffPolicySpec | OfflineSpec):
            return spec.learning.batch_size
        gmi, length = spec.gmi, spec.learning.rollout_length
        steps = None if gmi.num_envs == "auto" else gmi.num_envs * length
        whole = steps * gmi.num_gmis if steps is not None and isinstance(gmi.num_gmis, int) else None
        return {
            "num_cpus_for_main_process": 0,
            "num_envs_per_env_runner": gmi.num_envs,
            "rollout_fragment_length": length,
            "observation_filter": "MeanStdFilter" if spec.learning.normalize_obs else "NoFilter",
            "_train_batch_size_per_learner": steps,
            "minibatch_size": steps and steps // spec.learning.num_minibatches,
            "train_batch_size": whole,
            **dict.fromkeys(set(self.definition.rllib.elsewhere) - {"train_batch_size"}),
        }[name]

    def is_honoured(self, key: str) -> bool:
        """Whether a key of RLlib's dictionary has an effect in rayagi."""
        sizes = BATCH_SETTINGS if self.definition.rllib.takes_batch_sizes else ()
        names = (*self.paths, *self.definition.rllib.converted, *RLLIB_HONOURED, *sizes)
        return self.attribute(key) in names

    @staticmethod
    def is_default(key: str, value: Any, pristine: Mapping[str, Any]) -> bool:
        """Whether a value is that of an unmodified config."""
        return key in pristine and _same(value, pristine[key])

    def refuse_unhonoured(self, config: Mapping[str, Any], pristine: Mapping[str, Any]) -> None:
        """Raise for the first setting of ``config`` that differs from ``pristine`` and is not supported.

        Args:
            config: RLlib's dictionary of the config, with unset settings as PRESET
            pristine: the same of an unmodified config

        Raises:
            ConfigError: the setting, and the alternative.
        """
        # The API stack first: it changes others.
        for key, value in sorted(config.items(), key=lambda item: item[0] not in _API_STACK):
            if key in _INTERNAL_KEYS:
                continue
            if key not in pristine:
                known = dict.fromkeys([*self.paths, *(name for name in pristine if not name.startswith("_"))])
                raise ConfigError(
                    key, value, f"{self.definition.rllib.config} has no such setting", nearest(key, known)
                )
            if _same(value, pristine[key]) or self.is_honoured(key):
                continue
            if (key in self.fixed and _same(value, self.fixed[key])) or (key, value) in _AS_IT_IS:
                continue
            if value is None and key in self.definition.rllib.elsewhere:  # as it reads while it is unset
                continue
            self.refuse(key, value, pristine[key])

    def refuse(self, key: str, value: Any, default: Any = PRESET) -> NoReturn:
        """Raise ConfigError: rayagi does not support a setting of RLlib."""
        reason = "rayagi does not honour this RLlib setting"
        raise ConfigError(_WRITTEN_AS.get(key, key), value, reason, self._what_instead(key, default))

    def user_name(self, path: str) -> str:
        """How users of the config write the setting at ``path`` of a RunSpec."""
        for spec_path, written in self.paths.values():
            if path == spec_path or path.startswith((f"{spec_path}.", f"{spec_path}[")):
                return written
        for key, spec_path in MODEL_PATHS.items():
            if path == spec_path or path.startswith(f"{spec_path}["):
                return f"rl_module(model_config={{{key!r}: }})"
        return path

    def _what_instead(self, key: str, default: Any) -> str:
        for pattern, suggestion in (*self.definition.rllib.instead, *_SUGGESTIONS):
            if re.fullmatch(pattern, key):
                return suggestion
        return f"leave it at {default!r}" if default is not PRESET else "leave it out"


def num_trainers(gmi: GmiSpec) -> int | None:
    """Trainers of a run; None if the machine decides."""
    if gmi.template in ("dp_only", "auto"):
        return gmi.num_gmis - len(gmi.left_out) if isinstance(gmi.num_gmis, int) else None
    return gmi.num_learners or 1


def refuse_algorithm_only(config: Mapping[str, Any], pristine: Mapping[str, Any]) -> None:
    """Raise for the first setting that needs an Algorithm and differs from ``pristine``.

    Raises:
        ConfigError: the setting.
    """
    for key in sorted(ALGORITHM_ONLY & config.keys()):
        if not _same(config[key], pristine[key]):
            reason = "works with build_algo(), not with `rayagi train`"
            raise ConfigError(key, config[key], reason, "leave it out of the file, or build the algorithm")


def model_changes(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Changes of a RunSpec by ``rl_module(model_config=)``: {path: value}.

    Raises:
        ConfigError: a key that rayagi's networks do not have.
    """
    changes: dict[str, Any] = {}
    for key, value in model_config.items():
        where = f"rl_module(model_config={{{key!r}: }})"
        if key in MODEL_PATHS:
            ours = (own for (of, theirs), own in _MODEL_VALUES.items() if of == key and _same(theirs, value))
            changes[MODEL_PATHS[key]] = next(ours, value)
        elif key == "max_seq_len":
            raise ConfigError(where, value, "is set with the algorithm", "use training(sequence_length=)")
        elif key not in FIXED_MODEL_KEYS:
            honoured = [*MODEL_PATHS, *FIXED_MODEL_KEYS]
            raise ConfigError(where, value, "rayagi's networks have no such setting", nearest(key, honoured))
        elif not _same(value, FIXED_MODEL_KEYS[key]):
            raise ConfigError(
                where, value, f"rayagi's networks have {FIXED_MODEL_KEYS[key]!r} here", "leave it out"
            )
    return changes


def _same(value: Any, default: Any) -> bool:
    if value is default:
        return True
    try:
        return bool(value == default)
    except (TypeError, ValueError):  # arrays, for example: not an RLlib default
        return False
