"""Validation rules of a RunSpec, within and between sections. Every run passes ``checked``."""

from __future__ import annotations

import math
from collections.abc import Iterator

from actors.protocols import ActionSpec, EnvInfo
from collectives.compositions import KNOWN_NAMES, is_composition_name
from placement.errors import counted
from placement.role_layout import OVERLAPPED_TEMPLATES
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.errors import ConfigError
from rayagi.config.learning import LearningSpec, at_least_one, positive
from rayagi.config.off_policy import OffPolicySpec
from rayagi.config.offline import OfflineSpec
from rayagi.config.spec import Auto, EvaluationSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.models.columns import policy_view

_LARGEST_SEED = 2**31 - 1
MOST_LEARNERS = 16
"""MAX_CONSUMERS of collectives.experience.file_layout, whose import loads torch."""
NATURE_LEAST_PIXELS = 36
"""Of an image's height and width: below, the third convolution of the Nature CNN has nothing left."""


def checked(spec: RunSpec) -> RunSpec:
    """Return ``spec`` if every rule holds.

    Raises:
        ConfigError: the first violated rule, with value, limit and suggestion.
    """
    for error in broken_rules(spec):
        raise error
    return spec


def refuse_unfit_network(network: NetworkSpec, info: EnvInfo) -> None:
    """Refuse a network that cannot take the environment's observations.

    Raises:
        ConfigError: images too small for the encoder, columns that do not exist, a head for other actions, or a user's
            module that cannot be used.
    """
    refuse_unfit_head(network, info)
    if network.module is not None:
        from rayagi.models.networks import make_model  # imports torch, which takes seconds

        make_model(info, network)
        return
    policy_view(info, network.critic_only)
    for part in info.obs_parts:
        if part.is_image and network.cnn == "nature":
            _, height, width = part.channels_height_width
            if min(height, width) < NATURE_LEAST_PIXELS:
                raise ConfigError(
                    "network.cnn",
                    "nature",
                    f"needs images of at least {NATURE_LEAST_PIXELS} x {NATURE_LEAST_PIXELS} pixels, and {info.env_id} has "
                    f"{height} x {width}",
                    "use network.cnn = 'impala', or larger images",
                )


def refuse_unfit_env(spec: RunSpec, info: EnvInfo) -> None:
    """Refuse an environment that the run's algorithm or networks cannot take.

    Raises:
        ConfigError: as of ``refuse_unfit_network``, or the algorithm cannot learn it.
    """
    for error in DEFINITIONS[spec.algorithm].unfit_env(spec.algorithm, info):
        raise error
    refuse_unfit_network(spec.network, info)


def refuse_unfit_head(network: NetworkSpec, info: EnvInfo) -> None:
    """Refuse a head that cannot give the environment's actions.

    Raises:
        ConfigError: the head, the space, and what fits it.
    """
    action = info.action
    bounded = [
        math.isfinite(low) and math.isfinite(high) and low < high
        for low, high in zip(action.low, action.high, strict=True)
    ]
    fitting = ["auto"]
    if action.kind == "continuous":
        fitting += ["gaussian"] + (["squashed_gaussian"] if bounded and all(bounded) else [])
    if action.kind == "multi_discrete" and set(action.choices) == {2}:
        fitting.append("bernoulli")
    if network.head in fitting:
        return
    suggestion = f"use {' or '.join(map(repr, fitting))}"
    if network.head == "squashed_gaussian" and action.kind == "continuous":
        first = bounded.index(False) if bounded else 0
        low, high = (action.low[first], action.high[first]) if bounded else (-math.inf, math.inf)
        reason = f"needs a box with finite bounds, and action {first} of {info.env_id} is between {low:g} and {high:g}"
        suggestion += ", or wrap the environment (gymnasium.wrappers.RescaleAction)"
    else:
        wanted = (
            "a MultiBinary or choices of two options each"
            if network.head == "bernoulli"
            else "a box of reals"
        )
        reason = f"is for {wanted}, and {info.env_id}'s actions are {_space_text(action)}"
    raise ConfigError("network.head", network.head, reason, suggestion)


def _space_text(action: ActionSpec) -> str:
    if action.kind == "continuous":
        return f"a box of {counted(action.dim, 'real')}"
    options = action.choices or (action.num_choices,)
    return f"choices of {', '.join(map(str, options))} options"


