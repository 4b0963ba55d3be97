"""Implicit Q-learning (Kostrikov et al. 2021): its definition and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.definition import (
    INSTEAD_OF_RLLIBS_DATA,
    OFFLINE_NAMES,
    RLLIB_ACTIONS,
    AlgorithmDefinition,
    LearningMetric,
    RllibFace,
)
from rayagi.algorithms.off_policy_face import refuse_images
from rayagi.config.errors import ConfigError
from rayagi.config.learning import positive
from rayagi.config.offline import OFFLINE_PRESET, OfflineSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class IQLSpec(OfflineSpec):
    """Settings of implicit Q-learning. Defaults are the paper's for MuJoCo's locomotion tasks (appendix B)."""

    expectile: float = 0.7
    """Of the value network's regression (the paper's tau): 0.5 is the mean over the dataset's actions, 1 their maximum."""
    inverse_temperature: float = 3.0
    """beta: actions are cloned with weights exp(beta A); 0: behaviour cloning."""
    max_weight: float = 100.0
    """Largest of these weights."""
    tau: float = 0.005
    """Polyak averaging of the target critics after each step (the paper's alpha): target += tau (critic - target)."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every offline algorithm, and of the formulas."""
        yield from OfflineSpec.broken_rules(self, section)
        yield from positive(f"{section}.inverse_temperature", self.inverse_temperature, zero=True)
        yield from positive(f"{section}.max_weight", self.max_weight)
        if not 0 < self.expectile < 1:
            yield ConfigError(
                f"{section}.expectile", self.expectile, "must be greater than 0 and less than 1"
            )
        if not 0 < self.tau <= 1:
            yield ConfigError(f"{section}.tau", self.tau, "must be greater than 0 and at most 1")


IQL = AlgorithmDefinition(
    name="iql",
    summary="offline, implicit Q-learning (Kostrikov et al. 2021)",
    settings=IQLSpec,
    templates=("offline",),
    learner="rayagi.algorithms.iql.learner:IQLLearner",
    needs_separate_networks=True,
    unfit_env=refuse_images,
    preset={**OFFLINE_PRESET, "normalize_rewards": True},
    metrics=(
        LearningMetric(
            name="q_loss", unit="", help="squared temporal-difference error, summed over both critics"
        ),
        LearningMetric(name="target_q", unit="", help="least target critic of the dataset's actions"),
        LearningMetric(name="advantage_weight", unit="", help="weight with which an action is cloned"),
    ),
    rllib=RllibFace(
        config="IQLConfig",
        algorithm="IQL",
        base="ray.rllib.algorithms.iql.iql:IQLConfig",
        names={
            **OFFLINE_NAMES,
            "beta": "inverse_temperature",
            "tau": "tau",
        },
        fixed={**RLLIB_ACTIONS, "twin_q": True},
        instead=(
            *INSTEAD_OF_RLLIBS_DATA,
            (r"(actor|critic|value)_lr", "one step size serves all networks: training(lr=)"),
            (r"target_network_update_freq", "the target follows every step: training(tau=)"),
        ),
    ),
)
