"""Proximal policy optimisation (Schulman et al. 2017): its definition and its settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rayagi.algorithms.definition import RLLIB_ACTIONS, RLLIB_NAMES, AlgorithmDefinition, RllibFace
from rayagi.config.errors import ConfigError
from rayagi.config.learning import LearningSpec, positive


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOSpec(LearningSpec):
    """Settings of PPO (Schulman et al. 2017)."""

    clip_ratio: float = 0.2
    """Clip range of the ratio pi / pi_old: 1 - clip_ratio to 1 + clip_ratio."""
    value_clip: float | None = None
    """Clip range of the value loss; None: unclipped."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every algorithm, and of the clip ranges."""
        yield from LearningSpec.broken_rules(self, section)
        for name in ("clip_ratio", "value_clip"):
            yield from positive(f"{section}.{name}", getattr(self, name))


PPO = AlgorithmDefinition(
    name="ppo",
    summary="synchronous, clipped surrogate loss (Schulman et al. 2017)",
    settings=PPOSpec,
    templates=("dp_only", "ea_t", "e_at", "dp_mp"),
    learner="rayagi.algorithms.ppo.learner:PPOLearner",
    captured_learner="rayagi.algorithms.ppo.captured:CapturedPPOLearner",
    captured_steps="rayagi.algorithms.ppo.captured:CapturedStepsPPOLearner",
    rllib=RllibFace(
        config="PPOConfig",
        algorithm="PPO",
        base="ray.rllib.algorithms.ppo.ppo:PPOConfig",
        names={**RLLIB_NAMES, "clip_param": "clip_ratio"},
        fixed={"use_kl_loss": False, "kl_coeff": 0.0, "vf_clip_param": math.inf, **RLLIB_ACTIONS},
        elsewhere=(),
        takes_batch_sizes=True,
        instead=(
            (
                r"vf_clip_param",
                "RLlib bounds the squared error by it; training(value_clip=) bounds how far the value may move, as in PPO2",
            ),
            (r"use_kl_loss|kl_coeff", 'use training(lr_schedule="kl_adaptive", kl_target=)'),
            (
                r"use_critic|use_gae",
                "rayagi's PPO has a critic and GAE; training(lambda_=1.0) is the plain return",
            ),
        ),
    ),
)