def broken_rules(spec: RunSpec) -> Iterator[ConfigError]:
    """Every violated rule; only the first one if the algorithm is unknown or has the settings of another."""
    unknown = list(_algorithm(spec))
    if unknown:
        yield from unknown
        return
    if not spec.env.id.strip():
        yield ConfigError("env.id", spec.env.id, "must name an environment", "`rayagi envs` lists them")
    if not 0 <= spec.env.max_unstable_share <= 1:
        yield ConfigError("env.max_unstable_share", spec.env.max_unstable_share, "must be between 0 and 1")
    yield from _gmi(spec.gmi)
    yield from _template(spec)
    yield from _network(spec.network)
    if DEFINITIONS[spec.algorithm].needs_separate_networks:
        yield from _separate(spec)
    yield from DEFINITIONS[spec.algorithm].unfit_network(spec.algorithm, spec.network)
    yield from spec.learning.broken_rules(spec.algorithm)
    if min(spec.learning.rollout_length, spec.learning.num_minibatches) >= 1:
        if spec.network.core == "none":
            yield from _minibatches(spec.algorithm, spec.learning, spec.gmi.num_envs)
        else:
            yield from _sequences(spec.algorithm, spec.learning, spec.gmi)
    if spec.learning.lr_schedule == "linear" and spec.total_env_steps is None:
        yield ConfigError(
            f"{spec.algorithm}.lr_schedule",
            "linear",
            "needs to know where the run ends",
            "give total_env_steps (rayagi train --env-steps), or use 'constant' or 'kl_adaptive'",
        )
    yield from _data(spec)
    yield from _evaluation(spec.evaluation)
    if not 0 <= spec.seed <= _LARGEST_SEED:
        yield ConfigError("seed", spec.seed, f"must be between 0 and {_LARGEST_SEED}")
    if spec.total_env_steps is not None:
        yield from at_least_one("total_env_steps", spec.total_env_steps)


def _algorithm(spec: RunSpec) -> Iterator[ConfigError]:
    definition = DEFINITIONS.get(spec.algorithm)
    if definition is None:
        yield ConfigError("algorithm", spec.algorithm, f"must be one of {', '.join(map(repr, DEFINITIONS))}")
    elif type(spec.learning) is not definition.settings:
        yield ConfigError(
            "learning",
            type(spec.learning).__name__,
            f"are not the settings of algorithm = {spec.algorithm!r}",
            f"give a {definition.settings.__name__}",
        )


