"""What the definitions of off-policy algorithms share: metrics, RLlib's names, refused networks. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from actors.protocols import EnvInfo
from rayagi.algorithms.definition import ASYNCHRONOUS_NAMES, RLLIB_NAMES, LearningMetric
from rayagi.config.errors import ConfigError
from rayagi.config.off_policy import ON_POLICY

OFF_POLICY_METRICS = (
    LearningMetric(name="q_mean", unit="", help="mean value of sampled states and actions"),
    LearningMetric(name="gradient_steps", unit="steps", help="gradient steps of this iteration"),
)

OFF_POLICY_NAMES = {
    **{name: leaf for name, leaf in RLLIB_NAMES.items() if leaf not in (*ON_POLICY, "learning_rate")},
    **ASYNCHRONOUS_NAMES,
    "tau": "tau",
    "n_step": "n_step",
    "capacity": "capacity",
    "batch_size": "batch_size",
    "updates_per_step": "updates_per_step",
    "num_steps_sampled_before_learning_starts": "learning_starts",
}
"""Settings of every off-policy algorithm: the name in RLlib's ``training()`` -> the field of OffPolicySpec."""

INSTEAD_OF_RLLIBS_REPLAY = (
    (r"lr", "use training(actor_lr=, critic_lr=)"),
    (r"replay_buffer_config", "use training(capacity=)"),
    (r"train_batch_size|_train_batch_size_per_learner", "use training(batch_size=), of all GMIs together"),
    (r"training_intensity", "use training(updates_per_step=)"),
    (r"target_network_update_freq", "targets follow after every gradient step: training(tau=)"),
    (r"store_buffer_in_checkpoints", "a resumed run refills its replay"),
    (r"clip_actions|normalize_actions", "actions are within the environment's box"),
)
"""Settings of RLlib's off-policy algorithms, and what to use instead, as ``RllibFace.instead``."""


def refuse_unfit_box(algorithm: str, info: EnvInfo) -> Iterator[ConfigError]:
    """Refuse environments that an algorithm for continuous actions, with perceptrons, cannot learn."""
    action = info.action
    if action.is_discrete:
        reason = f"needs a box of reals as actions, and {info.env_id}'s are choices"
        yield ConfigError("algorithm", algorithm, reason, "use algorithm 'dqn' or 'ppo'")
        return
    for i, (low, high) in enumerate(zip(action.low, action.high, strict=True)):
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            reason = f"needs a box with finite bounds, and action {i} of {info.env_id} is between {low:g} and {high:g}"
            instead = "wrap the environment (gymnasium.wrappers.RescaleAction), or use algorithm 'ppo'"
            yield ConfigError("algorithm", algorithm, reason, instead)
            return
    if any(part.is_image for part in info.obs_parts):
        reason = f"learns from vectors, and {info.env_id} shows images"
        yield ConfigError("algorithm", algorithm, reason, "use algorithm 'ppo'")


def refuse_networks(algorithm: str, network: Any) -> Iterator[ConfigError]:
    """Refuse settings of a NetworkSpec that separate perceptrons do not have."""
    for name, usual in (
        ("core", "none"),
        ("shared", False),
        ("critic_only", ()),
        ("module", None),
        ("head", "auto"),
    ):
        value = getattr(network, name)
        if value != usual:
            reason = f"does not go with algorithm = {algorithm!r}, whose networks are separate perceptrons"
            yield ConfigError(f"network.{name}", value, reason, "leave it out, or use algorithm 'ppo'")
