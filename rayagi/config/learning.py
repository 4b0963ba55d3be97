"""Settings common to all learning algorithms. Those of one algorithm are in its package under rayagi.algorithms."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from rayagi.config.errors import ConfigError

Template = Literal["dp_only", "ea_t", "e_at", "dp_mp", "decoupled", "offline", "program"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningSpec:
    """Settings of every algorithm: rollout, advantage estimation, minibatches, Adam."""

    rollout_length: int = 32
    """T: steps of every environment between updates."""
    num_epochs: int = 4
    """Passes over each rollout."""
    num_minibatches: int = 4
    """Minibatches per epoch; divides rollout_length, since each takes an equal share of every environment's steps. A
    recurrent network's minibatches are of whole sequences."""
    sequence_length: int | None = None
    """Steps over which a recurrent network is trained by backpropagation through time; divides rollout_length, which is the
    default. Longer memory is carried by the state that acting left."""
    gamma: float = 0.99
    """Discount of a reward one step later."""
    gae_lambda: float = 0.95
    """Decay of the trace: lambda of GAE, and of V-trace (Espeholt et al. 2018, remark 2)."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    learning_rate: float = 3e-4
    """Step size of Adam; with a schedule, the first one."""
    lr_schedule: Literal["constant", "linear", "kl_adaptive"] = "constant"
    """linear: to zero over total_env_steps, steps that learners drop included. kl_adaptive: divide or multiply by 1.5 to
    hold target_kl."""
    target_kl: float = 0.01
    """For kl_adaptive: KL divergence of an update from the policy before it."""
    max_grad_norm: float = 0.5
    """Clip the global gradient norm; 0: no clipping."""
    adam_eps: float = 1e-5
    """Epsilon of Adam's denominator."""
    normalize_advantages: bool = True
    """Mean 0 and standard deviation 1 over the rollouts of all trainers."""
    normalize_obs: bool = True
    """Subtract the running mean of each observation and divide by its standard deviation."""
    normalize_rewards: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""
    obs_clip: float = 10.0
    """Clip normalised observations to [-obs_clip, obs_clip]."""

    @property
    def sequences(self) -> int:
        """Sequences of an environment's rollout, for a recurrent network."""
        return self.rollout_length // (self.sequence_length or self.rollout_length)

    @property
    def envs_per_shuffle(self) -> int:
        """The fewest environments whose sequences can be shared equally by all minibatches (actors.rollout)."""
        return self.num_minibatches // math.gcd(self.sequences, self.num_minibatches)

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Every violated rule of these settings alone; ``section`` is their name for users."""
        for name in ("rollout_length", "num_epochs", "num_minibatches"):
            yield from at_least_one(f"{section}.{name}", getattr(self, name))
        yield from at_least_one(f"{section}.sequence_length", self.sequence_length)
        for name in ("learning_rate", "target_kl", "adam_eps", "obs_clip"):
            yield from positive(f"{section}.{name}", getattr(self, name))
        for name in ("value_coef", "entropy_coef", "max_grad_norm"):
            yield from positive(f"{section}.{name}", getattr(self, name), zero=True)
        if not 0 < self.gamma <= 1:
            yield ConfigError(f"{section}.gamma", self.gamma, "must be greater than 0 and at most 1")
        if not 0 <= self.gae_lambda <= 1:
            yield ConfigError(f"{section}.gae_lambda", self.gae_lambda, "must be between 0 and 1")


MOST_LAG = 64
"""Largest bound on the policy lag, in updates."""
MOST_ROLLOUTS = 1024
"""Of an update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AsynchronousSpec(LearningSpec):
    """Settings of algorithms whose collectors and learners run concurrently."""

    max_lag: int = 2
    """Largest policy lag of a rollout, in updates. 0: the synchronous learner. 1: a rollout is collected while the learner
    uses the previous one. 2: the same, and a collector may be an update late. More learns more slowly."""
    on_stale: Literal["wait", "drop", "correct"] = "drop"
    """drop: collectors go on at their own pace; the learner takes rollouts as they come, and drops those older than max_lag.
    wait: an update takes one rollout of every collector, so that all wait for the slowest, and none is too old. correct: as
    drop, and the learner uses all of them (V-trace)."""
    rollouts_per_update: int | None = None
    """Rollouts per update, from any collecting GMI. None: as many as there are collecting GMIs, as always with ``wait``."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Violated rules of every algorithm, and of the lag."""
        yield from LearningSpec.broken_rules(self, section)
        if self.max_lag < 0:
            reason = "must be at least 0 (0: the synchronous learner)"
            yield ConfigError(f"{section}.max_lag", self.max_lag, reason)
        if self.max_lag > MOST_LAG:
            reason = f"must be at most {MOST_LAG}: collectors keep memory for as many rollouts"
            yield ConfigError(f"{section}.max_lag", self.max_lag, reason)
        yield from at_least_one(f"{section}.rollouts_per_update", self.rollouts_per_update)
        if self.rollouts_per_update is not None and self.rollouts_per_update > MOST_ROLLOUTS:
            reason = (
                f"must be at most {MOST_ROLLOUTS}: collectors and learners keep memory for as many rollouts"
            )
            yield ConfigError(f"{section}.rollouts_per_update", self.rollouts_per_update, reason)
        if (self.on_stale == "wait" or self.max_lag == 0) and self.rollouts_per_update is not None:
            yield ConfigError(
                f"{section}.rollouts_per_update",
                self.rollouts_per_update,
                f"cannot be chosen with {section}.on_stale = 'wait' or {section}.max_lag = 0: an update then takes one "
                "rollout of every collecting GMI",
                "leave it out, or allow a lag with on_stale 'drop' or 'correct'",
            )


