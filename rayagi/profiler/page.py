"""A profile's report as one self-contained HTML file: no network, and every name escaped."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files

import numpy as np

from collectives.errors import counted
from rayagi.profiler.critical_path import CriticalPath
from rayagi.profiler.extrapolation import Extrapolation
from rayagi.profiler.overlap import LABELS, PROFILER, Breakdown, resource
from rayagi.profiler.summary import (
    ARRIVAL_HEAD,
    MOST_OPERATIONS,
    RESOURCES,
    RUN_HEAD,
    TRANSITION_HEAD,
    WAIT_HEAD,
    OperationTime,
    Wait,
    arrival_rows,
    command_text,
    core_lines,
    gpu_lines,
    missing_processes,
    omitted_operations,
    operation_times,
    path_line,
    path_rows,
    process_line,
    recorded,
    run_line,
    run_rows,
    seconds,
    set_name,
    silent_processes,
    transition_rows,
    wait_rows,
)
from rayagi.profiler.timeline import Lane, Timeline
from rayagi.profiler.trace import Profile, printable

_COLOURS = {
    "python": "#ccbb44",
    "simulator": "#4477aa",
    "backend": "#228833",
    "communication": "#aa3377",
    "wait": "#dddddd",
    "kernel_act": "#66ccee",
    "kernel_update": "#55aa66",
    "other_native": "#999999",
    "gpu_runtime": "#ee8866",
    "gpu_kernel": "#cc3311",
    "gpu_copy": "#ffaabb",
    "profiler": "#000000",
}
_MOST_ROWS = 200
"""Of a table."""
_SMALLEST_SHARE = 0.001
"""Sets below it are one segment of a bar."""


def report_page(
    profile: Profile,
    found: Breakdown,
    waits: Sequence[Wait],
    lanes: Timeline,
    note: str = "",
    path: CriticalPath | None = None,
    run: Extrapolation | None = None,
    advice: Sequence[str] = (),
) -> str:
    """The page, with a note on its times."""
    title = _escaped(command_text(profile) or str(profile.path))
    sections = [
        f"<h1>Profile <small>{title}</small></h1>",
        f"<p>{_escaped(note)}</p>",
        *(
            f"<p>{_escaped(line)}</p>"
            for each in recorded(found)
            for line in (
                process_line(found, each.label),
                *core_lines(profile, each.label),
                *gpu_lines(profile, found, each.label),
            )
        ),
        f"<p>{silent_processes(profile, found)}</p>",
        f"<p>{missing_processes(profile)}</p>",
        _advice(advice),
        f"<h2>Operations</h2>{_legend()}",
    ]
    if len(found.processes) > 1:
        shared = "".join(f"<p>{_escaped(line)}</p>" for line in gpu_lines(profile, found, ""))
        note = f"<p>What several processes do in one operation at a time counts once.</p>{shared}"
        sections.append(f"<h3>All processes</h3>{note}{_bars(operation_times(found.merged))}")
    for each in recorded(found):
        times = operation_times(row for row in found.rows if row.cell.process == each.label)
        sections.append(f"<h3>{_escaped(each.label)}</h3>{_bars(times)}")
    sections += [
        _run(run),
        "<h2>Transitions</h2>" + _table(TRANSITION_HEAD, transition_rows(found), left=2),
        "<h2>Waits by cause</h2>" + _table(WAIT_HEAD, wait_rows(found, waits), left=3),
        _critical_path(path),
        _timeline(lanes),
    ]
    resources = files(__package__)
    style, script = (
        resources.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js")
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n<style>{style}</style>'
        f"</head>\n<body>\n" + "\n".join(sections) + f"\n<script>{script}</script>\n</body></html>\n"
    )


def _escaped(name: str) -> str:
    """Without control of the page: of its markup, or of the direction in which what follows is written."""
    return html.escape(printable(name))


def _legend() -> str:
    keys = "".join(
        f'<span class="name"><span class="key" style="background:{_COLOURS[label]}"></span>{label.replace("_", " ")}</span>'
        for label in LABELS
        if label != PROFILER
    )
    text = "A segment is a set of categories that were active together, striped in the colours of several."
    return f"<p>{keys}</p><p>{text}</p>"


def _bars(times: Sequence[OperationTime]) -> str:
    """One bar for each operation, as long as its time; segments by set of categories."""
    longest = max((each.total_ns for each in times), default=0) or 1
    whole = sum(each.total_ns for each in times) or 1
    rows = []
    for each in times[:MOST_OPERATIONS]:
        total = each.total_ns or 1
        cells = "".join(
            f'<td class="number">{100 * each.resource_ns(name) / total:.1f} %</td>' for name in RESOURCES
        )
        rows.append(
            f'<tr><td>{_escaped(each.name)}</td><td class="number">{seconds(each.total_ns)}</td>'
            f'<td class="number">{100 * each.total_ns / whole:.1f} %</td>{cells}'
            f'<td class="wide"><div class="bar" style="width:{100 * each.total_ns / longest:.2f}%">'
            f"{_segments(each)}</div></td></tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in ("", "time", "share", *RESOURCES, ""))
    note = omitted_operations(times)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>" + (f"<p>and {note}</p>" if note else "")


def _segments(operation: OperationTime) -> str:
    total = operation.total_ns or 1
    shown, rest = [], 0
    for categories, ns in sorted(operation.sets.items(), key=lambda item: -item[1]):
        if ns / total < _SMALLEST_SHARE:
            rest += ns
        else:
            text = f"{set_name(categories)}: {seconds(ns)}, {100 * ns / total:.1f} %, {resource(categories)}"
            shown.append(_segment(ns / total, _background(categories), text))
    if rest:
        shown.append(_segment(rest / total, "#f0f0f0", f"sets below {_SMALLEST_SHARE:.1%}: {seconds(rest)}"))
    return "".join(shown)


def _segment(share: float, background: str, text: str) -> str:
    return f'<div style="width:{100 * share:.3f}%;background:{background}" title="{_escaped(text)}"></div>'


def _background(categories: frozenset[str]) -> str:
    """One colour, or stripes of several."""
    colours = [_COLOURS[label] for label in LABELS if label in categories]
    if len(colours) == 1:
        return colours[0]
    stops = ",".join(f"{colour} {5 * index}px {5 * index + 5}px" for index, colour in enumerate(colours))
    return f"repeating-linear-gradient(45deg,{stops})"


def _run(run: Extrapolation | None) -> str:
    if run is None:
        return ""
    return f"<h2>Whole run</h2><p>{run_line(run)}</p>" + _table(RUN_HEAD, run_rows(run), left=1)


def _critical_path(path: CriticalPath | None) -> str:
    if path is None:
        return ""
    return (
        f"<h2>Critical path</h2><p>{_escaped(path_line(path))}</p>"
        + _table(["process", "what", "per iteration", "share"], path_rows(path), left=2)
        + "<h3>Who waits for whom</h3>"
        + _table(ARRIVAL_HEAD, arrival_rows(path), left=1)
    )


def _advice(advice: Sequence[str]) -> str:
    items = "".join(f"<li>{_escaped(each)}</li>" for each in advice)
    return f"<h2>What would help</h2><ul>{items}</ul>" if items else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    if not rows:
        return "<p>none</p>"
    classes = [""] * left + [' class="number"'] * (len(head) - left)
    lines = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{_escaped(cell)}</td>" for kind, cell in zip(classes, row, strict=True))
        + "</tr>"
        for row in rows[:_MOST_ROWS]
    )
    more = f"<p>and {len(rows) - _MOST_ROWS:,} more</p>" if len(rows) > _MOST_ROWS else ""
    return f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{lines}</table>{more}"


def _timeline(lanes: Timeline) -> str:
    """The data of the canvas that report.js draws."""
    data = {
        "span": lanes.span_ns,
        "colours": {label: _COLOURS[label] for label in LABELS},
        "lanes": [_lane(each) for each in lanes.lanes],
    }
    # In a script element only "<" could end the element or open a comment.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    omitted = f"<p>Left out: {counted(lanes.omitted, 'thread')}.</p>" if lanes.omitted else ""
    return (
        "<h2>Time-line</h2><p>Wheel: zoom; drag: move; double click: everything. Lower part of a lane: categories; upper: "
        f'operations.</p>{omitted}<canvas id="timeline"></canvas><pre id="hover"> </pre>'
        f'<script type="application/json" id="data">{text}</script>'
    )


def _lane(lane: Lane) -> dict[str, object]:
    """Shares as one byte a bin."""
    names = list(dict.fromkeys(each.name for each in lane.slices))
    index = {name: number for number, name in enumerate(names)}
    name = printable(f"{lane.process}, {lane.name}")
    return {
        "name": name + (f" ({counted(lane.omitted, 'short operation')} left out)" if lane.omitted else ""),
        "shares": {label: _bytes(255 * shares) for label, shares in lane.shares.items()},
        "names": [printable(each) for each in names],
        "slices": [[each.start, each.end, each.depth, index[each.name]] for each in lane.slices],
    }


def _bytes(values: Iterable[float]) -> str:
    rounded = np.clip(np.rint(np.asarray(values)), 0, 255).astype(np.uint8)
    return base64.b64encode(rounded.tobytes()).decode()
