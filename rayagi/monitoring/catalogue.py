"""Metric catalogue: name, unit, merge rule over GMIs and meaning of every metric.

Progress bar, CSV, TensorBoard, Ray metrics, RLlib results and reports all use these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from actors.protocols import IterationResult
from rayagi.algorithms.registry import DEFINITIONS

Merge = Literal["sum", "mean", "max"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One measured quantity of a run."""

    name: str
    unit: str
    help: str
    group: Literal["progress", "time", "learning", "resources", "faults", "evaluation"]
    kind: Literal["counter", "gauge"] = "gauge"
    """counter: adds up over a run. gauge: the latest value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GmiMetric(Metric):
    """A metric that every GMI measures itself."""

    merge: Merge
    """How the GMIs' values are merged."""


CATALOGUE: tuple[GmiMetric, ...] = (
    GmiMetric(
        name="env_steps",
        kind="counter",
        unit="steps",
        merge="sum",
        group="progress",
        help="environment steps of this iteration",
    ),
    GmiMetric(
        name="episodes",
        kind="counter",
        unit="episodes",
        merge="sum",
        group="progress",
        help="episodes that ended in this iteration",
    ),
    GmiMetric(name="iteration_s", unit="s", merge="max", group="time", help="wall time of the iteration"),
    GmiMetric(
        name="simulate_s",
        unit="s",
        merge="mean",
        group="time",
        help="time in the simulator; includes inference and sampling where one call does both",
    ),
    GmiMetric(
        name="act_s",
        unit="s",
        merge="mean",
        group="time",
        help="time in policy inference and sampling; 0 where it is in simulate_s",
    ),
    GmiMetric(
        name="update_s",
        unit="s",
        merge="mean",
        group="time",
        help="time in the learner, without synchronisation",
    ),
    GmiMetric(
        name="sync_s",
        unit="s",
        merge="mean",
        group="time",
        help="time in collectives, waiting for other GMIs included",
    ),
    GmiMetric(
        name="exchange_s",
        unit="s",
        merge="mean",
        group="time",
        help="time exchanging steps between simulator and agent GMIs, waiting for the other included",
    ),
    GmiMetric(
        name="wait_s",
        unit="s",
        merge="mean",
        group="time",
        help="time waiting for a free slot (collectors) or for experience (learners)",
    ),
    GmiMetric(
        name="train_samples",
        kind="counter",
        unit="steps",
        merge="sum",
        group="progress",
        help="environment steps consumed by learners in GMIs of their own",
    ),
    GmiMetric(
        name="stale_samples",
        kind="counter",
        unit="steps",
        merge="sum",
        group="progress",
        help="environment steps dropped as too old",
    ),
    GmiMetric(name="policy_loss", unit="", merge="mean", group="learning", help="clipped surrogate loss"),
    GmiMetric(
        name="value_loss", unit="", merge="mean", group="learning", help="value loss before its coefficient"
    ),
    GmiMetric(name="entropy", unit="nats", merge="mean", group="learning", help="mean policy entropy"),
    GmiMetric(
        name="approx_kl",
        unit="nats",
        merge="mean",
        group="learning",
        help="estimate of KL(old, new), mean((r - 1) - log r)",
    ),
    GmiMetric(
        name="clip_fraction",
        unit="",
        merge="mean",
        group="learning",
        help="share of samples whose ratio was clipped",
    ),
    GmiMetric(
        name="explained_variance",
        unit="",
        merge="mean",
        group="learning",
        help="1 - Var(returns - values) / Var(returns)",
    ),
    GmiMetric(
        name="grad_norm", unit="", merge="mean", group="learning", help="global gradient norm before clipping"
    ),
    GmiMetric(
        name="learning_rate", unit="", merge="mean", group="learning", help="step size of this iteration"
    ),
    GmiMetric(
        name="action_std",
        unit="",
        merge="mean",
        group="learning",
        help="mean standard deviation of a Gaussian policy",
    ),
    GmiMetric(
        name="importance_ratio",
        unit="",
        merge="mean",
        group="learning",
        help="mean of pi / mu: learner's policy before the update over the behaviour policy",
    ),
    GmiMetric(
        name="importance_truncated",
        unit="",
        merge="mean",
        group="learning",
        help="share of samples whose pi / mu V-trace truncated (above rho_bar)",
    ),
    GmiMetric(
        name="policy_lag_mean",
        unit="updates",
        merge="mean",
        group="learning",
        help="policy lag: updates since the behaviour policy, mean over an update's samples",
    ),
    GmiMetric(
        name="policy_lag_max",
        unit="updates",
        merge="max",
        group="learning",
        help="policy lag: updates since the behaviour policy, maximum over an update's samples",
    ),
    *(
        GmiMetric(name=metric.name, unit=metric.unit, merge="mean", group="learning", help=metric.help)
        for definition in DEFINITIONS.values()
        for metric in definition.metrics
    ),
    GmiMetric(
        name="resident_bytes",
        unit="bytes",
        merge="max",
        group="resources",
        help="resident memory of the largest GMI process",
    ),
    GmiMetric(
        name="device_bytes",
        unit="bytes",
        merge="max",
        group="resources",
        help="memory that torch holds on its GPU in the largest GMI process, the CUDA context not included",
    ),
    GmiMetric(
        name="faults_unstable",
        kind="counter",
        unit="worlds",
        merge="sum",
        group="faults",
        help="simulations that became NaN or infinite and were reset",
    ),
    GmiMetric(
        name="faults_contact_overflow",
        kind="counter",
        unit="worlds",
        merge="sum",
        group="faults",
        help="simulations that exceeded the contact capacity and were reset",
    ),
    GmiMetric(
        name="faults_constraint_overflow",
        kind="counter",
        unit="worlds",
        merge="sum",
        group="faults",
        help="simulations that exceeded the constraint capacity and were reset",
    ),
)
"""Metrics that a GMI reports in IterationResult.metrics."""

