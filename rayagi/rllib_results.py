"""Converts a session's results to RLlib's result keys."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ray.rllib.core import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from actors.protocols import EvaluationResult, IterationResult, StateDict
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.spec import RunSpec
from rayagi.monitoring.catalogue import CATALOGUE, reward_column
from rayagi.rllib_run import CsvText
from rayagi.run.limits import EpisodeWindow
from rayagi.run.measures import evaluation_row, position_of
from rayagi.run.recorders import EVALUATION_COLUMNS, PROGRESS_COLUMNS

_LEARNER = {
    "value_loss": "vf_loss",
    "explained_variance": "vf_explained_var",
    "approx_kl": "mean_kl_loss",
    "learning_rate": "default_optimizer_learning_rate",
    "grad_norm": "gradients_default_optimizer_global_norm",
}
"""Metric of rayagi.monitoring.catalogue -> what RLlib's learners call it."""
_TIMERS = {
    "env_runner_sampling_timer": ("simulate_s", "act_s"),
    "learner_update_timer": ("update_s",),
    "synch_weights": ("sync_s",),
}
"""RLlib's timer -> metrics that it is the sum of."""


class ResultLog:
    """Writes iterations into an Algorithm's MetricsLogger.

    Keeps the last episodes itself: RLlib's logger clears its window with every result.
    """

    def __init__(self, spec: RunSpec, num_episodes: int, *, num_envs: int, num_parameters: int) -> None:
        """Start without episodes.

        Args:
            spec: of the run
            num_episodes: size of the window over which episodes are averaged
            num_envs: environments of all GMIs
            num_parameters: of policy and value function
        """
        self._spec, self._num_envs, self._num_parameters = spec, num_envs, num_parameters
        self._window = EpisodeWindow(num_episodes)
        self._gauges: dict[str, float] = {}
        self._totals = {"env_steps_total": 0.0, "train_s": 0.0, "episodes_total": 0.0}
        self._iterations = self._evaluated_at = 0
        self._evaluation_return: float | None = None
        self._tables = {
            "progress.csv": CsvText(PROGRESS_COLUMNS),
            "evaluations.csv": CsvText(EVALUATION_COLUMNS),
        }

    def log(self, metrics: MetricsLogger, result: IterationResult, wall_s: float) -> dict[str, float]:
        """Add one iteration; RLlib may combine several to one result.

        Returns:
            Derived metrics of the run, by the names of rayagi.monitoring.catalogue.
        """
        steps, episodes = int(result.metrics["env_steps"]), len(result.episode_returns)
        sampled = ("env_runners", "num_env_steps_sampled")
        sampled_lifetime = ("env_runners", "num_env_steps_sampled_lifetime")
        metrics.log_value(sampled, steps, reduce="sum")
        metrics.log_value(sampled_lifetime, steps, reduce="lifetime_sum", with_throughput=True)
        metrics.log_value(("env_runners", "num_episodes"), episodes, reduce="sum")
        metrics.log_value(("env_runners", "num_episodes_lifetime"), episodes, reduce="lifetime_sum")
        trained = ("learners", "__all_modules__", "num_env_steps_trained_lifetime")
        samples = int(result.metrics.get("train_samples", steps))
        metrics.log_value(trained, samples, reduce="lifetime_sum")
        window = self._window
        window.add(result.episode_returns, result.episode_lengths, result.reward_terms)
        for name, value in episode_metrics(window.returns, window.lengths).items():
            _log_item(metrics, ("env_runners", name), value)
        length = window.length_mean()
        if steps and length is not None:
            # Steps of an episode x seconds of a step, which all environments make at the same time.
            seconds = length * wall_s * self._num_envs / steps
            _log_item(metrics, ("env_runners", "episode_duration_sec_mean"), seconds)
        terms = {reward_column(name): mean for name, mean in window.reward_term_means().items()}
        self._log_catalogue(metrics, result)
        row = self._derived(result, wall_s)
        for name, value in (*terms.items(), *row.items()):
            _log_item(metrics, ("rayagi", name), value)
        self._iterations += 1
        self._tables["progress.csv"].add(
            {"iteration": float(self._iterations), **result.metrics, **row, **terms}
        )
        return row

    def _log_catalogue(self, metrics: MetricsLogger, result: IterationResult) -> None:
        """Metrics of the catalogue, by its names and by RLlib's."""
        learner = ("learners", DEFAULT_MODULE_ID)
        for metric in CATALOGUE:
            reading = result.metrics.get(metric.name, self._gauges.get(metric.name))
            if reading is not None:
                # A gauge keeps its last value: asynchronous GMIs do not report in every iteration.
                if metric.kind == "gauge":
                    self._gauges[metric.name] = reading
                if metric.kind == "counter":
                    metrics.log_value(("rayagi", metric.name), reading, reduce="sum")
                else:
                    _log_item(metrics, ("rayagi", metric.name), reading)
                if metric.group == "learning":
                    _log_item(metrics, (*learner, metric.name), reading)
        for name, value in self._learner_results().items():
            _log_item(metrics, (*learner, name), value)
        for timer, parts in _TIMERS.items():
            if known := [self._gauges[part] for part in parts if part in self._gauges]:
                _log_item(metrics, ("timers", timer), sum(known))

    def _learner_results(self) -> dict[str, float]:
        """Results of the learner by RLlib's names."""
        found, learning = self._gauges, self._spec.learning
        results = {theirs: found[ours] for ours, theirs in _LEARNER.items() if ours in found}
        joint = not DEFINITIONS[self._spec.algorithm].needs_separate_networks
        if joint and {"policy_loss", "value_loss", "entropy"} <= found.keys():
            # L = L_policy + c_value L_value - c_entropy H
            value = learning.value_coef * found["value_loss"]
            results["total_loss"] = found["policy_loss"] + value - learning.entropy_coef * found["entropy"]
        # No loss of rayagi has a KL term.
        return {**results, "curr_kl_coeff": 0.0, "num_trainable_parameters": float(self._num_parameters)}

    def evaluated(self, result: EvaluationResult, wall_s: float) -> None:
        """Store an evaluation's return and time."""
        self._totals["train_s"] += wall_s
        self._evaluation_return, self._evaluated_at = result.mean_return(), self._iterations
        self._tables["evaluations.csv"].add(evaluation_row(result, position_of(self.counters())))

    def counters(self) -> dict[str, Any]:
        """Progress of the run, as rayagi.run.training_loop saves it."""
        return {
            "iteration": self._iterations,
            "env_steps": int(self._totals["env_steps_total"]),
            "episodes": int(self._totals["episodes_total"]),
            "train_s": self._totals["train_s"],
            "best_return": None,
            "return_source": "evaluation" if self._spec.evaluation.interval > 0 else "training",
            "evaluation_return": self._evaluation_return,
            "evaluated_at": self._evaluated_at,
            "window": self._window.to_dict(),
        }

    def tables(self) -> dict[str, str]:
        """progress.csv and evaluations.csv since the run began."""
        return {name: table.text() for name, table in self._tables.items()}

    def _derived(self, result: IterationResult, wall_s: float) -> dict[str, float]:
        """Derived metrics, as in the training loop of `rayagi train`; without those not yet known."""
        steps = result.metrics["env_steps"]
        added = {
            "env_steps_total": steps,
            "train_s": wall_s,
            "episodes_total": float(len(result.episode_returns)),
        }
        self._totals = {name: self._totals[name] + more for name, more in added.items()}
        row = self._totals | {
            "steps_per_second": steps / wall_s,
            "samples_per_second": result.metrics.get("train_samples", steps) / wall_s,
        }
        if self._window.returns:
            row["episode_return_mean"] = sum(self._window.returns) / len(self._window)
            row["episode_length_mean"] = sum(self._window.lengths) / len(self._window)
        if self._evaluation_return is not None:
            row["evaluation_return_mean"] = self._evaluation_return
        return row

    def state_dict(self) -> StateDict:
        """The last episodes, and the run's totals."""
        return {
            **self._window.to_dict(),
            "totals": dict(self._totals),
            "evaluation_return": self._evaluation_return,
            "iterations": self._iterations,
            "evaluated_at": self._evaluated_at,
            "tables": self.tables(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state_dict``."""
        self._window.load(state)
        self._totals, self._evaluation_return = dict(state["totals"]), state["evaluation_return"]
        # Checkpoints of version 0.1.0 lack the rest.
        self._iterations, self._evaluated_at = state.get("iterations", 0), state.get("evaluated_at", 0)
        for name, text in state.get("tables", {}).items():
            self._tables[name].load(text)


def _log_item(metrics: MetricsLogger, key: tuple[str, ...], value: Any) -> None:
    """Log the latest value; a dictionary by its keys."""
    if isinstance(value, Mapping):
        for name, own in value.items():
            _log_item(metrics, (*key, name), own)
    else:
        metrics.log_value(key, value, reduce="item")


def episode_metrics(returns: Sequence[float], lengths: Sequence[int]) -> dict[str, Any]:
    """Episode statistics by RLlib's names; NaN without episodes."""
    # RLlib leaves them out until then, which Tune takes for a wrong metric; its iterations mostly have whole episodes.
    nan = math.nan
    mean = sum(returns) / len(returns) if returns else nan
    return {
        "episode_return_mean": mean,
        "episode_return_min": min(returns, default=nan),
        "episode_return_max": max(returns, default=nan),
        "episode_len_mean": sum(lengths) / len(lengths) if lengths else nan,
        "episode_len_min": min(lengths, default=nan),
        "episode_len_max": max(lengths, default=nan),
        "agent_episode_returns_mean": {DEFAULT_AGENT_ID: mean},
        "module_episode_returns_mean": {DEFAULT_MODULE_ID: mean},
    }


def evaluation_results(result: EvaluationResult) -> dict[str, Any]:
    """Result of ``Algorithm.evaluate``."""
    lengths = result.episode_lengths
    counts = {"num_episodes": len(lengths), "num_env_steps_sampled": sum(lengths)}
    return {"env_runners": {**episode_metrics(result.episode_returns, lengths), **counts}}
