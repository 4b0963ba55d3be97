"""Writes report.html of a run folder: one self-contained file with embedded plots."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from placement.errors import counted
from rayagi.monitoring.catalogue import FAULTS, faults_text
from rayagi.monitoring.plots import save_plots, time_parts, time_shares
from rayagi.monitoring.progress import return_text
from rayagi.run import experience_record, prediction
from rayagi.run.atomic import replace_bytes
from rayagi.run.csv_log import Row, read_rows
from rayagi.run.errors import RunFolderError
from rayagi.run.folder import RunFolder
from rayagi.run.limits import WINDOW
from rayagi.run.quantities import bytes_text, count_text, duration_text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
img { max-width: 100% } pre { background: #f5f5f5; padding: .8rem; overflow-x: auto; font-size: 13px }
table { border-collapse: collapse } td, th { padding: .2rem 1.2rem .2rem 0; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums }
.bar { display: flex; height: 1.4rem; border-radius: 3px; overflow: hidden; margin: .5rem 0 }
.key { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; border-radius: 2px }
"""
_PLOTS = (
    ("learning_curve.png", "Learning curve"),
    ("throughput.png", "Throughput"),
    ("time_split.png", "Time split over the run"),
)
_DAMAGED = "is damaged: restore it from a copy, or remove it"


def write_report(folder: RunFolder) -> Path:
    """Draw the plots and write report.html; returns its path.

    Raises:
        RunFolderError: the run has no finished iteration yet.
        DiskError: the files cannot be written.
    """
    progress, evaluations = read_rows(folder.progress_csv), read_rows(folder.evaluations_csv)
    if not progress:
        raise RunFolderError(str(folder.path), "has no finished iteration to report on")
    save_plots(progress, evaluations, folder.path, folder.record.task)
    path = folder.path / "report.html"
    page = _page(folder, progress, evaluations)
    replace_bytes(path, page.encode(errors="xmlcharrefreplace"))  # the folder's name may be no Unicode
    return path


def summary_text(folder: RunFolder, report: Path) -> str:
    """The run's main figures and the path of its report, for the terminal."""
    facts = summary(folder, read_rows(folder.progress_csv), read_rows(folder.evaluations_csv))
    return "\n".join(f"{key:>18}  {value}" for key, value in (*facts, ("report", str(report))))


def summary(
    folder: RunFolder, progress: Sequence[Row], evaluations: Sequence[Row]
) -> tuple[tuple[str, str], ...]:
    """The run's main figures, for the report and the terminal."""
    last = progress[-1]
    train_s, env_steps = last["train_s"], last["env_steps_total"]
    facts = [
        ("task", folder.record.task),
        ("status", _status(folder)),
        ("iterations", f"{int(last['iteration']):,}"),
        ("training time", duration_text(train_s)),
    ]
    if env_steps:
        facts[3:3] = [("environment steps", f"{int(env_steps):,} ({count_text(env_steps)})")]
        facts += [
            (
                "steps per second",
                f"{mean_rate(progress, 'env_steps'):,.0f} (without evaluations and checkpoints)",
            ),
            (
                "training return",
                f"{return_text(last.get('episode_return_mean'))} (mean of the last {WINDOW} episodes)",
            ),
        ]
    if evaluations:
        best = max(evaluations, key=lambda row: row.get("evaluation_return_mean", float("-inf")))
        steps = best["env_steps_total"]
        when = f"{count_text(steps)} steps" if steps else f"iteration {best['iteration']:,.0f}"
        facts.append(("best evaluation", f"{_evaluation(best)} at {when}"))
        facts.append(("last evaluation", _evaluation(evaluations[-1])))
    learned = [row for row in progress if row.get("train_samples")]
    if learned:
        facts.append(("samples per second", f"{mean_rate(learned, 'train_samples'):,.0f} learned from (TTP)"))
    if "replay_rows" in last:
        facts.append(("replay", _replay(progress)))
    experience = experience_record.load(folder.path)
    if experience is not None:
        facts += experience_record.facts(experience)
    elif (folder.path / experience_record.FILE).exists():
        facts.append(("experience", f"{experience_record.FILE} {_DAMAGED}"))
    if env_steps:
        facts.append(("predicted", _predicted(folder)))
    if any(name in last for name in FAULTS):
        totals = {name: sum(row.get(name, 0.0) for row in progress) for name in FAULTS}
        facts.append(("simulation errors", faults_text(totals) or "none"))
    if "resident_bytes" in last:
        facts.append(("memory per GMI", bytes_text(last["resident_bytes"])))
    return tuple(facts)


def _predicted(folder: RunFolder) -> str:
    found = prediction.load_prediction(folder.path)
    if found is not None:
        return found.text()
    is_damaged = (folder.path / prediction.FILE).exists()
    return (
        f"{prediction.FILE} {_DAMAGED}" if is_damaged else prediction.no_prediction_text(folder.record.task)
    )


def speed_range(progress: Sequence[Row]) -> tuple[float, float] | None:
    """Range of throughput over parts of a few seconds; None if the run was too short."""
    timed = [(row.get("env_steps", 0.0), own_s) for row in progress if (own_s := wall_s(row))]
    return prediction.parts_range([steps for steps, _ in timed], [own_s for _, own_s in timed])