@dataclass(frozen=True, kw_only=True)
class OnePassSpec(LearningSpec):
    """Settings of algorithms that learn from each rollout once, by one step of RMSProp.

    Without __slots__, so that a class may have another base with settings too.
    """

    num_epochs: int = 1
    """Always 1: each rollout is learned from once."""
    num_minibatches: int = 1
    """Always 1: one step on all samples."""
    gae_lambda: float = 1.0
    """Decay of the trace: lambda of GAE, and of V-trace; 1, the papers': n-step returns."""
    normalize_advantages: bool = False
    """An option that the papers do not have: mean 0 and standard deviation 1 over the rollouts of all trainers."""
    rms_decay: float = 0.99
    """Decay of RMSProp's mean of squared gradients."""
    rms_eps: float = 1e-7
    """Epsilon of RMSProp's denominator, inside the root. The papers' 0.01 to 0.1 are for losses summed over a batch of
    Atari; with the mean, as here, gradients are smaller by its size."""

    def one_pass_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of one step per rollout, beside those of every algorithm."""
        yield from positive(f"{section}.rms_eps", self.rms_eps)
        if not 0 <= self.rms_decay < 1:
            yield ConfigError(f"{section}.rms_decay", self.rms_decay, "must be at least 0 and less than 1")
        for name, instead in (
            ("num_epochs", "use algorithm 'appo' for several passes"),
            ("num_minibatches", "use a shorter rollout_length or fewer environments for smaller steps"),
        ):
            if getattr(self, name) != 1:
                reason = "must be 1: each rollout is one step"
                yield ConfigError(f"{section}.{name}", getattr(self, name), reason, instead)
        if self.lr_schedule == "kl_adaptive":
            reason = "is for several steps on a rollout"
            yield ConfigError(
                f"{section}.lr_schedule", self.lr_schedule, reason, "use 'constant' or 'linear'"
            )
        reason = "means nothing here: the optimiser is RMSProp, with a fixed or linear step size"
        suggestions = {"adam_eps": f"use {section}.rms_eps", "target_kl": "leave it out"}
        yield from at_default(section, self, suggestions, reason)


ONE_PASS_PRESET = {
    "rollout_length": 16,
    "num_epochs": 1,
    "num_minibatches": 1,
    "lr_schedule": "constant",
    "target_kl": LearningSpec().target_kl,
    "gae_lambda": 0.95,
}
"""Settings of these algorithms on every task. Each has a step size of its own, by trials (experiments/learning)."""


def trace_bounds(section: str, rho_bar: float, c_bar: float) -> Iterator[ConfigError]:
    """Rules of V-trace's bounds."""
    for name, bound in (("rho_bar", rho_bar), ("c_bar", c_bar)):
        yield from positive(f"{section}.{name}", bound)
    if c_bar > rho_bar:
        reason = f"must be at most {section}.rho_bar = {rho_bar} (Espeholt et al. 2018, §4.1)"
        yield ConfigError(f"{section}.c_bar", c_bar, reason)


def at_default(
    section: str, spec: LearningSpec, suggestions: Mapping[str, str], reason: str
) -> Iterator[ConfigError]:
    """Rule: settings that mean nothing for an algorithm have their defaults.

    Args:
        section: the settings' name for users
        spec: the settings
        suggestions: of each such setting, what to do
        reason: why it means nothing
    """
    defaults = {field.name: field.default for field in fields(spec)}
    for name, suggestion in suggestions.items():
        if getattr(spec, name) != defaults[name]:
            yield ConfigError(f"{section}.{name}", getattr(spec, name), reason, suggestion)


def at_least_one(path: str, value: int | str | None) -> Iterator[ConfigError]:
    """Rule: an integer, if given, is at least 1."""
    if isinstance(value, int) and value < 1:
        yield ConfigError(path, value, "must be at least 1")


def positive(path: str, value: float | None, *, zero: bool = False) -> Iterator[ConfigError]:
    """Rule: a number, if given, is finite and greater than 0 (or 0, with ``zero``)."""
    if value is None:
        return
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        yield ConfigError(path, value, f"must be finite and {'at least' if zero else 'greater than'} 0")
