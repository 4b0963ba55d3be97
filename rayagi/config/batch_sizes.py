"""Converts RLlib's batch sizes to rollout length and number of minibatches.

In ``dp_only`` a GMI is what RLlib calls a Learner, and it collects its own batch of T * N steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from placement.errors import counted
from rayagi.config.errors import NO_VALUE, ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenSizes:
    """Sizes set by the user; None: not set."""

    rollout_length: int | None = None
    num_minibatches: int | None = None
    train_batch_size: int | None = None
    """Steps per iteration of all GMIs."""
    train_batch_size_per_learner: int | None = None
    """Steps per iteration of one GMI."""
    minibatch_size: int | None = None
    """Steps per minibatch of one GMI."""


def rollout_and_minibatches(
    given: GivenSizes, *, num_envs: int, num_gmis: int | None, preset_length: int, preset_minibatches: int
) -> tuple[int, int]:
    """Rollout length T and number of minibatches that satisfy all given sizes.

    If only the length is given, the preset's number of minibatches is lowered until it divides the length.

    Raises:
        ConfigError: the sizes contradict each other, or do not fit N environments.
    """
    length = _rollout_length(given, num_envs, num_gmis)
    minibatches = _minibatches(given, num_envs, preset_length if length is None else length)
    if minibatches is None:
        minibatches = preset_minibatches if length is None else gcd(length, preset_minibatches)
    return preset_length if length is None else length, minibatches


def _rollout_length(given: GivenSizes, num_envs: int, num_gmis: int | None) -> int | None:
    lengths: list[tuple[str, int]] = []
    if given.rollout_length is not None:
        lengths.append((f"rollout_length={given.rollout_length}", given.rollout_length))
    if given.train_batch_size_per_learner is not None:
        name = "training(train_batch_size_per_learner=)"
        lengths.append(
            (name, _per_environment(name, given.train_batch_size_per_learner, num_envs, "gmi(num_envs=)"))
        )
    if given.train_batch_size is not None:
        name = "training(train_batch_size=)"
        if num_gmis is None:
            raise ConfigError(
                name,
                given.train_batch_size,
                "is shared by all GMIs, whose number is not given",
                "use gmi(num_gmis=) too, or train_batch_size_per_learner, the steps of one GMI",
            )
        total = num_gmis * num_envs
        lengths.append((name, _per_environment(name, given.train_batch_size, total, "num_gmis * num_envs")))
    if len({length for _, length in lengths}) > 1:
        texts = [f"{name} means {counted(length, 'step')} of each environment" for name, length in lengths]
        raise ConfigError(
            "training()", NO_VALUE, "gives sizes that disagree: " + ", ".join(texts), "give one of them"
        )
    return lengths[0][1] if lengths else None


def _per_environment(name: str, size: int, environments: int, what: str) -> int:
    if size < 1 or size % environments:
        below = size // environments * environments
        offers = [multiple for multiple in (below, below + environments) if multiple > 0]
        raise ConfigError(
            name,
            size,
            f"must be a multiple of {what} = {environments}",
            f"use {' or '.join(map(str, offers))}",
        )
    return size // environments


def _minibatches(given: GivenSizes, num_envs: int, length: int) -> int | None:
    size = given.minibatch_size
    if size is None:
        return given.num_minibatches
    # Each minibatch takes an equal share of every environment's steps.
    sizes = [num_envs * steps for steps in range(1, length + 1) if length % steps == 0]
    if size not in sizes:
        offers = [str(s) for s in sorted(sorted(sizes, key=lambda s: abs(s - size))[:2])]
        raise ConfigError(
            "training(minibatch_size=)",
            size,
            f"must be num_envs = {num_envs} times a divisor of the rollout length {length}",
            f"use {' or '.join(offers)}",
        )
    minibatches = length * num_envs // size
    if given.num_minibatches not in (None, minibatches):
        raise ConfigError(
            "training(minibatch_size=)",
            size,
            f"means {counted(minibatches, 'minibatch', 'minibatches')}, but num_minibatches is {given.num_minibatches}",
            "give one of them",
        )
    return minibatches
