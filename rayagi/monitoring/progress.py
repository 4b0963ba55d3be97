"""Terminal progress of a run: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayagi.monitoring.catalogue import FAULTS, faults_text, reward_column
from rayagi.run.limits import Limits, Position, ReturnSource, seconds_left
from rayagi.run.quantities import bytes_text, count_text, duration_text
from rayagi.run.recorders import Recorder, Values

PLAIN_EVERY_S = 5.0
"""Minimum time between two plain lines."""
_SPARKS = "▁▂▃▄▅▆▇█"
_SMOOTHING_S = 10.0
"""Time constant of the moving average of throughput."""


def sparkline(values: Sequence[float], width: int) -> str:
    """Sparkline of ``values`` in at most ``width`` characters, each the mean of its part."""
    if not values:
        return ""
    width = min(width, len(values))
    means = []
    for column in range(width):
        share = values[column * len(values) // width : (column + 1) * len(values) // width]
        means.append(sum(share) / len(share))
    low, high = min(means), max(means)
    span = high - low
    return "".join(
        _SPARKS[round((value - low) / span * (len(_SPARKS) - 1)) if span else 0] for value in means
    )


class Tracker:
    """Running figures of a run, shared by both displays."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._iteration_s = 0.0
        self.steps_per_s = 0.0
        """Environment steps per second of training, averaged over about ten seconds; without any, those learned from."""
        self.best_evaluation: float | None = None
        self.last: Values = {}
        """The newest iteration's row."""
        self.returns: deque[float] = deque(maxlen=4096)
        """Mean training return, one value per iteration."""
        self.largest_lag = 0.0
        """Largest policy lag since this process started, in updates."""
        self.faults: Counter[str] = Counter()
        """Simulation errors since this process started."""

    def iterated(self, rows: Sequence[Values]) -> None:
        """Add new rows."""
        for row in rows:
            steps, speed = row["env_steps"] or 0.0, row["steps_per_second"] or 0.0
            if not self.simulates(row):
                steps, speed = row.get("train_samples") or 0.0, row.get("samples_per_second") or 0.0
            iteration_s = steps / speed if speed else 0.0
            weight = 1.0 if self.steps_per_s == 0 else min(1.0, iteration_s / _SMOOTHING_S)
            self.steps_per_s += weight * (speed - self.steps_per_s)
            self._iteration_s += weight * (iteration_s - self._iteration_s)
            if (value := row["episode_return_mean"]) is not None:
                self.returns.append(value)
            self.largest_lag = max(self.largest_lag, row.get("policy_lag_max") or 0.0)
            self.faults.update({name: int(row.get(name) or 0) for name in FAULTS})
        self.last = rows[-1]

    @staticmethod
    def simulates(row: Values) -> bool:
        """Whether the run has made environment steps so far."""
        return bool(row.get("env_steps_total"))

    @property
    def unit(self) -> str:
        """Of ``steps_per_s``."""
        return "samples/s" if self.last and not self.simulates(self.last) else "steps/s"

    def evaluated(self, row: Values) -> None:
        """Add an evaluation."""
        value = row["evaluation_return_mean"]
        if value is not None and (self.best_evaluation is None or value > self.best_evaluation):
            self.best_evaluation = value

    def lag_text(self) -> str:
        """Policy lag, such as "0.9, at most 2 (bound 2)": mean of the last update, maximum so far; empty if synchronous."""
        mean, bound = self.last.get("policy_lag_mean"), self.last.get("policy_lag_bound")
        if mean is None:
            return ""
        return f"{mean:.1f}, at most {self.largest_lag:.0f}" + (
            f" (bound {bound:.0f})" if bound is not None else ""
        )

    def left(self, position: Position) -> str:
        """Time to the nearest predictable limit as text; empty without one."""
        seconds = seconds_left(
            self._limits, position, steps_per_s=self.steps_per_s, iteration_s=self._iteration_s
        )
        return "" if seconds is None else duration_text(seconds)

    def share_done(self, position: Position) -> float | None:
        """Progress towards the nearest predictable limit, 0 to 1; None without one."""
        limits = self._limits
        shares = [
            done / limit
            for done, limit in (
                (position.train_s, limits.time_s),
                (position.env_steps, limits.env_steps),
                (position.iteration, limits.iterations),
            )
            if limit
        ]
        return min(1.0, max(shares)) if shares else None


