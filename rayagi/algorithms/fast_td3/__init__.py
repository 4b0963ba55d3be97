"""FastTD3 (Seo et al. 2025): its definition and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.definition import AlgorithmDefinition, RllibFace
from rayagi.algorithms.distributional import support_rules
from rayagi.algorithms.off_policy_face import (
    INSTEAD_OF_RLLIBS_REPLAY,
    OFF_POLICY_FIXED,
    OFF_POLICY_METRICS,
    OFF_POLICY_NAMES,
    REPLAY_CONVERSIONS,
    refuse_networks,
    refuse_unfit_box,
)
from rayagi.config.errors import ConfigError
from rayagi.config.learning import at_least_one, positive
from rayagi.config.off_policy import OFF_POLICY_PRESET, OffPolicySpec


@dataclass(frozen=True, kw_only=True, slots=True)
class FastTD3Spec(OffPolicySpec):
    """Settings of FastTD3: learning_rate is the policy's; network.hidden too, and the critics' layers are twice as wide."""

    critic_learning_rate: float | None = None
    """Step size of the critics. None: learning_rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay of both (AdamW)."""
    normalize_obs: bool = True
    """Normalise observations by running statistics, when they are sampled. The replay holds them raw."""
    gamma: float = 0.97
    """Discount of a reward one step later."""
    tau: float = 0.1
    """Polyak averaging of the target critics after each gradient step."""
    learning_starts: int = 1280
    """Steps of all environments in the replay before the first update: the paper's ten of each of 128."""
    batch_size: int = 512
    """Transitions of one gradient step, of all trainers together. The paper's 32768 is for a GPU."""
    updates_per_step: float = 0.125
    """Gradient steps per environment step, the steps of all environments counted. The paper's: two for 128 steps."""
    policy_delay: int = 2
    """Gradient steps of the critics for each of the policy."""
    num_atoms: int = 101
    """Atoms of the return's distribution."""
    v_min: float = -250.0
    """Least return of the distribution."""
    v_max: float = 250.0
    """Largest return of the distribution."""
    clipped_double: bool = True
    """Use the critic of the lower value (TD3). Else each critic has its own target, and the policy the mean of both."""
    noise_min: float = 0.001
    """Least noise level of exploration. Each environment has a level of its own, uniformly distributed."""
    noise_max: float = 0.4
    """Largest noise level of exploration, where actions are from -1 to 1."""
    target_noise: float = 0.001
    """Noise of the target's actions (TD3's smoothing)."""
    target_noise_clip: float = 0.5
    """Largest noise of the target's actions."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every off-policy algorithm, and of the distribution and the noise."""
        yield from OffPolicySpec.broken_rules(self, section)
        yield from at_least_one(f"{section}.policy_delay", self.policy_delay)
        yield from positive(f"{section}.critic_learning_rate", self.critic_learning_rate)
        for name in ("weight_decay", "noise_min", "noise_max", "target_noise", "target_noise_clip"):
            yield from positive(f"{section}.{name}", getattr(self, name), zero=True)
        if self.noise_min > self.noise_max:
            reason = f"must be at most {section}.noise_max = {self.noise_max}"
            yield ConfigError(f"{section}.noise_min", self.noise_min, reason)
        if self.num_atoms < 2:
            reason = "must be at least 2"
            yield ConfigError(
                f"{section}.num_atoms", self.num_atoms, reason, "use algorithm 'td3' for mean values"
            )
        yield from support_rules(section, self.v_min, self.v_max)


_OWN = (
    "weight_decay",
    "policy_delay",
    "num_atoms",
    "v_min",
    "v_max",
    "clipped_double",
    "noise_min",
    "noise_max",
    "target_noise",
    "target_noise_clip",
)

FAST_TD3 = AlgorithmDefinition(
    name="fast_td3",
    summary="TD3 with many environments, large batches and distributional critics (Seo et al. 2025)",
    settings=FastTD3Spec,
    section="fast_td3",
    templates=("dp_only", "decoupled"),
    learner="rayagi.algorithms.fast_td3.learner:FastTD3Learner",
    model="rayagi.algorithms.fast_td3.model:make_model",
    unfit_network=refuse_networks,
    unfit_env=refuse_unfit_box,
    preset={
        **OFF_POLICY_PRESET,
        "normalize_obs": True,
        "gamma": 0.97,
        "rollout_length": 4,
    },
    preset_network={"hidden": (128, 64, 32), "activation": "relu"},
    preset_num_envs=64,
    metrics=OFF_POLICY_METRICS,
    rllib=RllibFace(
        config="FastTD3Config",
        algorithm="FastTD3",
        names={
            **OFF_POLICY_NAMES,
            "actor_lr": "learning_rate",
            "critic_lr": "critic_learning_rate",
            **{name: name for name in _OWN},
        },
        converted=REPLAY_CONVERSIONS,
        fixed=OFF_POLICY_FIXED,
        instead=INSTEAD_OF_RLLIBS_REPLAY,
    ),
)
