"""Trust region policy optimisation (Schulman et al. 2015): its definition and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.definition import RLLIB_NAMES, AlgorithmDefinition, LearningMetric, RllibFace
from rayagi.config.errors import ConfigError
from rayagi.config.learning import LearningSpec, at_least_one, positive


@dataclass(frozen=True, kw_only=True, slots=True)
class TRPOSpec(LearningSpec):
    """One natural-gradient step of the policy per rollout; epochs, minibatches and Adam are the value network's.

    The formulas are those of Schulman et al. 2015, §6 and appendix C.
    """

    max_kl: float = 0.01
    """delta: bound on the mean KL divergence between the policies before and after an update, nats."""
    cg_iterations: int = 10
    """Iterations of conjugate gradient; each computes one Fisher-vector product."""
    cg_damping: float = 0.1
    """Multiple of the identity added to the Fisher matrix."""
    line_search_steps: int = 10
    """Step sizes that the line search tries before it rejects the update."""
    backtrack_ratio: float = 0.8
    """Factor from one tried step size to the next."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every algorithm, and of the trust region."""
        yield from LearningSpec.broken_rules(self, section)
        for name in ("max_kl", "cg_damping"):
            yield from positive(f"{section}.{name}", getattr(self, name), zero=name == "cg_damping")
        for name in ("cg_iterations", "line_search_steps"):
            yield from at_least_one(f"{section}.{name}", getattr(self, name))
        if not 0 < self.backtrack_ratio < 1:
            yield ConfigError(f"{section}.backtrack_ratio", self.backtrack_ratio, "must be between 0 and 1")
        if self.target_kl != LearningSpec().target_kl:
            reason = "is for a step size that adapts, and TRPO has none"
            yield ConfigError(f"{section}.target_kl", self.target_kl, reason, f"use {section}.max_kl")
        if self.entropy_coef:
            reason = "has no place in TRPO, whose surrogate is the gain alone"
            yield ConfigError(f"{section}.entropy_coef", self.entropy_coef, reason, "leave it at 0")
        if self.lr_schedule == "kl_adaptive":
            reason = "is for policies that Adam steps, and TRPO's step is bounded by max_kl"
            yield ConfigError(
                f"{section}.lr_schedule", self.lr_schedule, reason, "use 'constant' or 'linear'"
            )


TRPO = AlgorithmDefinition(
    name="trpo",
    summary="synchronous, natural gradient within a trust region (Schulman et al. 2015)",
    settings=TRPOSpec,
    templates=("dp_only", "ea_t", "e_at", "dp_mp"),
    learner="rayagi.algorithms.trpo.learner:TRPOLearner",
    needs_separate_networks=True,
    preset={"lr_schedule": "constant", "learning_rate": 1e-3, "target_kl": LearningSpec().target_kl},
    metrics=(
        LearningMetric(
            name="backtracks",
            unit="steps",
            help="step sizes that the line search rejected; line_search_steps of them: the policy did not change",
        ),
    ),
    rllib=RllibFace(
        config="TRPOConfig",
        algorithm="TRPO",
        names={
            **{
                name: field
                for name, field in RLLIB_NAMES.items()
                if name not in ("kl_target", "entropy_coeff")
            },
        },
        instead=(
            (r"kl_target|kl_coeff", "use training(max_kl=)"),
            (r"entropy_coeff", "TRPO's surrogate has no entropy"),
        ),
    ),
)