class PlainProgress(Recorder):
    """One line at most every few seconds, and one for every evaluation."""

    def __init__(
        self,
        limits: Limits,
        write: Callable[[str], object],
        *,
        every_s: float = PLAIN_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tracker, self._write = Tracker(limits), write
        self._every_s, self._clock = every_s, clock
        self._next_at = -1.0

    def iterated(self, rows: Sequence[Values], position: Position) -> None:
        """Write a line if the last one is old enough."""
        self._tracker.iterated(rows)
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + self._every_s
        parts = [f"iteration {position.iteration}"]
        if self._tracker.simulates(rows[-1]):
            parts.append(f"{count_text(position.env_steps)} steps")
        parts.append(f"{self._tracker.steps_per_s:,.0f} {self._tracker.unit}")
        if self._tracker.simulates(rows[-1]):
            parts.append(f"return {return_text(position.training_return)}")
        if lag := self._tracker.lag_text():
            parts.append(f"lag {lag}")
        if left := self._tracker.left(position):
            parts.append(f"{left} left")
        if faults := faults_text(self._tracker.faults):
            parts.append(f"faults: {faults}")
        self._write("  ".join(parts))

    def evaluated(self, row: Values, *, best: bool) -> None:
        """Write a line."""
        self._tracker.evaluated(row)
        mean, std = row["evaluation_return_mean"], row["evaluation_return_std"] or 0.0
        suffix = "  best so far" if best else ""
        self._write(
            f"iteration {row['iteration']:g}  evaluation return {return_text(mean)} +- {std:.1f}{suffix}"
        )

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class LiveProgress(Recorder):
    """A panel at the bottom of the terminal."""

    def __init__(self, title: str, limits: Limits, source: ReturnSource, console: Console) -> None:
        self._title, self._limits, self._source, self._console = title, limits, source, console
        self._tracker = Tracker(limits)
        self._evaluation: float | None = None
        self._checkpoint = "none yet"
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._shown = False

    def __enter__(self) -> LiveProgress:
        self._shown = self._draw(self._live.start)
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self._draw(self._live.stop)

    def iterated(self, rows: Sequence[Values], position: Position) -> None:
        """Redraw."""
        self._tracker.iterated(rows)
        panel = self.panel(position)
        self._draw(lambda: self._live.update(panel, refresh=True))

    def evaluated(self, row: Values, *, best: bool) -> None:
        """Store it; drawn with the next iterations."""
        self._tracker.evaluated(row)
        self._evaluation = row["evaluation_return_mean"]

    def saved(self, checkpoint: str) -> None:
        """Store it; drawn with the next iterations."""
        self._checkpoint = checkpoint

    def _draw(self, draw: Callable[[], object]) -> bool:
        try:
            draw()
        except OSError:
            # The terminal was closed; the run continues and saves.
            self._console.quiet = True
        return not self._console.quiet

    def panel(self, position: Position) -> Panel:
        """The panel to draw."""
        tracker, width = self._tracker, max(10, self._console.width - 4)
        lines: list[Table | Text | ProgressBar] = [_table(self._facts(position), width)]
        if lag := tracker.lag_text():
            lines.append(Text(f"policy lag, updates: {lag}", style="dim"))
        if terms := reward_terms_text(tracker.last):
            lines.append(Text(terms, style="dim"))
        if faults := faults_text(tracker.faults):
            lines.append(Text(f"simulation errors: {faults}", style="yellow"))
        if len(tracker.returns) > 1:
            lines.append(Text(sparkline(tuple(tracker.returns), width), style="cyan"))
        share = tracker.share_done(position)
        if share is not None:
            lines.append(ProgressBar(total=1.0, completed=share, width=width))
        return Panel(Group(*lines), title=Text(self._title), title_align="left", border_style="dim")

    def _facts(self, position: Position) -> list[tuple[str, str]]:
        tracker = self._tracker
        evaluation = "off"
        if self._source == "evaluation":
            best = "" if tracker.best_evaluation is None else f" (best {tracker.best_evaluation:,.1f})"
            evaluation = f"{return_text(self._evaluation)}{best}"
        return [
            ("return", return_text(position.training_return)),
            (tracker.unit, f"{tracker.steps_per_s:,.0f}"),
            ("iteration", f"{position.iteration:,}"),
            ("evaluation", evaluation),
            ("steps", count_text(position.env_steps)),
            ("time", duration_text(position.train_s)),
            ("checkpoint", self._checkpoint),
            ("memory", f"{bytes_text(tracker.last.get('resident_bytes') or 0)} per GMI"),
            ("left", tracker.left(position) or "until stopped"),
        ]


_GAP = 2
"""Characters between columns."""


def _table(facts: Sequence[tuple[str, str]], width: int) -> Table:
    """Labels and values, in as many pairs of columns as ``width`` has space for, three at most."""

    def needed(pairs: int) -> int:
        widest = (
            [max(len(fact[part]) for fact in facts[pair::pairs]) + _GAP for part in (0, 1)]
            for pair in range(pairs)
        )
        return sum(map(sum, widest)) - _GAP

    pairs = next((number for number in (3, 2) if needed(number) <= width), 1)
    table = Table.grid(padding=(0, _GAP), expand=True)
    for _ in range(pairs):
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True)
    for first in range(0, len(facts), pairs):
        table.add_row(*(text for fact in facts[first : first + pairs] for text in fact))
    return table


def reward_terms_text(row: Values) -> str:
    """Reward terms of an episode, such as "reward: upright 812.0, effort -33.1"; empty without any."""
    prefix = reward_column("")
    terms = [
        f"{name.removeprefix(prefix)} {return_text(row[name])}" for name in row if name.startswith(prefix)
    ]
    return f"reward: {', '.join(terms)}" if terms else ""


def return_text(value: float | None) -> str:
    """A return with one digit, or a dash before there is one."""
    return "-" if value is None else f"{value:,.1f}"