def nearest_divisors(number: int, wanted: int) -> tuple[int, ...]:
    """The divisors of ``number`` next below and next above ``wanted``, if they exist."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return tuple(below + above)


def _gmi(gmi: GmiSpec) -> Iterator[ConfigError]:
    for name in ("num_gmis", "gmis_per_gpu", "num_envs", "threads_per_gmi", "num_learners"):
        yield from at_least_one(f"gmi.{name}", getattr(gmi, name))
    for name in ("reserve_timeout_s", "collective_timeout_s", "hang_timeout_s"):
        yield from positive(f"gmi.{name}", getattr(gmi, name))
    if gmi.slices == "auto":
        yield from _searched_sizes(gmi)
    elif gmi.slices is not None:
        yield from _slices(gmi, gmi.slices)
    if len(set(gmi.left_out)) < len(gmi.left_out) or min(gmi.left_out, default=0) < 0:
        yield ConfigError(
            "gmi.left_out", gmi.left_out, "must be different indices of GMIs, from 0", "e.g. [1]"
        )
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
    if gmi.composition != "auto" and not is_composition_name(gmi.composition):
        yield ConfigError(
            "gmi.composition", gmi.composition, "is not a composition", f"use auto, {KNOWN_NAMES}"
        )


def _searched_sizes(gmi: GmiSpec) -> Iterator[ConfigError]:
    if gmi.template != "dp_only" or gmi.wants_search or gmi.left_out or gmi.gmis_per_gpu is not None:
        yield ConfigError(
            "gmi.slices",
            "auto",
            "is for dp_only with a number of environments, and with num_gmis or the default number of GMIs",
            "leave the other settings of gmi out, or give sizes",
        )


def _template(spec: RunSpec) -> Iterator[ConfigError]:
    gmi, possible = spec.gmi, DEFINITIONS[spec.algorithm].templates
    if gmi.template == "program":
        yield ConfigError(
            "gmi.template",
            gmi.template,
            "is for workloads of other kinds (rayagi.programs)",
            f"use {possible[0]!r} to train",
        )
        return
    if gmi.template == "auto":
        yield from _chosen_template(gmi)
        return
    if gmi.template not in possible:
        others = [name for name, other in DEFINITIONS.items() if gmi.template in other.templates]
        yield ConfigError(
            "gmi.template",
            gmi.template,
            f"does not go with algorithm = {spec.algorithm!r}",
            f"use {' or '.join(map(repr, possible))}, or algorithm {' or '.join(map(repr, others))}",
        )
    if gmi.wants_search and (gmi.template, spec.algorithm) != ("dp_only", "ppo"):
        yield ConfigError(
            "gmi.num_gmis" if gmi.num_gmis == "auto" else "gmi.num_envs",
            "auto",
            "is searched for ppo on dp_only only",
            "give a number",
        )
    for name in ("replan", "left_out"):
        if getattr(gmi, name) and gmi.template != "dp_only":
            yield ConfigError(
                f"gmi.{name}",
                getattr(gmi, name),
                "is for dp_only, whose GMIs are alike",
                "leave it out (decoupled replaces GMIs that are lost by itself)",
            )
    if gmi.left_out and gmi.wants_search:
        yield ConfigError(
            "gmi.left_out",
            gmi.left_out,
            "counts the GMIs of a plan with numbers, not of a search",
            "leave it out",
        )
    if gmi.num_learners is not None:
        yield from _learners(gmi, gmi.num_learners)


def _chosen_template(gmi: GmiSpec) -> Iterator[ConfigError]:
    if gmi.wants_search or gmi.replan or gmi.left_out:
        yield ConfigError(
            "gmi.template",
            "auto",
            "is chosen for given numbers of GMIs and environments, and without replan and left_out, which are for dp_only",
            "give the numbers, or a template",
        )


def _learners(gmi: GmiSpec, num_learners: int) -> Iterator[ConfigError]:
    if gmi.template == "dp_only":
        yield ConfigError(
            "gmi.num_learners",
            num_learners,
            "means nothing on dp_only, where every GMI trains",
            "leave it out",
        )
    elif isinstance(gmi.num_gmis, int) and num_learners >= gmi.num_gmis:
        yield ConfigError(
            "gmi.num_learners",
            num_learners,
            f"leaves no GMI of gmi.num_gmis = {gmi.num_gmis} to collect experience",
            f"use at most {gmi.num_gmis - 1}" if gmi.num_gmis > 1 else "use at least 2 GMIs",
        )
    elif gmi.template in OVERLAPPED_TEMPLATES and num_learners > MOST_LEARNERS:
        yield ConfigError(
            "gmi.num_learners",
            num_learners,
            f"is too many: a collector sends to at most {MOST_LEARNERS} learners",
            f"use at most {MOST_LEARNERS}",
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
                f"gmi.{name}",
                value,
                f"contradicts gmi.slices, which are {counted(len(slices), 'GMI')}",
                "leave it out",
            )
    if gmi.num_envs == "auto":
        yield ConfigError(
            "gmi.num_envs", "auto", "is searched for equal GMIs only", "give a number with gmi.slices"
        )


def _network(network: NetworkSpec) -> Iterator[ConfigError]:
    if not network.hidden:
        yield ConfigError("network.hidden", network.hidden, "must have at least one layer")
    for i, size in enumerate(network.hidden):
        yield from at_least_one(f"network.hidden[{i}]", size)
    yield from at_least_one("network.core_size", network.core_size)
    if network.module is not None:
        for name, value, without in (
            ("core", network.core, "none"),
            ("shared", network.shared, False),
            ("critic_only", network.critic_only, ()),
        ):
            if value != without:
                yield ConfigError(
                    f"network.{name}",
                    value,
                    f"means nothing with network.module = {network.module!r}, which is the whole network",
                    "leave one of them out",
                )
    elif network.module_kwargs:
        reason = "are arguments of network.module, and none is given"
        yield ConfigError("network.module_kwargs", dict(network.module_kwargs), reason, "leave them out")
    if network.shared and network.critic_only:
        yield ConfigError(
            "network.critic_only",
            network.critic_only,
            "cannot be kept from a policy that shares its layers with the value",
            "use network.shared = false",
        )
    if network.head == "squashed_gaussian" and not network.free_log_std:
        yield ConfigError(
            "network.free_log_std",
            False,
            "is for network.head = 'gaussian': a squashed Gaussian's log standard deviation does not depend on the state",
            "leave one of them out",
        )
    if not math.isfinite(network.initial_log_std):
        yield ConfigError("network.initial_log_std", network.initial_log_std, "must be finite")


def _separate(spec: RunSpec) -> Iterator[ConfigError]:
    """Rules of algorithms that step policy and value network on their own."""
    if spec.network.module is not None:
        yield ConfigError(
            "network.module",
            spec.network.module,
            f"does not go with algorithm = {spec.algorithm!r}, which steps policy and value on their own",
            "use algorithm 'ppo'",
        )
    if spec.network.shared:
        yield ConfigError(
            "network.shared",
            True,
            f"does not go with algorithm = {spec.algorithm!r}: its steps on the value would also move the policy",
            "use network.shared = false, or algorithm 'ppo'",
        )


def _minibatches(section: str, learning: LearningSpec, num_envs: int | Auto) -> Iterator[ConfigError]:
    if learning.rollout_length % learning.num_minibatches:
        offered = " or ".join(
            str(d) for d in nearest_divisors(learning.rollout_length, learning.num_minibatches)
        )
        smaller = learning.rollout_length // learning.num_minibatches * learning.num_minibatches
        lengths = [length for length in (smaller, smaller + learning.num_minibatches) if length]
        yield ConfigError(
            f"{section}.num_minibatches",
            learning.num_minibatches,
            f"must divide {section}.rollout_length = {learning.rollout_length}",
            f"use num_minibatches {offered}, or rollout_length {' or '.join(map(str, lengths))}",
        )
    elif (
        num_envs != "auto"
        and learning.normalize_advantages
        and learning.rollout_length * num_envs // learning.num_minibatches == 1
    ):
        yield ConfigError(
            f"{section}.num_minibatches",
            learning.num_minibatches,
            "leaves minibatches of one step, whose advantage cannot be normalised",
            f"use fewer minibatches, a longer rollout, more environments, or {section}.normalize_advantages = false",
        )


def _sequences(section: str, learning: LearningSpec, gmi: GmiSpec) -> Iterator[ConfigError]:
    """Rules of a recurrent network's minibatches, which are of whole sequences."""
    length = learning.sequence_length or learning.rollout_length
    if length < 1:
        return
    if learning.rollout_length % length:
        yield ConfigError(
            f"{section}.sequence_length",
            length,
            f"must divide {section}.rollout_length = {learning.rollout_length}",
            f"use {' or '.join(map(str, nearest_divisors(learning.rollout_length, length)))}",
        )
        return
    group = learning.envs_per_shuffle
    if gmi.num_envs != "auto" and gmi.num_envs % group:
        yield ConfigError(
            f"{section}.num_minibatches",
            learning.num_minibatches,
            f"cannot share the {learning.rollout_length // length} sequences of each of gmi.num_envs = {gmi.num_envs} "
            "environments equally",
            f"make gmi.num_envs a multiple of {group}, or {section}.sequence_length shorter",
        )


