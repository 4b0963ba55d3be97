"""FastTD3 (Seo et al. 2025): its definition and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.distributional import DISTRIBUTIONAL_NAMES, DISTRIBUTIONAL_PRESET, DistributionalSpec
from rayagi.algorithms.off_policy_face import BOX_NAMES, BoxDefinition, BoxFace
from rayagi.config.errors import ConfigError
from rayagi.config.learning import positive


@dataclass(frozen=True, kw_only=True, slots=True)
class FastTD3Spec(DistributionalSpec):
    """Settings of FastTD3 (Seo et al. 2025). The critics' layers are twice as wide as network.hidden."""

    noise_min: float = 0.001
    """Least noise level of exploration. Each environment has a level of its own, uniformly distributed."""
    noise_max: float = 0.4
    """Largest noise level of exploration, where actions are from -1 to 1."""
    target_noise: float = 0.001
    """Noise of the target's actions (TD3's smoothing)."""
    target_noise_clip: float = 0.5
    """Largest noise of the target's actions."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every distributional algorithm, and of the noise."""
        yield from DistributionalSpec.broken_rules(self, section)
        for name in ("noise_min", "noise_max", "target_noise", "target_noise_clip"):
            yield from positive(f"{section}.{name}", getattr(self, name), zero=True)
        if self.noise_min > self.noise_max:
            reason = f"must be at most {section}.noise_max = {self.noise_max}"
            yield ConfigError(f"{section}.noise_min", self.noise_min, reason)


FAST_TD3 = BoxDefinition(
    name="fast_td3",
    summary="TD3 with many environments, large batches and distributional critics (Seo et al. 2025)",
    settings=FastTD3Spec,
    learner="rayagi.algorithms.fast_td3.learner:FastTD3Learner",
    model="rayagi.algorithms.fast_td3.learner:FastTD3Model",
    preset={**DISTRIBUTIONAL_PRESET, "noise_min": 0.1, "target_noise": 0.1},
    preset_network={"hidden": (128, 64, 32), "activation": "relu"},
    preset_num_envs=16,
    rllib=BoxFace(
        config="FastTD3Config",
        algorithm="FastTD3",
        names={**BOX_NAMES, **DISTRIBUTIONAL_NAMES},
    ),
)