EVALUATION_RETURN_MEAN = Metric(
    name="evaluation_return_mean",
    unit="",
    group="evaluation",
    help="mean return of the policy's mode, without exploration",
)

DERIVED: tuple[Metric, ...] = (
    Metric(
        name="env_steps_total", unit="steps", group="progress", help="environment steps since the run began"
    ),
    Metric(
        name="train_s",
        unit="s",
        group="progress",
        help="training time since the run began, evaluations and checkpoints included",
    ),
    Metric(
        name="steps_per_second",
        unit="steps/s",
        group="progress",
        help="environment steps of all GMIs per wall second: the papers' predictions per second (PPS)",
    ),
    Metric(
        name="samples_per_second",
        unit="steps/s",
        group="progress",
        help="environment steps learned from per wall second: the papers' training samples throughput (TTP)",
    ),
    Metric(
        name="episode_return_mean",
        unit="",
        group="progress",
        help="mean undiscounted return of the last 100 training episodes",
    ),
    Metric(
        name="episode_length_mean",
        unit="steps",
        group="progress",
        help="mean length of the last 100 training episodes",
    ),
    Metric(
        name="episodes_total",
        unit="episodes",
        group="progress",
        help="training episodes that ended since the run began",
    ),
    EVALUATION_RETURN_MEAN,
)
"""Metrics that the driver derives from these."""

EVALUATION: tuple[Metric, ...] = (
    EVALUATION_RETURN_MEAN,
    Metric(
        name="evaluation_return_std",
        unit="",
        group="evaluation",
        help="standard deviation of the episodes' returns",
    ),
    Metric(name="evaluation_return_min", unit="", group="evaluation", help="least return of an episode"),
    Metric(name="evaluation_return_max", unit="", group="evaluation", help="greatest return of an episode"),
    Metric(
        name="evaluation_length_mean", unit="steps", group="evaluation", help="mean length of the episodes"
    ),
    Metric(
        name="evaluation_episodes", unit="episodes", group="evaluation", help="episodes of the evaluation"
    ),
)
"""Metrics of an evaluation."""

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
        ValueError: the GMIs are at different iterations.
    """
    iterations = {result.iteration for result in results}
    if len(iterations) != 1:
        raise ValueError(f"GMIs are at different iterations: {sorted(iterations)}")
    reported = {name for result in results for name in result.metrics}
    return IterationResult(
        iteration=results[0].iteration,
        metrics={metric.name: _merged(metric, results) for metric in CATALOGUE if metric.name in reported},
        episode_returns=[value for result in results for value in result.episode_returns],
        episode_lengths=[value for result in results for value in result.episode_lengths],
        reward_terms={
            name: [value for result in results for value in result.reward_terms.get(name, ())]
            for name in dict.fromkeys(name for result in results for name in result.reward_terms)
        },
    )
