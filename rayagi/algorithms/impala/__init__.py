"""IMPALA (Espeholt et al. 2018): its definition and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.definition import (
    ASYNCHRONOUS_NAMES,
    INSTEAD_OF_RLLIBS_PIPELINE,
    OF_RLLIBS_PIPELINE,
    ONE_PASS_FIXED,
    ONE_PASS_NAMES,
    AlgorithmDefinition,
    RllibFace,
)
from rayagi.config.errors import ConfigError
from rayagi.config.learning import ONE_PASS_PRESET, AsynchronousSpec, OnePassSpec, trace_bounds


@dataclass(frozen=True, kw_only=True)
class ImpalaSpec(OnePassSpec, AsynchronousSpec):
    """Settings of IMPALA: one step per batch of rollouts, on V-trace's actor-critic loss (Espeholt et al. 2018, §4.2)."""

    rho_bar: float = 1.0
    """Upper bound of the importance ratios in the TD errors and the policy gradient. It sets the policy that the values
    converge to."""
    c_bar: float = 1.0
    """Upper bound of the importance ratios in the trace. It sets the speed of convergence."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every asynchronous algorithm, of one step per rollout, and of the bounds."""
        yield from AsynchronousSpec.broken_rules(self, section)
        yield from self.one_pass_rules(section)
        yield from trace_bounds(section, self.rho_bar, self.c_bar)


IMPALA = AlgorithmDefinition(
    name="impala",
    summary="asynchronous actor-critic, corrected by V-trace (Espeholt et al. 2018)",
    settings=ImpalaSpec,
    templates=("decoupled", "dp_only"),
    learner="rayagi.algorithms.impala.learner:ImpalaLearner",
    preset={**ONE_PASS_PRESET, "learning_rate": 5e-4},
    rllib=RllibFace(
        config="ImpalaConfig",
        algorithm="IMPALA",
        base="ray.rllib.algorithms.impala.impala:IMPALAConfig",
        names={
            **ONE_PASS_NAMES,
            **ASYNCHRONOUS_NAMES,
            "vtrace_clip_rho_threshold": "rho_bar",
        },
        fixed=ONE_PASS_FIXED,
        elsewhere=OF_RLLIBS_PIPELINE,
        instead=((r"vtrace", "use AppoConfig().training(vtrace=False)"), *INSTEAD_OF_RLLIBS_PIPELINE),
    ),
)