def _data(spec: RunSpec) -> Iterator[ConfigError]:
    """Rules of learning from a dataset. An offline algorithm needs one, and simulates nothing; the replay of an off-policy
    algorithm may begin with one."""
    path, offline = spec.data.path, isinstance(spec.learning, OfflineSpec)
    if spec.data.obs_keys and path is None:
        reason = "are parts of a dataset's observations, and there is none"
        yield ConfigError("data.obs_keys", spec.data.obs_keys, reason, "give --dataset DIR too")
    if not isinstance(spec.learning, OfflineSpec | OffPolicySpec) and path is not None:
        names = [
            name
            for name, each in DEFINITIONS.items()
            if issubclass(each.settings, OfflineSpec | OffPolicySpec)
        ]
        reason = f"does not go with algorithm = {spec.algorithm!r}, which learns from its own experience"
        yield ConfigError(
            "data.path", path, reason, f"leave it out, or use algorithm {' or '.join(map(repr, names))}"
        )
    if not offline:
        return
    if not (path or "").strip():
        yield ConfigError(
            "data.path",
            path,
            f"must name the dataset that algorithm = {spec.algorithm!r} learns from",
            "give --dataset DIR; `rayagi serve RUN --out DIR` records one",
        )
    if spec.total_env_steps is not None:
        reason = "means nothing for an offline algorithm, which makes no environment steps"
        yield ConfigError("total_env_steps", spec.total_env_steps, reason, "use --iterations or --time")
    if spec.network.core != "none":
        reason = "needs sequences, and offline algorithms learn from single timesteps"
        yield ConfigError("network.core", spec.network.core, reason, "use network.core = 'none'")


def _evaluation(evaluation: EvaluationSpec) -> Iterator[ConfigError]:
    if evaluation.interval < 0:
        yield ConfigError("evaluation.interval", evaluation.interval, "must be at least 0 (0: no evaluation)")
    yield from at_least_one("evaluation.num_episodes", evaluation.num_episodes)
