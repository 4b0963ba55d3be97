"""Metric catalogue: name, unit, merge rule over GMIs and meaning of every metric.

Progress bar, CSV, TensorBoard, Ray metrics, RLlib results and reports all use these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.protocols import IterationResult
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.errors import ConfigError

Merge = Literal["sum", "mean", "max"]
Group = Literal["progress", "time", "learning", "replay", "resources", "faults", "evaluation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One measured quantity of a run."""

    name: str
    unit: str
    help: str
    group: Group
    kind: Literal["counter", "gauge"] = "gauge"
    """counter: adds up over a run. gauge: the latest value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GmiMetric(Metric):
    """A metric that every GMI measures itself."""

    merge: Merge
    """How the GMIs' values are merged."""


def _of_gmis(group: Group, unit: str, merge: Merge, **helps: str) -> Iterator[GmiMetric]:
    """Metrics of one group, unit and merge rule: name="meaning". Those that are summed count up over a run."""
    kind: Literal["counter", "gauge"] = "counter" if merge == "sum" else "gauge"
    for name, meaning in helps.items():
        yield GmiMetric(name=name, unit=unit, help=meaning, group=group, kind=kind, merge=merge)


def _of_driver(group: Group, unit: str, **helps: str) -> Iterator[Metric]:
    """Metrics of one group and unit: name="meaning"."""
    return (Metric(name=name, unit=unit, help=meaning, group=group) for name, meaning in helps.items())


