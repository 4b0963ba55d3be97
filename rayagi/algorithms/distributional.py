"""Settings of algorithms whose critics are distributions of the return, for many environments. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rayagi.config.errors import ConfigError
from rayagi.config.learning import at_least_one, positive
from rayagi.config.off_policy import OFF_POLICY_PRESET, OffPolicySpec


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributionalSpec(OffPolicySpec):
    """What FastTD3 and FastSAC share. learning_rate and network.hidden are the policy's; the critics' layers are wider."""

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
    """Transitions of one gradient step, of all trainers together. The papers' 8192 and 32768 are for a GPU."""
    updates_per_step: float = 0.125
    """Gradient steps per environment step, the steps of all environments counted. The papers' are fewer and of larger
    batches: 2 for 128 steps, 8 for 4096."""
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
    layer_norm: bool = False
    """Normalise the hidden layers of critics and policy, before the activation (Ba et al. 2016)."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every off-policy algorithm, and of the distribution."""
        yield from OffPolicySpec.broken_rules(self, section)
        yield from at_least_one(f"{section}.policy_delay", self.policy_delay)
        yield from positive(f"{section}.critic_learning_rate", self.critic_learning_rate)
        yield from positive(f"{section}.weight_decay", self.weight_decay, zero=True)
        if self.num_atoms < 2:
            instead = f"use algorithm {section.removeprefix('fast_')!r} for mean values"
            yield ConfigError(f"{section}.num_atoms", self.num_atoms, "must be at least 2", instead)
        yield from support_rules(section, self.v_min, self.v_max)


DISTRIBUTIONAL_PRESET: dict[str, Any] = {
    **OFF_POLICY_PRESET,
    "normalize_obs": True,
    "gamma": 0.97,
    "rollout_length": 4,
    "learning_rate": 1e-3,
    "n_step": 3,
    "batch_size": 256,
    "updates_per_step": 0.25,
    "v_min": -250.0,
    "v_max": 250.0,
}
"""Settings of both on every task. Two cores make some thousand gradient steps in a minute: returns of 3 steps and a larger
step size learn with so few, the papers' 3e-4 does not. How they were chosen: experiments/off_policy/README.md."""

DISTRIBUTIONAL_NAMES = {
    name: name
    for name in (
        "weight_decay",
        "policy_delay",
        "num_atoms",
        "v_min",
        "v_max",
        "clipped_double",
        "layer_norm",
    )
}
"""Names in RLlib's ``training()`` -> fields of DistributionalSpec beside those of BOX_NAMES."""


def support_rules(section: str, v_min: float, v_max: float) -> Iterator[ConfigError]:
    """Rules of the ends of a distribution's support."""
    if not -1e30 < v_min < v_max < 1e30:
        reason = f"must be finite and less than {section}.v_max = {v_max}"
        yield ConfigError(
            f"{section}.v_min", v_min, reason, "give the least and the largest discounted return"
        )
