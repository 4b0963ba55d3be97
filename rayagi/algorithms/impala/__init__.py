"""IMPALA (Espeholt et al. 2018) and A3C (Mnih et al. 2016), which has no V-trace: definitions and settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.definition import (
    ASYNCHRONOUS_NAMES,
    RLLIB_ACTIONS,
    RLLIB_NAMES,
    AlgorithmDefinition,
    RllibFace,
)
from rayagi.config.errors import ConfigError
from rayagi.config.learning import AsynchronousSpec, positive


@dataclass(frozen=True, kw_only=True, slots=True)
class ImpalaSpec(AsynchronousSpec):
    """Settings of the asynchronous algorithms: IMPALA (Espeholt et al. 2018) and A3C (Mnih et al. 2016)."""

    rho_bar: float = 1.0
    """IMPALA: upper bound of the importance ratios in the TD errors. It sets the policy that the values converge to."""
    c_bar: float = 1.0
    """IMPALA: upper bound of the importance ratios in the trace. It sets the speed of convergence."""
    clip_ratio: float | None = 0.2
    """Clip range of the ratio, as in PPO (IMPALA with it is known as APPO); None: the papers' plain policy gradient."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every asynchronous algorithm, and of the bounds."""
        yield from AsynchronousSpec.broken_rules(self, section)
        for name in ("clip_ratio", "rho_bar", "c_bar"):
            yield from positive(f"{section}.{name}", getattr(self, name))
        if self.c_bar > self.rho_bar:
            reason = f"must be at most {section}.rho_bar = {self.rho_bar} (Espeholt et al. 2018, §4.1)"
            yield ConfigError(f"{section}.c_bar", self.c_bar, reason)


def _no_correction(settings: ImpalaSpec, section: str) -> Iterator[ConfigError]:
    if settings.on_stale == "correct":
        reason = "needs a correction, and a3c has none"
        yield ConfigError(f"{section}.on_stale", "correct", reason, "use 'wait' or 'drop'")


_NAMES = {**RLLIB_NAMES, **ASYNCHRONOUS_NAMES, "clip_param": "clip_ratio"}
_BASE = "ray.rllib.algorithms.impala.impala:IMPALAConfig"
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

IMPALA = AlgorithmDefinition(
    name="impala",
    summary="asynchronous, corrected by V-trace (Espeholt et al. 2018)",
    settings=ImpalaSpec,
    section="impala",
    templates=("decoupled", "dp_only"),
    learner="rayagi.algorithms.impala.learner:ImpalaLearner",
    options={"corrects": True},
    rllib=RllibFace(
        config="ImpalaConfig",
        algorithm="IMPALA",
        base=_BASE,
        names={**_NAMES, "vtrace_clip_rho_threshold": "rho_bar", "c_bar": "c_bar"},
        instead=((r"vtrace", "A3CConfig has no correction"), *_INSTEAD_OF_RLLIBS_PIPELINE),
    ),
)

A3C = AlgorithmDefinition(
    name="a3c",
    summary="asynchronous, without correction (after Mnih et al. 2016)",
    settings=ImpalaSpec,
    section="impala",
    templates=("decoupled", "dp_only"),
    learner="rayagi.algorithms.impala.learner:ImpalaLearner",
    options={"corrects": False},
    rules=_no_correction,
    rllib=RllibFace(
        config="A3CConfig",
        algorithm="A3C",
        base=_BASE,
        names=_NAMES,
        fixed={"vtrace": False, **RLLIB_ACTIONS},
        instead=((r"vtrace.*", "A3C has no correction: use ImpalaConfig"), *_INSTEAD_OF_RLLIBS_PIPELINE),
    ),
)