CATALOGUE: tuple[GmiMetric, ...] = (
    *_of_gmis("progress", "steps", "sum", env_steps="environment steps of this iteration"),
    *_of_gmis("progress", "episodes", "sum", episodes="episodes that ended in this iteration"),
    *_of_gmis("time", "s", "max", iteration_s="wall time of the iteration"),
    *_of_gmis("time", "s", "mean",
        simulate_s="time in the simulator; includes inference and sampling where one call does both",
        act_s="time in policy inference and sampling; 0 where it is in simulate_s",
        update_s="time in the learner, without synchronisation",
        sync_s="time in collectives, waiting for other GMIs included",
        exchange_s="time exchanging steps between simulator and agent GMIs, waiting for the other included",
        wait_s="time waiting for a free slot (collectors), for experience (learners), or drawing from a dataset",
        queue_s="time that the training thread could have run, but others were on its cores; included in the times above",
    ),
    *_of_gmis("progress", "steps", "sum",
        train_samples="environment steps consumed by learners in GMIs of their own, or by an offline algorithm",
        stale_samples="environment steps dropped as too old",
    ),
    *_of_gmis("learning", "", "mean",
        policy_loss="loss of the policy: clipped surrogate, or the algorithm's own",
        value_loss="value loss before its coefficient",
    ),
    *_of_gmis("learning", "nats", "mean",
        entropy="mean policy entropy",
        approx_kl="estimate of KL(old, new), mean((r - 1) - log r)",
    ),
    *_of_gmis("learning", "", "mean",
        clip_fraction="share of samples whose ratio was clipped",
        explained_variance="1 - Var(returns - values) / Var(returns)",
        grad_norm="global gradient norm before clipping",
        learning_rate="step size of this iteration",
        action_std="mean standard deviation of a Gaussian policy",
        importance_ratio="mean of pi / mu: learner's policy before the update over the behaviour policy",
        importance_truncated="share of samples whose pi / mu V-trace truncated (above rho_bar)",
    ),
    *_of_gmis("learning", "updates", "mean",
        policy_lag_mean="policy lag: updates since the behaviour policy, mean over an update's samples",
    ),
    *_of_gmis("learning", "updates", "max",
        policy_lag_max="policy lag: updates since the behaviour policy, maximum over an update's samples",
        policy_lag_bound="policy lag beyond which experience is not learned from; absent without a bound",
    ),
    *(
        metric
        for each in dict.fromkeys(each for definition in DEFINITIONS.values() for each in definition.metrics)
        for metric in _of_gmis("learning", each.unit, "mean", **{each.name: each.help})
    ),
    *_of_gmis("replay", "rows", "sum",
        replay_inserts="rows inserted into experience replay",
        replay_samples="rows drawn from experience replay, replacement included",
        replay_evictions="rows overwritten by others",
    ),
    *(
        GmiMetric(name=name, unit=unit, merge="sum", group="replay", help=meaning)
        for name, unit, meaning in (
            ("replay_rows", "rows", "rows that can be drawn"),
            ("replay_memory_bytes", "bytes", "memory of the replay"),
            ("replay_disk_bytes", "bytes", "rows in files: memory-mapped, or spilled beyond the budget"),
        )
    ),
    *_of_gmis("replay", "transitions", "sum",
        replay_transitions="transitions that an off-policy algorithm can draw; a row may have several",
        replay_new_transitions="transitions inserted",
    ),
    *_of_gmis("replay", "rows", "max",
        replay_shard_samples="rows drawn from the shard that most are drawn from",
        replay_staleness_p95="95th percentile over drawn rows: rows drawn between their insertion and the draw",
    ),
    *_of_gmis("replay", "rows", "mean",
        replay_staleness_p50="median over drawn rows: rows drawn between their insertion and the draw",
        replay_limiter_error="error of the rate limiter: samples_per_insert * inserts - samples, from its centre",
    ),
    *_of_gmis("replay", "s", "mean", replay_age_p50_s="median over drawn rows: age at the draw"),
    *_of_gmis("replay", "s", "max",
        replay_age_p95_s="95th percentile over drawn rows: age at the draw",
        replay_insert_wait_s="time that insertions waited for the rate limiter",
        replay_sample_wait_s="time that selections waited for the rate limiter",
    ),
    *_of_gmis("replay", "", "mean", replay_times_sampled_p50="median over rows in the replay: times drawn"),
    *_of_gmis("replay", "", "max",
        replay_times_sampled_p95="95th percentile over rows in the replay: times drawn",
        replay_waiting="requests that wait for the rate limiter at the end of the iteration",
    ),
    *_of_gmis("resources", "bytes", "max",
        resident_bytes="resident memory of the largest GMI process",
        device_bytes="memory that torch and Warp hold on the GPU in the largest GMI process, the CUDA context not included",
    ),
    *_of_gmis("resources", "pages", "max",  # a counter would be exported from its first count on only
        major_faults="pages that the training thread waited for to come from disk: memory is short",
    ),
    *_of_gmis("faults", "worlds", "sum",
        faults_unstable="simulations that became NaN or infinite and were reset",
        faults_contact_overflow="simulations that exceeded the contact capacity and were reset",
        faults_constraint_overflow="simulations that exceeded the constraint capacity and were reset",
    ),
)  # fmt: skip
"""Metrics that a GMI reports in IterationResult.metrics."""

EVALUATION: tuple[Metric, ...] = (
    *_of_driver("evaluation", "",
        evaluation_return_mean="mean return of the policy's mode, without exploration",
        evaluation_return_std="standard deviation of the episodes' returns",
        evaluation_return_min="least return of an episode",
        evaluation_return_max="greatest return of an episode",
    ),
    *_of_driver("evaluation", "steps", evaluation_length_mean="mean length of the episodes"),
    *_of_driver("evaluation", "episodes", evaluation_episodes="episodes of the evaluation"),
)  # fmt: skip
"""Metrics of an evaluation."""

EVALUATION_RETURN_MEAN = EVALUATION[0]

DERIVED: tuple[Metric, ...] = (
    *_of_driver("progress", "steps", env_steps_total="environment steps since the run began"),
    *_of_driver("progress", "s", train_s="training time since the run began, evaluations and checkpoints included"),
    *_of_driver("progress", "steps/s",
        steps_per_second="environment steps of all GMIs per wall second: the papers' predictions per second (PPS)",
        samples_per_second="environment steps learned from per wall second: the papers' training samples throughput (TTP)",
    ),
    *_of_driver("progress", "", episode_return_mean="mean undiscounted return of the last 100 training episodes"),
    *_of_driver("progress", "steps", episode_length_mean="mean length of the last 100 training episodes"),
    *_of_driver("progress", "episodes", episodes_total="training episodes that ended since the run began"),
    EVALUATION_RETURN_MEAN,
)  # fmt: skip
"""Metrics that the driver derives from these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HistogramMetric:
    """Counts by powers of two, added over GMIs. TensorBoard has them."""

    tag: str
    """In TensorBoard."""
    scale: float
    """From the counted unit to the tag's."""


