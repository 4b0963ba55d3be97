"""Converts a session's results to RLlib's result keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from actors.protocols import EvaluationResult, IterationResult, StateDict
from rayagi.monitoring.catalogue import CATALOGUE, reward_column


class ResultLog:
    """Writes iterations into an Algorithm's MetricsLogger.

    Keeps the last episodes itself: RLlib's logger clears its window with every result.
    """

    def __init__(self, num_episodes: int) -> None:
        self.returns: deque[float] = deque(maxlen=num_episodes)
        self.lengths: deque[int] = deque(maxlen=num_episodes)
        self.reward_terms: dict[str, deque[float]] = {}
        self._gauges: dict[str, float] = {}
        self._totals = {"env_steps_total": 0.0, "train_s": 0.0, "episodes_total": 0.0}
        self._evaluation_return: float | None = None

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
        self.returns.extend(result.episode_returns)
        self.lengths.extend(result.episode_lengths)
        for name, value in episode_metrics(self.returns, self.lengths).items():
            metrics.log_value(("env_runners", name), value, reduce="item")
        for name, sums in result.reward_terms.items():
            self.reward_terms.setdefault(name, deque(maxlen=self.returns.maxlen)).extend(sums)
        for name, known in self.reward_terms.items():
            if known:
                metrics.log_value(("rayagi", reward_column(name)), sum(known) / len(known), reduce="item")
        for metric in CATALOGUE:
            reading = result.metrics.get(metric.name, self._gauges.get(metric.name))
            if reading is not None:
                # A gauge keeps its last value: asynchronous GMIs do not report in every iteration.
                if metric.kind == "gauge":
                    self._gauges[metric.name] = reading
                metrics.log_value(("rayagi", metric.name), reading, reduce="item")
                if metric.group == "learning":
                    metrics.log_value(("learners", DEFAULT_MODULE_ID, metric.name), reading, reduce="item")
        row = self._derived(result, wall_s)
        for name, value in row.items():
            metrics.log_value(("rayagi", name), value, reduce="item")
        return row

    def evaluated(self, result: EvaluationResult, wall_s: float) -> None:
        """Store an evaluation's return and time."""
        self._totals["train_s"] += wall_s
        self._evaluation_return = result.mean_return()

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
        if self.returns:
            row["episode_return_mean"] = sum(self.returns) / len(self.returns)
            row["episode_length_mean"] = sum(self.lengths) / len(self.lengths)
        if self._evaluation_return is not None:
            row["evaluation_return_mean"] = self._evaluation_return
        return row

    def state_dict(self) -> StateDict:
        """The last episodes, and the run's totals."""
        return {
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "reward_terms": {name: list(sums) for name, sums in self.reward_terms.items()},
            "totals": dict(self._totals),
            "evaluation_return": self._evaluation_return,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state_dict``."""
        self.returns.clear()
        self.lengths.clear()
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        self.reward_terms = {
            name: deque(sums, maxlen=self.returns.maxlen)
            for name, sums in state.get("reward_terms", {}).items()
        }
        self._totals, self._evaluation_return = dict(state["totals"]), state["evaluation_return"]


def episode_metrics(returns: deque[float] | list[float], lengths: deque[int] | list[int]) -> dict[str, float]:
    """Episode statistics by RLlib's names; empty without episodes."""
    if not returns:
        return {}
    return {
        "episode_return_mean": sum(returns) / len(returns),
        "episode_return_min": min(returns),
        "episode_return_max": max(returns),
        "episode_len_mean": sum(lengths) / len(lengths),
    }


def evaluation_results(result: EvaluationResult) -> dict[str, Any]:
    """Result of ``Algorithm.evaluate``."""
    lengths = result.episode_lengths
    counts = {"num_episodes": len(lengths), "num_env_steps_sampled": sum(lengths)}
    return {"env_runners": {**episode_metrics(result.episode_returns, lengths), **counts}}
