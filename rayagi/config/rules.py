"""Rules on a RunSpec's values and between its sections. ``checked`` is the only door from a spec to a run."""

from __future__ import annotations

import math
from collections.abc import Iterator

from collectives.compositions import KNOWN_NAMES, is_name
from rayagi.config.errors import ConfigError
from rayagi.config.spec import Auto, EvaluationSpec, GmiSpec, NetworkSpec, PPOSpec, RunSpec

_LARGEST_SEED = 2**31 - 1


def checked(spec: RunSpec) -> RunSpec:
    """``spec`` itself, once every rule holds.

    Raises:
        ConfigError: the first rule that does not hold, with the value, the limit and a way out.
    """
    for error in broken_rules(spec):
        raise error
    return spec


def broken_rules(spec: RunSpec) -> Iterator[ConfigError]:
    """Every rule that ``spec`` breaks."""
    if not spec.env.id.strip():
        yield ConfigError("env.id", spec.env.id, "must name an environment", "`rayagi envs` lists them")
    yield from _gmi(spec.gmi)
    yield from _network(spec.network)
    yield from _ppo(spec.ppo, spec.gmi.num_envs)
    yield from _schedule(spec)
    yield from _evaluation(spec.evaluation)
    if not 0 <= spec.seed <= _LARGEST_SEED:
        yield ConfigError("seed", spec.seed, f"must be between 0 and {_LARGEST_SEED}")
    if spec.total_env_steps is not None:
        yield from _at_least_one("total_env_steps", spec.total_env_steps)