HISTOGRAMS: dict[str, HistogramMetric] = {
    "replay_age": HistogramMetric(tag="replay/age_s", scale=1e-9),
    "replay_staleness": HistogramMetric(tag="replay/staleness", scale=1.0),
    "replay_times_sampled": HistogramMetric(tag="replay/times_sampled", scale=1.0),
}
"""Of drawn rows: age, and rows drawn between insertion and draw. Of the rows that are there: times drawn."""
_NAMES = {metric.name for metric in CATALOGUE}
FAULTS: tuple[str, ...] = tuple(metric.name for metric in CATALOGUE if metric.group == "faults")
"""Names of the simulation-error metrics."""


def reward_column(term: str) -> str:
    """Column of progress.csv, and end of the TensorBoard tag, of a reward term."""
    return f"reward_{term}"


def faults_text(totals: Mapping[str, float]) -> str:
    """Simulation errors of a run as text, such as "3 unstable, 1 contact overflow"; empty without any."""
    return ", ".join(
        f"{totals[name]:,.0f} {name.removeprefix('faults_').replace('_', ' ')}"
        for name in FAULTS
        if totals.get(name)
    )


_MERGE: dict[Merge, Callable[[Sequence[float]], float]] = {
    "sum": sum,
    "max": max,
    "mean": lambda values: sum(values) / len(values),
}


def _merged(metric: GmiMetric, results: Sequence[IterationResult]) -> float:
    """Merge over the GMIs that report it. Learning metrics are means over samples: each GMI is weighted by its own."""
    reports = [result.metrics for result in results if metric.name in result.metrics]
    values = [report[metric.name] for report in reports]
    samples = [report.get("train_samples", report.get("env_steps", 0.0)) for report in reports]
    # Weighted mean: sum_g(n_g * value_g) / sum_g(n_g), with n_g the samples of GMI g.
    if metric.group == "learning" and metric.merge == "mean" and len(set(samples)) > 1:
        return sum(value * own for value, own in zip(values, samples, strict=True)) / sum(samples)
    return float(_MERGE[metric.merge](values))


def merge(results: Sequence[IterationResult]) -> IterationResult:
    """Merge one iteration's results of all GMIs; GMIs with different roles report different metrics.

    Raises:
        ConfigError: a learner reports a metric that its algorithm does not declare.
        ValueError: the GMIs are at different iterations.
    """
    iterations = {result.iteration for result in results}
    if len(iterations) != 1:
        raise ValueError(f"GMIs are at different iterations: {sorted(iterations)}")
    reported = {name for result in results for name in result.metrics}
    for name in sorted(reported - _NAMES):
        if not name.startswith("faults_"):  # environments may count errors of their own
            declaration = "declare it in the algorithm's definition: metrics=(LearningMetric(...),)"
            raise ConfigError("metric", name, "is reported, and in no catalogue", declaration)
    return IterationResult(
        iteration=results[0].iteration,
        metrics={metric.name: _merged(metric, results) for metric in CATALOGUE if metric.name in reported},
        episode_returns=[value for result in results for value in result.episode_returns],
        episode_lengths=[value for result in results for value in result.episode_lengths],
        reward_terms={
            name: [value for result in results for value in result.reward_terms.get(name, ())]
            for name in dict.fromkeys(name for result in results for name in result.reward_terms)
        },
        histograms={
            name: [sum(counts) for counts in zip(*found, strict=True)]
            for name in HISTOGRAMS
            if (found := [result.histograms[name] for result in results if name in result.histograms])
        },
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
    )
