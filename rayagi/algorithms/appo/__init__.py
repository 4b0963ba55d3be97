"""APPO, asynchronous PPO: the clipped loss on rollouts of an older policy. Its definition and its settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.definition import (
    ASYNCHRONOUS_NAMES,
    INSTEAD_OF_RLLIBS_PIPELINE,
    OF_RLLIBS_PIPELINE,
    RLLIB_ACTIONS,
    RLLIB_NAMES,
    AlgorithmDefinition,
    RllibFace,
)
from rayagi.config.errors import ConfigError
from rayagi.config.learning import AsynchronousSpec, positive, trace_bounds


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
        yield from positive(f"{section}.clip_ratio", self.clip_ratio)
        yield from trace_bounds(section, self.rho_bar, self.c_bar)
        if self.on_stale == "correct" and not self.vtrace:
            reason = f"needs {section}.vtrace = true, the correction"
            yield ConfigError(f"{section}.on_stale", "correct", reason, "use 'wait' or 'drop'")


_INSTEAD = (
    (r"minibatch_size", "use training(num_minibatches=)"),
    (r"opt_type|decay|momentum|epsilon", "the optimiser is Adam: training(lr=, adam_eps=)"),
    (
        r"replay_.*|minibatch_buffer_size|.*circular_buffer.*",
        "experience is learned from once, in training(num_epochs=) epochs",
    ),
    (r"use_kl_loss|kl_coeff", 'use training(lr_schedule="kl_adaptive", kl_target=)'),
    (r"target_.*|tau", "there is no target network: the ratio is to the policy before the update"),
    (r"use_critic|use_gae", "there is always a critic; training(vtrace=False) is GAE"),
    *INSTEAD_OF_RLLIBS_PIPELINE,
)

APPO = AlgorithmDefinition(
    name="appo",
    summary="asynchronous, clipped surrogate loss, corrected by V-trace (RLlib's APPO)",
    settings=AppoSpec,
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
            "vtrace_clip_rho_threshold": "rho_bar",
        },
        fixed={**RLLIB_ACTIONS, "shuffle_batch_per_epoch": True},
        elsewhere=(
            *OF_RLLIBS_PIPELINE,
            "simple_queue_size",
            "circular_buffer_num_batches",
            "circular_buffer_iterations_per_batch",
            "target_network_update_freq",
            "target_worker_clipping",
        ),
        instead=_INSTEAD,
    ),
)