def mean_rate(progress: Sequence[Row], counter: str) -> float:
    """Mean increase of a counter per second of iteration time, without evaluations and checkpoints."""
    timed = [(row, wall_s(row)) for row in progress]
    seconds = sum(own_s for _, own_s in timed)
    return sum(row.get(counter, 0.0) for row, own_s in timed if own_s) / seconds if seconds > 0 else 0.0


def wall_s(row: Row) -> float:
    """Wall time of a row's iteration; 0 if unknown, since an update may have no steps."""
    for counter, rate in (("train_samples", "samples_per_second"), ("env_steps", "steps_per_second")):
        if row.get(counter) and row.get(rate):
            return row[counter] / row[rate]
    return 0.0


def _status(folder: RunFolder) -> str:
    record = folder.record
    if record.status == "running" and not folder.is_locked():
        # Nobody trains it any more, and nobody could write why: SIGKILL, or no space for the new run.json.
        return (
            f"killed, or ended by a full disk; continue with rayagi train --resume {quote(str(folder.path))}"
        )
    return f"{record.status}: {record.reason}" if record.reason else record.status


def _replay(progress: Sequence[Row]) -> str:
    """What experience replay holds, and how often it was drawn."""
    last = progress[-1]
    what, held, new = "transition", "replay_transitions", "replay_new_transitions"
    if held not in last:  # of a version without them
        what, held, new = "row", "replay_rows", "replay_inserts"
    inserts, samples = (
        sum(row.get(name, 0.0) for row in progress if held in row) for name in (new, "replay_samples")
    )
    text = (
        f"{count_text(last[held])} {what}s in a replay of {bytes_text(last['replay_memory_bytes'])} of memory"
    )
    if last.get("replay_disk_bytes"):
        text += f" and {bytes_text(last['replay_disk_bytes'])} on disk"
    if inserts:
        text += f"; {samples / inserts:.3g} drawn per {what} inserted"
    for kind in ("insert", "sample"):
        if waited_s := sum(row.get(f"replay_{kind}_wait_s", 0.0) for row in progress):
            text += f"; {kind} waited {duration_text(waited_s)} for the rate limiter"
    return text


def _evaluation(row: Row) -> str:
    mean, std = row.get("evaluation_return_mean"), row.get("evaluation_return_std", 0.0)
    return (
        f"{return_text(mean)} +- {std:,.1f} over {counted(int(row.get('evaluation_episodes', 0)), 'episode')}"
    )


def _page(folder: RunFolder, progress: Sequence[Row], evaluations: Sequence[Row]) -> str:
    name = html.escape(folder.path.name)
    sections = [
        f"<h1>{html.escape(folder.record.task)} <small>{name}</small></h1>",
        _table(summary(folder, progress, evaluations)),
        *(f"<h2>{title}</h2>{_image(folder.path / file, title)}" for file, title in _PLOTS),
        f"<h2>Where the time goes</h2>{_time_bar(progress)}",
        *_ages(folder),
        f"<h2>Plan</h2><pre>{html.escape(_text(folder.path / 'plan.txt'))}</pre>",
        f"<h2>Configuration</h2><pre>{html.escape(_text(folder.path / 'config.yaml'))}</pre>",
        f"<h2>Versions</h2>{_table(_versions(folder.path / 'versions.json'))}",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _table(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in facts
    )
    return f"<table>{rows}</table>"


def _image(path: Path, title: str) -> str:
    content = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{content}">'


def _time_bar(progress: Sequence[Row]) -> str:
    shares = time_shares(progress)
    colours = {label: colour for _, label, colour in time_parts(progress)}
    bar = "".join(
        f'<div style="width:{share * 100:.2f}%;background:{colours[label]}"></div>'
        for label, share in shares.items()
    )
    rows = "".join(
        f'<tr><td><span class="key" style="background:{colours[label]}"></span>{label}</td>'
        f'<td class="number">{share * 100:.1f} %</td></tr>'
        for label, share in shares.items()
    )
    return f'<div class="bar">{bar}</div><table>{rows}</table><p>Of the iterations\' wall time, mean over GMIs.</p>'


def _ages(folder: RunFolder) -> list[str]:
    experience = experience_record.load(folder.path)
    if experience is None:
        return []
    text = html.escape(experience_record.histogram(experience))
    return [
        f"<h2>Policy lag</h2><p>Updates that the policy which acted was behind; share of rows.</p><pre>{text}</pre>"
    ]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return "not written"
    except (OSError, UnicodeDecodeError) as error:
        return f"{path.name} cannot be read ({error})"


def _versions(path: Path) -> list[tuple[str, str]]:
    try:
        stored: Any = json.loads(path.read_text())
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        return [(path.name, f"cannot be read ({error})")]
    if not isinstance(stored, dict):
        return [(path.name, "is damaged: not a JSON object")]
    return [(key.replace("_", " "), str(value)) for key, value in stored.items() if value is not None]
