"""Each algorithm's settings in RLlib's words, and rayagi's own where RLlib has none."""

from __future__ import annotations

from typing import Any

from rayagi.config.rllib_settings import AlgorithmSettings
from rayagi.config.spec import Algorithm

_LEARNING = {
    "rollout_length": "rollout_length",
    "num_minibatches": "num_minibatches",
    "num_epochs": "num_epochs",
    "gamma": "gamma",
    "lambda_": "gae_lambda",
    "clip_param": "clip_ratio",
    "vf_loss_coeff": "value_coef",
    "entropy_coeff": "entropy_coef",
    "lr": "learning_rate",
    "lr_schedule": "lr_schedule",
    "kl_target": "target_kl",
    "grad_clip": "max_grad_norm",
    "adam_eps": "adam_eps",
    "normalize_advantages": "normalize_advantages",
    "normalize_obs": "normalize_obs",
    "normalize_rewards": "normalize_rewards",
    "obs_clip": "obs_clip",
}
"""Of every algorithm."""
_ASYNCHRONOUS = {"max_lag": "max_lag", "on_stale": "on_stale", "rollouts_per_update": "rollouts_per_update"}
_ACTIONS: dict[str, Any] = {"normalize_actions": False, "clip_actions": False}
_INSTEAD_OF_RLLIBS_PIPELINE = (
    (
        r"train_batch_size|_train_batch_size_per_learner",
        "use training(rollout_length=, rollouts_per_update=)",
    ),
    (r"num_learners", "use gmi(num_learners=)"),
    (r"minibatch_size", "use training(num_minibatches=)"),
    (r"broadcast_interval", "every update is published; use training(max_lag=)"),
    (r"vtrace_clip_pg_rho_threshold", "one bound serves both: training(vtrace_clip_rho_threshold=)"),
    (r"learner_queue_.*|.*_manager|max_requests_in_flight.*", "use training(max_lag=, on_stale=)"),
    (
        r"opt_type|decay|momentum|epsilon|_separate_vf_optimizer|_lr_vf",
        "the optimiser is Adam: training(lr=, adam_eps=)",
    ),
    (r"replay_.*|minibatch_buffer_size", "experience is learned from once: training(num_epochs=)"),
    (r".*use_env_runner_state_server", "parameters travel through shared memory"),
)

SETTINGS: dict[Algorithm, AlgorithmSettings] = {
    "ppo": AlgorithmSettings(
        config="PPOConfig",
        section="ppo",
        names={**_LEARNING, "vf_clip_param": "value_clip"},
        fixed={"use_kl_loss": False, "kl_coeff": 0.0, **_ACTIONS},
        takes_batch_sizes=True,
        instead=(
            (r"use_kl_loss|kl_coeff", 'use training(lr_schedule="kl_adaptive", kl_target=)'),
            (
                r"use_critic|use_gae",
                "rayagi's PPO has a critic and GAE; training(lambda_=1.0) is the plain return",
            ),
        ),
    ),
    "impala": AlgorithmSettings(
        config="ImpalaConfig",
        section="impala",
        names={**_LEARNING, **_ASYNCHRONOUS, "vtrace_clip_rho_threshold": "rho_bar", "c_bar": "c_bar"},
        fixed=_ACTIONS,
        instead=((r"vtrace", "A3CConfig has no correction"), *_INSTEAD_OF_RLLIBS_PIPELINE),
    ),
    "a3c": AlgorithmSettings(
        config="A3CConfig",
        section="impala",
        names={**_LEARNING, **_ASYNCHRONOUS},
        fixed={"vtrace": False, **_ACTIONS},
        instead=((r"vtrace.*", "A3C has no correction: use ImpalaConfig"), *_INSTEAD_OF_RLLIBS_PIPELINE),
    ),
}
"""By algorithm."""
