"""APPO, asynchronous PPO: the clipped loss on rollouts of an older policy. Its definition and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.definition import ASYNCHRONOUS_NAMES, RLLIB_NAMES, AlgorithmDefinition, RllibFace
from rayagi.config.errors import ConfigError
from rayagi.config.learning import AsynchronousSpec, positive


@dataclass(frozen=True, kw_only=True, slots=True)
class AppoSpec(AsynchronousSpec):
    """Settings of APPO: epochs of minibatches on PPO's clipped loss, with V-trace's advantages (RLlib's algorithm)."""

    vtrace: bool = True
    """Correct for the policy that acted by V-trace (Espeholt et al. 2018). false: GAE, as if the rollouts were on-policy."""
    rho_bar: float = 1.0
    """V-trace: upper bound of the importance ratios in the TD errors. It sets the policy that the values converge to."""
    c_bar: float = 1.0
    """V-trace: upper bound of the importance ratios in the trace. It sets the speed of convergence."""
    clip_ratio: float = 0.2
    """Clip range of the ratio to the policy before the update, as in PPO."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every asynchronous algorithm, and of the bounds."""
        yield from AsynchronousSpec.broken_rules(self, section)
        for name in ("clip_ratio", "rho_bar", "c_bar"):
            yield from positive(f"{section}.{name}", getattr(self, name))
        if self.c_bar > self.rho_bar:
            reason = f"must be at most {section}.rho_bar = {self.rho_bar} (Espeholt et al. 2018, §4.1)"
            yield ConfigError(f"{section}.c_bar", self.c_bar, reason)
        if self.on_stale == "correct" and not self.vtrace:
            reason = f"needs {section}.vtrace = true, the correction"
            yield ConfigError(f"{section}.on_stale", "correct", reason, "use 'wait' or 'drop'")


_INSTEAD = (
    (
        r"train_batch_size|_train_batch_size_per_learner",
        "use training(rollout_length=, rollouts_per_update=)",
    ),
    (r"num_learners", "use gmi(num_learners=)"),
    (r"minibatch_size", "use training(num_minibatches=)"),
    (r"broadcast_interval", "every update is published; use training(max_lag=)"),
    (r"vtrace_clip_pg_rho_threshold", "one bound serves both: training(vtrace_clip_rho_threshold=)"),
    (
        r"learner_queue_.*|simple_queue_.*|.*_manager|max_requests_in_flight.*",
        "use training(max_lag=, on_stale=)",
    ),
    (
        r"opt_type|decay|momentum|epsilon|_separate_vf_optimizer|_lr_vf",
        "the optimiser is Adam: training(lr=, adam_eps=)",
    ),
    (
        r"replay_.*|minibatch_buffer_size|.*circular_buffer.*",
        "experience is learned from once, in training(num_epochs=) epochs",
    ),
    (r".*use_env_runner_state_server", "parameters travel through shared memory"),
    (r"use_kl_loss|kl_coeff", 'use training(lr_schedule="kl_adaptive", kl_target=)'),
    (r"target_.*|tau", "there is no target network: the ratio is to the policy before the update"),
    (r"use_critic|use_gae", "there is always a critic; training(vtrace=False) is GAE"),
)

APPO = AlgorithmDefinition(
    name="appo",
    summary="asynchronous, clipped surrogate loss, corrected by V-trace (RLlib's APPO)",
    settings=AppoSpec,
    section="appo",
    templates=("decoupled", "dp_only"),
    learner="rayagi.algorithms.appo.learner:AppoLearner",
    rllib=RllibFace(
        config="AppoConfig",
        algorithm="APPO",
        base="ray.rllib.algorithms.appo.appo:APPOConfig",
        names={
            **RLLIB_NAMES,
            **ASYNCHRONOUS_NAMES,
            "clip_param": "clip_ratio",
            "vtrace": "vtrace",
            "vtrace_clip_rho_threshold": "rho_bar",
            "c_bar": "c_bar",
        },
        instead=_INSTEAD,
    ),
)
