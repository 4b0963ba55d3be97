"""Monitoring of an RLlib Algorithm as in `rayagi train`: prediction, health monitor and exported metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from actors.protocols import IterationResult
from rayagi.config.spec import RunSpec
from rayagi.coordinator.health_monitor import RunHealthMonitor
from rayagi.coordinator.search_store import predict_throughput
from rayagi.coordinator.session import Session
from rayagi.monitoring.ray_metrics import RunExporter
from rayagi.run.limits import Position
from rayagi.run.prediction import no_prediction_text

_logger = logging.getLogger(__name__)


class RunWatch:
    """Monitors one session of an Algorithm. It logs and proposes; Tune or the user decides."""

    def __init__(self, spec: RunSpec, session: Session, *, run: str) -> None:
        """Predict the throughput of the session's plan.

        Args:
            spec: of the run
            session: an open session
            run: tag of the exported metrics
        """
        self._spec = spec
        self._expected = predict_throughput(spec, session.plan)
        if self._expected is not None:
            _logger.info("Expected: %s.", self._expected.text())
        self._exporter = RunExporter(run=run, task=spec.env.id)
        self._health_monitor = RunHealthMonitor(
            spec.with_gmi(replan=False),
            session,
            reopen=_never,
            log=_logger.warning,
            save_spec=_never,
            planned_steps_per_s=None if self._expected is None else self._expected.own_work_steps_per_s,
            follow_up=_follow_up,
        )
        self._steps = self._seconds = 0.0

    def iterated(
        self, result: IterationResult, row: Mapping[str, float], *, iteration: int, wall_s: float
    ) -> None:
        """Count an iteration, export its row, and check the GMIs.

        Args:
            result: of all GMIs
            row: derived metrics, by the names of rayagi.monitoring.catalogue
            iteration: its number, from 1
            wall_s: how long it took
        """
        self._steps += result.metrics["env_steps"]
        self._seconds += wall_s
        self._exporter.export(row)
        self._health_monitor.check_health(
            Position(
                iteration=iteration,
                env_steps=int(row["env_steps_total"]),
                train_s=row["train_s"],
                evaluation_return=row.get("evaluation_return_mean"),
                training_return=row.get("episode_return_mean"),
                training_episodes=int(row["episodes_total"]),
            )
        )

    def evaluated(self, row: Mapping[str, float]) -> None:
        """Export an evaluation."""
        self._exporter.export(row)

    def summary(self) -> str:
        """Measured and predicted throughput of the session; empty without iterations."""
        if not self._steps:
            return ""
        speed = self._steps / self._seconds
        if self._expected is None:
            prediction = no_prediction_text(self._spec.env.id)
        else:
            prediction = f"predicted {replace(self._expected, measured_steps_per_s=speed).text()}"
        return f"{self._spec.env.id}: {speed:,.0f} steps/s in all; {prediction}"


def _follow_up(spec: RunSpec) -> str:
    return f"build the next one with .gmi(num_envs={spec.gmi.num_envs}, left_out={list(spec.gmi.left_out)})"


def _never(spec: RunSpec) -> NoReturn:
    raise AssertionError("replan is off here")
