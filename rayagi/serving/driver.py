"""The serving loop. Requests steps from all GMIs until a limit is reached, and merges their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from placement.errors import counted
from rayagi.run.interrupt import END_LIMIT_S, Interrupt
from rayagi.run.quantities import count_text, duration_text
from rayagi.serving.program import ServingResult, merged_results

if TYPE_CHECKING:  # it imports Ray
    from rayagi.coordinator.session import Session

DEFAULT_TIME_S = 60.0
"""Default limit."""
REQUEST_S = 1.0
"""Approximate duration of one request: the longest that Ctrl-C waits."""
LOG_EVERY_S = 5.0
FINISH_S = 600.0
"""Time limit for the writers to complete their last files."""
_FIRST_STEPS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingLimits:
    """Limits of serving; the first one reached ends it."""

    env_steps: int | None = None
    episodes: int | None = None
    """Ended episodes of all environments."""
    time_s: float | None = None
    """Time of serving, without startup and shutdown."""

    def text(self) -> str:
        """For people."""
        parts = []
        if self.time_s is not None:
            parts.append(duration_text(self.time_s))
        if self.env_steps is not None:
            parts.append(f"{count_text(self.env_steps)} environment steps")
        if self.episodes is not None:
            parts.append(counted(self.episodes, "episode"))
        return " or ".join(parts)


@dataclass(slots=True)
class Served:
    """Totals so far."""

    total: ServingResult = field(default_factory=ServingResult)
    wall_s: float = 0.0
    """Wall time measured by the driver."""
    stop: str = ""
    """Why it ended; empty if it was interrupted."""

    @property
    def steps_per_s(self) -> float:
        """Environment steps of all GMIs per second."""
        return self.total.env_steps / self.wall_s if self.wall_s else 0.0

    @property
    def episodes(self) -> int:
        """Number of ended episodes."""
        return len(self.total.episode_returns)

    def return_mean(self) -> float | None:
        """Mean return of the ended episodes."""
        returns = self.total.episode_returns
        return sum(returns) / len(returns) if returns else None


class ServingLoop:
    """Serves until a limit or an interrupt, then waits until everything is written."""

    def __init__(
        self,
        session: Session,
        limits: ServingLimits,
        *,
        total_envs: int,
        interrupt: Interrupt,
        log: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._limits, self._interrupt = session, limits, interrupt
        self._total_envs, self._log, self._clock = total_envs, log, clock
        self.served = Served()

    def serve(self) -> Served:
        """Serve, then finish.

        Raises:
            KeyboardInterrupt: after an interrupt the GMIs do not answer in time, or there was a second Ctrl-C.
            DiskError, WriterError: experience could not be written; complete files stay.
            GmiLostError, GmiSilentError: a GMI was lost or does not answer.
        """
        served, begin, logged_at, request_s = self.served, self._clock(), self._clock(), 0.0
        while not self._interrupt.requested:
            served.stop = self._reached()
            if served.stop:
                break
            with self._interrupt.wait_limited(END_LIMIT_S + 2 * request_s):
                results = self._session.run("serve", self._request_steps(), timeout_s=FINISH_S)
            request_s = self._clock() - begin - served.wall_s
            served.total = merged_results([served.total, merged_results(results)])
            served.wall_s = self._clock() - begin
            if self._clock() - logged_at >= LOG_EVERY_S:
                logged_at = self._clock()
                self._log(self._line())
        self._session.run("finish", FINISH_S, timeout_s=FINISH_S + 10.0)
        return served

    def _request_steps(self) -> int:
        """Steps per environment of the next request: about ``REQUEST_S`` worth, and not past the time or step limit."""
        done_steps = self.served.total.env_steps // self._total_envs
        wall_s = self.served.wall_s
        want_s = REQUEST_S
        if self._limits.time_s is not None:
            want_s = min(want_s, self._limits.time_s - wall_s)
        steps = round(want_s * done_steps / wall_s) if done_steps and wall_s > 0 else _FIRST_STEPS
        if self._limits.env_steps is not None:
            left = self._limits.env_steps - self.served.total.env_steps
            steps = min(steps, -(-left // self._total_envs))
        return max(1, steps)

    def _reached(self) -> str:
        limits, served = self._limits, self.served
        if limits.env_steps is not None and served.total.env_steps >= limits.env_steps:
            return f"{served.total.env_steps:,} environment steps done"
        if limits.episodes is not None and served.episodes >= limits.episodes:
            return f"{counted(served.episodes, 'episode')} done"
        if limits.time_s is not None and served.wall_s >= limits.time_s:
            return f"{duration_text(limits.time_s)} of serving done"
        return ""

    def _line(self) -> str:
        served = self.served
        mean = served.return_mean()
        parts = [
            f"{count_text(served.total.env_steps)} steps",
            f"{served.steps_per_s:,.0f} steps/s",
            counted(served.episodes, "episode"),
            f"return {'-' if mean is None else f'{mean:,.1f}'}",
            f"step {served.total.step.text()}",
        ]
        return "  ".join(parts)
