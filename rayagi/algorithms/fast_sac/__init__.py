"""FastSAC (Seo et al. 2025): its definition and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.definition import LearningMetric
from rayagi.algorithms.distributional import DISTRIBUTIONAL_NAMES, DISTRIBUTIONAL_PRESET, DistributionalSpec
from rayagi.algorithms.off_policy_face import BOX_NAMES, OFF_POLICY_METRICS, BoxDefinition, BoxFace
from rayagi.config.errors import ConfigError
from rayagi.config.off_policy import temperature_rules


@dataclass(frozen=True, kw_only=True, slots=True)
class FastSACSpec(DistributionalSpec):
    """Settings of FastSAC (Seo et al. 2025). The critics' layers are half as wide again as network.hidden."""

    weight_decay: float = 0.001
    """Decoupled weight decay of both (AdamW)."""
    tau: float = 0.125
    """Polyak averaging of the target critics after each gradient step."""
    policy_delay: int = 4
    """Gradient steps of the critics and of the temperature for each of the policy."""
    v_min: float = -20.0
    """Least return of the distribution."""
    v_max: float = 20.0
    """Largest return of the distribution."""
    clipped_double: bool = False
    """Use the critic of the lower value (SAC). Else each critic has its own target, and the policy the mean of both."""
    layer_norm: bool = True
    """Normalise the hidden layers of critics and policy, before the activation (Ba et al. 2016)."""
    alpha_learning_rate: float | None = None
    """Step size of the logarithm of the temperature. None: learning_rate. 0: the temperature stays at initial_alpha."""
    initial_alpha: float = 0.001
    """First temperature: weight of the entropy beside rewards."""
    target_entropy: float | None = 0.0
    """Entropy that the temperature aims at, in nats, of actions in [-1, 1]. None: minus the number of actions."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every distributional algorithm, and of the temperature."""
        yield from DistributionalSpec.broken_rules(self, section)
        yield from temperature_rules(
            section, self.alpha_learning_rate, self.initial_alpha, self.target_entropy
        )


FAST_SAC = BoxDefinition(
    name="fast_sac",
    summary="SAC with many environments, large batches and distributional critics (Seo et al. 2025)",
    settings=FastSACSpec,
    learner="rayagi.algorithms.fast_sac.learner:FastSACLearner",
    model="rayagi.algorithms.fast_sac.learner:make_model",
    preset=DISTRIBUTIONAL_PRESET,
    preset_network={"hidden": (128, 64, 32), "activation": "silu"},
    preset_num_envs=16,
    metrics=(
        *OFF_POLICY_METRICS,
        LearningMetric(name="alpha", unit="", help="temperature: weight of the entropy beside rewards"),
    ),
    rllib=BoxFace(
        config="FastSACConfig",
        algorithm="FastSAC",
        names={**BOX_NAMES, **DISTRIBUTIONAL_NAMES, "alpha_lr": "alpha_learning_rate"},
    ),
)