def nearest_divisors(number: int, wanted: int) -> tuple[int, ...]:
    """The divisors of ``number`` next below and next above ``wanted``; one where there is no other."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return tuple(below + above)


def _at_least_one(path: str, value: int | Auto | None) -> Iterator[ConfigError]:
    if isinstance(value, int) and value < 1:
        yield ConfigError(path, value, "must be at least 1")


def _positive(path: str, value: float | None, *, zero: bool = False) -> Iterator[ConfigError]:
    if value is None:
        return
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        yield ConfigError(path, value, f"must be finite and {'at least' if zero else 'greater than'} 0")


def _gmi(gmi: GmiSpec) -> Iterator[ConfigError]:
    for name in ("num_gmis", "gmis_per_gpu", "num_envs", "threads_per_gmi"):
        yield from _at_least_one(f"gmi.{name}", getattr(gmi, name))
    for name in ("reserve_timeout_s", "collective_timeout_s"):
        yield from _positive(f"gmi.{name}", getattr(gmi, name))
    if gmi.template == "program":
        yield ConfigError(
            "gmi.template",
            gmi.template,
            "is for workloads of other kinds (rayagi.programs)",
            "use 'dp_only' to train",
        )
    if gmi.slices is not None:
        yield from _slices(gmi, gmi.slices)
    if gmi.num_gmis is not None and gmi.gmis_per_gpu is not None:
        yield ConfigError(
            "gmi.gmis_per_gpu",
            gmi.gmis_per_gpu,
            f"cannot be given together with gmi.num_gmis = {gmi.num_gmis}",
            "give num_gmis for the number in all, or gmis_per_gpu for the number on each GPU",
        )
    if isinstance(gmi.gmis_per_gpu, int) and gmi.backend == "cpu":
        yield ConfigError(
            "gmi.gmis_per_gpu", gmi.gmis_per_gpu, "means nothing with gmi.backend = 'cpu'", "use gmi.num_gmis"
        )
    if gmi.composition != "auto" and not is_name(gmi.composition):
        yield ConfigError(
            "gmi.composition", gmi.composition, "is not a composition", f"use auto, {KNOWN_NAMES}"
        )


def _slices(gmi: GmiSpec, slices: tuple[float, ...]) -> Iterator[ConfigError]:
    if not slices or any(not math.isfinite(size) or size <= 0 for size in slices):
        yield ConfigError(
            "gmi.slices", slices, "must be a list of sizes greater than 0", "e.g. [3, 1] for 3 cores and 1"
        )
    for name, agreeing in (("num_gmis", len(slices)), ("gmis_per_gpu", None)):
        value = getattr(gmi, name)
        if value not in (None, agreeing):
            yield ConfigError(
                f"gmi.{name}", value, f"contradicts gmi.slices, which are {len(slices)} GMIs", "leave it out"
            )
    if gmi.num_envs == "auto":
        yield ConfigError(
            "gmi.num_envs", "auto", "is searched for equal GMIs only", "give a number with gmi.slices"
        )


def _network(network: NetworkSpec) -> Iterator[ConfigError]:
    if not network.hidden:
        yield ConfigError("network.hidden", network.hidden, "must have at least one layer")
    for i, size in enumerate(network.hidden):
        yield from _at_least_one(f"network.hidden[{i}]", size)
    if not math.isfinite(network.initial_log_std):
        yield ConfigError("network.initial_log_std", network.initial_log_std, "must be finite")


def _ppo(ppo: PPOSpec, num_envs: int | Auto) -> Iterator[ConfigError]:
    counts = ("rollout_length", "num_epochs", "num_minibatches")
    for name in counts:
        yield from _at_least_one(f"ppo.{name}", getattr(ppo, name))
    for name in ("clip_ratio", "value_clip", "learning_rate", "target_kl", "adam_eps", "obs_clip"):
        yield from _positive(f"ppo.{name}", getattr(ppo, name))
    for name in ("value_coef", "entropy_coef", "max_grad_norm"):
        yield from _positive(f"ppo.{name}", getattr(ppo, name), zero=True)
    if not 0 < ppo.gamma <= 1:
        yield ConfigError("ppo.gamma", ppo.gamma, "must be greater than 0 and at most 1")
    if not 0 <= ppo.gae_lambda <= 1:
        yield ConfigError("ppo.gae_lambda", ppo.gae_lambda, "must be between 0 and 1")
    if all(getattr(ppo, name) >= 1 for name in counts):
        yield from _minibatches(ppo, num_envs)


def _minibatches(ppo: PPOSpec, num_envs: int | Auto) -> Iterator[ConfigError]:
    if ppo.rollout_length % ppo.num_minibatches:
        offered = " or ".join(str(d) for d in nearest_divisors(ppo.rollout_length, ppo.num_minibatches))
        smaller = ppo.rollout_length // ppo.num_minibatches * ppo.num_minibatches
        lengths = [length for length in (smaller, smaller + ppo.num_minibatches) if length]
        yield ConfigError(
            "ppo.num_minibatches",
            ppo.num_minibatches,
            f"must divide ppo.rollout_length = {ppo.rollout_length}",
            f"use num_minibatches {offered}, or rollout_length {' or '.join(map(str, lengths))}",
        )
    elif (
        num_envs != "auto"
        and ppo.normalize_advantages
        and ppo.rollout_length * num_envs // ppo.num_minibatches == 1
    ):
        yield ConfigError(
            "ppo.num_minibatches",
            ppo.num_minibatches,
            "leaves minibatches of one step, whose advantage cannot be normalised",
            "use fewer minibatches, a longer rollout, more environments, or ppo.normalize_advantages = false",
        )


def _schedule(spec: RunSpec) -> Iterator[ConfigError]:
    if spec.ppo.lr_schedule == "linear" and spec.total_env_steps is None:
        yield ConfigError(
            "ppo.lr_schedule",
            "linear",
            "needs to know where the run ends",
            "give total_env_steps (rayagi train --env-steps), or use 'constant' or 'kl_adaptive'",
        )


def _evaluation(evaluation: EvaluationSpec) -> Iterator[ConfigError]:
    if evaluation.interval < 0:
        yield ConfigError("evaluation.interval", evaluation.interval, "must be at least 0 (0: no evaluation)")
    yield from _at_least_one("evaluation.num_episodes", evaluation.num_episodes)
