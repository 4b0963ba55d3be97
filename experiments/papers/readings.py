"""From rows to a headline in words and a figure: the two GMI-DRL papers, GEAR, data collection.

Medians over repeats; ratios are taken within a repeat.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.fusion.records import Records
from experiments.fusion.run import FIGURES
from experiments.learning.compare import at_second, curves_of, tasks_of
from placement.search import SATURATION, TrialMeasurement, project_memory, saturation_metric

Rows = Any
_PEERS = ("sf-async", "sb3-envpool", "pufferlib", "cleanrl", "skrl")
median = statistics.median


def spread(values: Sequence[float], of: str = "") -> str:
    """``1.02 (0.98-1.07 of 3)``, of repeats or something else; one value alone without brackets."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f} of {len(values)}{of})"


def figure(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """One pair of axes."""
    made = Figure(figsize=(6.4, 4), layout="constrained")
    axes = made.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    made.suptitle(title, fontsize=10)
    return made, axes


def bars(axes: Axes, values: Mapping[str, Sequence[float]]) -> None:
    """A bar for each median, with lowest and highest."""
    for place, found in enumerate(values.values()):
        middle = median(found)
        axes.bar(
            place, middle, yerr=[[middle - min(found)], [max(found) - middle]], capsize=3, color="#4477aa"
        )
    axes.set_xticks(range(len(values)), list(values), rotation=30, ha="right", fontsize=8)


def save(made: Figure, path: Path) -> None:
    """As PNG."""
    made.savefig(path, dpi=90)


# --- figures 2, 13, 14: the full grid of the search -------------------------------------------------------------------


def _grid(rows: Rows) -> dict[str, dict[int, TrialMeasurement]]:
    """Task -> environments -> medians over repeats, of one GMI."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("kind") == "grid" and row["gmis"] == 1 and row.get("steps_per_s"):
            found[row["task"], row["num_envs"]].append(row)
    table: dict[str, dict[int, TrialMeasurement]] = defaultdict(dict)
    for (task, envs), same in sorted(found.items()):
        table[task][envs] = TrialMeasurement(
            steps_per_s=median(row["steps_per_s"] for row in same),
            memory_bytes=int(median(row["memory_bytes"] for row in same)),
            relative_error=0.0,
        )
    return table


def throughput_by_envs(rows: Rows) -> str:
    """Where throughput is highest, and what is left of it with most environments."""
    parts = []
    for task, by_envs in _grid(rows).items():
        best = max(by_envs, key=lambda envs: by_envs[envs].steps_per_s)
        last = max(by_envs)
        left = by_envs[last].steps_per_s / by_envs[best].steps_per_s
        parts.append(
            f"{task} {by_envs[best].steps_per_s:,.0f} steps/s with {best}, {left:.2f} of that with {last}"
        )
    return "; ".join(parts)


def draw_throughput_by_envs(rows: Rows, path: Path) -> None:
    """A line for each task."""
    made, axes = figure("Throughput against the number of environments, one GMI", "environments", "steps/s")
    for task, by_envs in _grid(rows).items():
        axes.plot(list(by_envs), [each.steps_per_s for each in by_envs.values()], marker="o", label=task)
    axes.set_xscale("log", base=2)
    axes.legend()
    save(made, path)


def draw_memory_by_envs(rows: Rows, path: Path) -> None:
    """Throughput and memory beside each other."""
    made = Figure(figsize=(9, 4), layout="constrained")
    left, right = made.subplots(1, 2)
    for task, by_envs in _grid(rows).items():
        left.plot(list(by_envs), [each.steps_per_s for each in by_envs.values()], marker="o", label=task)
        right.plot(list(by_envs), [each.memory_bytes / 2**20 for each in by_envs.values()], marker="o")
    for axes, label in ((left, "steps/s"), (right, "MiB of the GMI")):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("environments")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    left.legend()
    save(made, path)


def _sats(by_envs: Mapping[int, TrialMeasurement]) -> dict[int, float]:
    counts = sorted(by_envs)
    return {now: saturation_metric(by_envs[before], by_envs[now]) for before, now in pairwise(counts)}


def saturation(rows: Rows) -> str:
    """First number of environments whose Sat is below the papers' threshold."""
    parts = []
    for task, by_envs in _grid(rows).items():
        low = next((envs for envs, sat in _sats(by_envs).items() if sat < SATURATION), None)
        parts.append(
            f"{task} {f'never below {SATURATION}' if low is None else f'below {SATURATION} first with {low}'}"
        )
    return "; ".join(parts)


def draw_saturation(rows: Rows, path: Path) -> None:
    """A line for each task, and the papers' threshold."""
    made, axes = figure("Sat against the number of environments", "environments", "Sat (cut off at +-30)")
    for task, by_envs in _grid(rows).items():
        sats = _sats(by_envs)
        axes.plot(list(sats), [max(-30.0, min(30.0, sat)) for sat in sats.values()], marker="o", label=task)
    axes.axhline(SATURATION, color="grey", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.legend()
    save(made, path)


def _projections(by_envs: Mapping[int, TrialMeasurement]) -> dict[int, tuple[float, float]]:
    """Environments -> (bytes by eq. 4 from the two sizes before, bytes measured)."""
    counts = sorted(by_envs)
    found = {}
    for place, envs in enumerate(counts[2:], 2):
        projected = project_memory([(each, by_envs[each]) for each in counts[:place]], envs)
        assert projected is not None
        found[envs] = projected, float(by_envs[envs].memory_bytes)
    return found


def projection(rows: Rows) -> str:
    """Error of eq. 4."""
    errors = [
        abs(projected / measured - 1)
        for by_envs in _grid(rows).values()
        for projected, measured in _projections(by_envs).values()
    ]
    return (
        f"{100 * median(errors):.1f} % off in the median of {len(errors)}, {100 * max(errors):.0f} % at most"
    )


def draw_projection(rows: Rows, path: Path) -> None:
    """Projected and measured memory of each task."""
    made, axes = figure("Memory of a GMI: eq. 4 (dashed) and measured", "environments", "MiB")
    for number, (task, by_envs) in enumerate(_grid(rows).items()):
        found = _projections(by_envs)
        axes.plot(list(found), [each[1] / 2**20 for each in found.values()], f"C{number}o-", label=task)
        axes.plot(list(found), [each[0] / 2**20 for each in found.values()], f"C{number}x--")
    axes.set_xscale("log", base=2)
    axes.legend()
    save(made, path)


# --- figures 3, 9b: training beside other libraries -------------------------------------------------------------------


def _ratios(rows: Rows, above: Iterable[str], below: Iterable[str]) -> dict[str, list[float]]:
    """Task -> for each repeat, the fastest of some cases over the fastest of others."""
    speeds: dict[tuple[str, int], dict[str, float]] = defaultdict(dict)
    for row in rows["rows"]:
        if row.get("steps_per_s"):
            speeds[row["task"], row["repeat"]][row["peer"]] = row["steps_per_s"]
    above, below = tuple(above), tuple(below)
    found: dict[str, list[float]] = defaultdict(list)
    for (task, _), by_case in sorted(speeds.items()):
        one = [by_case[name] for name in above if name in by_case]
        other = [by_case[name] for name in below if name in by_case]
        if one and other:
            found[task].append(max(one) / max(other))
    return found


def _ratio_text(found: Mapping[str, Sequence[float]]) -> str:
    middle = [median(values) for values in found.values()]
    each = ", ".join(f"{task} {spread(values)}" for task, values in found.items())
    return f"{statistics.fmean(middle):.2f} times on average: {each}"


def several_over_one(rows: Rows) -> str:
    """Two GMIs of a core over one GMI with two threads."""
    return _ratio_text(_ratios(rows, ["rayagi-2x1"], ["rayagi-1x2"]))


def draw_several_over_one(rows: Rows, path: Path) -> None:
    """A bar for each task."""
    made, axes = figure("Two GMIs of a core over one with two threads", "", "ratio of steps/s")
    bars(axes, _ratios(rows, ["rayagi-2x1"], ["rayagi-1x2"]))
    axes.axhline(1, color="grey", linewidth=1)
    save(made, path)


def over_peers(rows: Rows) -> str:
    """The better layout over the fastest peer."""
    return _ratio_text(_ratios(rows, ["rayagi-2x1", "rayagi-1x2"], _PEERS))


def draw_over_peers(rows: Rows, path: Path) -> None:
    """A bar for each task."""
    made, axes = figure("PPO over the fastest of five libraries, their settings", "", "ratio of steps/s")
    bars(axes, _ratios(rows, ["rayagi-2x1", "rayagi-1x2"], _PEERS))
    axes.axhline(1, color="grey", linewidth=1)
    save(made, path)


def over_rllib(rows: Rows) -> str:
    """The better layout over RLlib."""
    return _ratio_text(_ratios(rows, ["rayagi-2x1", "rayagi-1x2"], ["rllib"]))


def draw_over_rllib(rows: Rows, path: Path) -> None:
    """A bar for each task."""
    made, axes = figure("PPO over RLlib's, the same settings", "", "ratio of steps/s")
    bars(axes, _ratios(rows, ["rayagi-2x1", "rayagi-1x2"], ["rllib"]))
    axes.axhline(1, color="grey", linewidth=1)
    save(made, path)


# --- figures 9a, 12, tables 2, 3: templates ---------------------------------------------------------------------------


def _cases(rows: Rows) -> list[dict[str, Any]]:
    """Task, kind, template, simulators, environments, speed, memory and prediction of each layout; medians of repeats."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows["rows"]:
        found[f"{row['group']} {row['name']}"].append(row)
    names = ("steps_per_s", "proportional_bytes", "predicted")
    return [
        same[0]["case"] | {name: median(row[name] for row in same) for name in names}
        for same in found.values()
    ]


def serving_by_gmis(rows: Rows) -> str:
    """Two serving GMIs over one."""
    return _ratio_text(_by_gmis(rows))


def _by_gmis(rows: Rows) -> dict[str, list[float]]:
    speeds = {
        (case["task"], case["num_envs"], case["simulators"]): case["steps_per_s"]
        for case in _cases(rows)
        if (case["kind"], case["template"]) == ("serving", "dp_only")
    }
    return {
        f"{task} x {envs}": [speed / speeds[task, envs, 1]]
        for (task, envs, simulators), speed in speeds.items()
        if simulators == 2 and (task, envs, 1) in speeds
    }


def draw_serving_by_gmis(rows: Rows, path: Path) -> None:
    """A bar for each task and size."""
    made, axes = figure("Serving: two GMIs of a core over one", "", "ratio of steps/s")
    bars(axes, _by_gmis(rows))
    axes.axhline(1, color="grey", linewidth=1)
    save(made, path)


def _over_dp_only(rows: Rows, name: str) -> dict[tuple[str, str], list[float]]:
    """(kind, template) -> dp_only's value over the template's, for each task and size."""
    values = {
        (case["kind"], case["task"], case["num_envs"], case["simulators"], case["template"]): case[name]
        for case in _cases(rows)
    }
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (kind, task, envs, simulators, template), value in values.items():
        baseline = values.get((kind, task, envs, simulators, "dp_only"))
        if template != "dp_only" and baseline is not None:
            found[kind, template].append(baseline / value)
    return found


def templates(rows: Rows) -> str:
    """How many times as fast as each other template DP-only is, and its memory."""
    memory = _over_dp_only(rows, "proportional_bytes")
    return "; ".join(
        f"{kind}: dp_only over {template} {spread(speed, ' layouts')} "
        f"for {median(memory[kind, template]):.2f} times its memory"
        for (kind, template), speed in _over_dp_only(rows, "steps_per_s").items()
    )


def draw_templates(rows: Rows, path: Path) -> None:
    """A bar for each template: throughput and memory."""
    made = Figure(figsize=(9, 4), layout="constrained")
    for axes, name, label in zip(
        made.subplots(1, 2), ("steps_per_s", "proportional_bytes"), ("throughput", "memory"), strict=True
    ):
        bars(
            axes,
            {f"{kind}, {template}": found for (kind, template), found in _over_dp_only(rows, name).items()},
        )
        axes.axhline(1, color="grey", linewidth=1)
        axes.set_title(f"{label}: dp_only over", fontsize=9)
    save(made, path)


def predictions(rows: Rows, *, serving: bool) -> str:
    """How well the model orders the layouts of a group, and its error."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for case in _cases(rows):
        if (case["kind"] == "serving") == serving:
            groups[case["task"], case["kind"]].append(case)
    right, pairs, errors = 0, 0, []
    for cases in groups.values():
        errors += [abs(case["predicted"] / case["steps_per_s"] - 1) for case in cases]
        for number, one in enumerate(cases):
            for other in cases[:number]:
                if abs(one["steps_per_s"] / other["steps_per_s"] - 1) > 0.05:
                    pairs += 1
                    right += (one["predicted"] > other["predicted"]) == (
                        one["steps_per_s"] > other["steps_per_s"]
                    )
    return f"{right} of {pairs} pairs in the right order; error {100 * median(errors):.0f} % in the median"


# --- figure 10, table 6, table 8, learning ----------------------------------------------------------------------------

_ASYNC, _BASELINE = "appo, decoupled, wait", "appo, dp_only"


def _over_baseline(rows: Rows, name: str) -> list[float]:
    by_case = {(line["case"], line["repeat"]): line[name] for line in rows["lines"]}
    repeats = sorted(
        {repeat for case, repeat in by_case if case == _ASYNC}
        & {repeat for case, repeat in by_case if case == _BASELINE}
    )
    return [by_case[_ASYNC, repeat] / by_case[_BASELINE, repeat] for repeat in repeats]


def asynchronous(rows: Rows) -> str:
    """PPS and TTP."""
    return (
        f"PPS {spread(_over_baseline(rows, 'steps_per_s'))} times, "
        f"TTP {spread(_over_baseline(rows, 'samples_per_s'))} times"
    )


def draw_asynchronous(rows: Rows, path: Path) -> None:
    """A bar for each way of training."""
    made, axes = figure(f"{rows['task']}: environment steps (PPS) per second", "", "steps/s")
    cases: dict[str, list[float]] = defaultdict(list)
    for line in rows["lines"]:
        cases[line["case"]].append(line["steps_per_s"])
    bars(axes, cases)
    save(made, path)


def _compositions(rows: Rows, layouts: Iterable[str] = ()) -> dict[str, list[float]]:
    """Layout and model -> the chosen composition's throughput over IP-only's, by repeat."""
    speeds = {(row["layout"], row["model"], row["composition"]): row for row in rows["rows"]}
    found = {}
    for (layout, model, _), row in speeds.items():
        if "chosen" in row["role"] and (not layouts or layout in layouts):
            base = speeds[layout, model, "ip_only"]["repeats"]
            found[f"{layout} {model}"] = [
                one / other for one, other in zip(row["repeats"], base, strict=True)
            ]
    return found


def compositions(rows: Rows, layouts: Iterable[str]) -> str:
    """The choice over IP only, and over the runner-up."""
    found = _compositions(rows, layouts)
    middle = {name: median(values) for name, values in found.items()}
    rest = []
    for row in rows["rows"]:
        name = f"{row['layout']} {row['model']}"
        if row["role"] == "runner-up" and name in found:
            chosen = next(
                each
                for each in rows["rows"]
                if f"{each['layout']} {each['model']}" == name and "chosen" in each["role"]
            )
            rest.append(chosen["steps_per_s"] / row["steps_per_s"])
    return (
        f"{min(middle.values()):.2f} to {max(middle.values()):.2f} over IP only, in {len(middle)} cases; "
        f"{min(rest):.2f} to {max(rest):.2f} over the second-best composition"
    )


def draw_compositions(rows: Rows, path: Path) -> None:
    """A bar for each layout, model and collective."""
    made, axes = figure("Training throughput by collective", "", "steps/s")
    bars(
        axes, {f"{row['layout']} {row['model']} {row['composition']}": row["repeats"] for row in rows["rows"]}
    )
    axes.tick_params(axis="x", labelsize=5)
    save(made, path)


def _channels(rows: Rows, name: str) -> dict[str, list[float]]:
    """Task and sizes -> multi-channel over uni-channel per step, by repeat; A3C's work."""
    values = {
        (
            row["task"],
            row["agents"],
            row["trainers"],
            row["envs"],
            row["steps"],
            row["repeat"],
            row["way"],
        ): row[name]
        for row in rows["rows"]
        if row["work"] == "A3C"
    }
    found: dict[str, list[float]] = defaultdict(list)
    for (task, agents, trainers, envs, steps, repeat, way), value in values.items():
        base = values.get((task, agents, trainers, envs, steps, repeat, "uni, per step"))
        if way == "multi" and base:
            found[f"{task} {agents}+{trainers} {envs} x {steps}"].append(value / base)
    return found


def channels(rows: Rows) -> str:
    """Multi-channel over uni-channel."""
    parts = []
    for name in ("pps", "ttp"):
        middle = [median(values) for values in _channels(rows, name).values()]
        parts.append(f"{name.upper()} {min(middle):.2f} to {max(middle):.2f} times")
    return ", ".join(parts)


def draw_channels(rows: Rows, path: Path) -> None:
    """A bar for each task and size."""
    made, axes = figure(
        "Multi-channel over uni-channel per step, TTP (agents+trainers, environments x steps)", "", "ratio"
    )
    bars(axes, _channels(rows, "ttp"))
    axes.axhline(1, color="grey", linewidth=1)
    save(made, path)


def learning(rows: Rows) -> str:
    """Return at the end of each variant, mean and range of seeds."""
    parts = []
    for task in tasks_of(rows):
        ends = {name: at_second(curves_of(rows, task, name), rows["time"]) for name in rows["variants"]}
        each = (
            f"{name} {statistics.fmean(found):,.0f} ({min(found):,.0f} to {max(found):,.0f} of {len(found)})"
            for name, found in ends.items()
            if found
        )
        parts.append(f"{task} {', '.join(each)}")
    return f"returns after {rows['time']:.0f} s: {'; '.join(parts)}"


# --- GEAR -------------------------------------------------------------------------------------------------------------


def _line(rows: Rows, name: str) -> dict[int, list[float]]:
    return {int(x): values for x, values in rows["lines"].get(name, {}).items()}


def replay_clients(rows: Rows) -> str:
    """GB/s by clients, and over Reverb."""
    own, reverb, two = (_line(rows, name) for name in ("one node", "Reverb", "two nodes"))
    speeds = ", ".join(f"{median(values):.2f}" for values in own.values())
    text = f"{speeds} GB/s with {', '.join(map(str, own))} clients on a node"
    if reverb:
        over = [median(own[count]) / median(reverb[count]) for count in own if count in reverb]
        text += f", {min(over):.1f} to {max(over):.1f} times Reverb"
    if two:
        text += f"; two nodes {max(median(values) for values in two.values()):.2f} GB/s"
    return text


def replay_batches(rows: Rows) -> str:
    """GB/s with the smallest and the largest batch, beside memcpy."""
    own, copy = _line(rows, "beside the shard"), _line(rows, "memcpy")
    few, many = min(own), max(own)
    text = f"{median(own[few]):.1f} GB/s with {few}, {median(own[many]):.1f} with {many}"
    return text + (f"; memcpy by one thread {median(copy[many]):.1f}" if copy else "")


def selection(rows: Rows) -> str:
    """Seconds with the largest table."""
    parts = []
    for name in rows["lines"]:
        line = _line(rows, name)
        parts.append(f"{name} {1e3 * median(line[max(line)]):.3g} ms")
    most = max(max(_line(rows, name)) for name in rows["lines"])
    return f"of 1,024 from {most:,} rows: {'; '.join(parts)}"


def _draw_lines(rows: Rows, path: Path, title: str, *, base: int, log_y: bool = False) -> None:
    made, axes = figure(title, rows["x"], rows["y"])
    for name in rows["lines"]:
        line = dict(sorted(_line(rows, name).items()))
        axes.plot(list(line), [median(values) for values in line.values()], marker="o", label=name)
        axes.fill_between(
            list(line),
            [min(values) for values in line.values()],
            [max(values) for values in line.values()],
            alpha=0.15,
        )
    axes.set_xscale("log", base=base)
    if log_y:
        axes.set_yscale("log")
    axes.legend(fontsize=7)
    save(made, path)


def draw_replay_clients(rows: Rows, path: Path) -> None:
    """A line for each place of the clients."""
    _draw_lines(rows, path, "Throughput of trajectories in batches of 32", base=2)


def draw_replay_batches(rows: Rows, path: Path) -> None:
    """A line for each way to the shard."""
    _draw_lines(rows, path, "Collection against batch size", base=2)


def draw_selection(rows: Rows, path: Path) -> None:
    """A line for each selector."""
    _draw_lines(rows, path, "Time of a selection", base=10, log_y=True)


def gato(rows: Rows) -> str:
    """Last returns by task, and the difference between layouts."""
    layout = next(iter(rows["layouts"].values()))
    last = ", ".join(
        f"{task} {found[-1]:,.0f}" for task, found in zip(rows["tasks"], _per_task(layout), strict=True)
    )
    worst = max(float(value) for value in rows["largest_relative_difference"].values())
    steps = layout["evaluated_at"][-1]
    return f"returns after {steps} steps: {last}; losses of 1 and 2 trainers and shards differ by {worst:.0e} at most"


def _per_task(layout: Mapping[str, Any]) -> list[list[float]]:
    return [list(each) for each in zip(*layout["returns"], strict=True)]


def draw_gato(rows: Rows, path: Path) -> None:
    """A line for each task and layout."""
    made, axes = figure("One network for three tasks, offline", "gradient steps", "return")
    for style, (name, layout) in zip(("o-", "x--", "+:"), rows["layouts"].items(), strict=False):
        for number, (task, found) in enumerate(zip(rows["tasks"], _per_task(layout), strict=True)):
            axes.plot(layout["evaluated_at"], found, f"C{number}{style}", label=f"{task}, {name}")
    axes.legend(fontsize=6)
    save(made, path)


def mat(rows: Rows) -> str:
    """Greedy returns over the first seed's run."""
    (seed, *_) = rows["seeds"]
    (layout, *_) = seed["layouts"].values()
    returns = ", ".join(f"{value:,.0f}" for _, value in layout["greedy"])
    steps = ", ".join(f"{steps / 1e3:,.0f}" for steps, _ in layout["greedy"])
    return f"{rows['task']} as two halves: {returns} after {steps} thousand steps"


def draw_mat(rows: Rows, path: Path) -> None:
    """A line for each seed and layout."""
    made, axes = figure(
        f"Multi-Agent Transformer, {rows['task']} as two halves", "environment steps", "greedy return"
    )
    for seed in rows["seeds"]:
        for name, layout in seed["layouts"].items():
            axes.plot(*zip(*layout["greedy"], strict=True), marker="o", label=f"{name}, seed {seed['seed']}")
    axes.legend()
    save(made, path)


# --- data collection --------------------------------------------------------------------------------------------------


def _records(rows: Rows) -> Records:
    return Records.parsed(rows)


def draw_fusion(number: str, rows: Rows, path: Path) -> None:
    """As the experiment itself draws it."""
    draw = FIGURES[number].draw
    assert draw is not None
    draw(_records(rows), path)


def fusion(number: str, rows: Rows) -> str:
    """The headline of one figure."""
    cases = _records(rows).of(number)
    return {
        "2": _rates,
        "4": _vectorised,
        "5": _calls_cost,
        "6": _calls,
        "8": _fused,
        "9": _complexity,
        "gpu": _fused_on_gpu,
    }[number](cases)


def _rate(cases: Iterable[Any], **labels: object) -> float | None:
    """Median steps per second of the case with these labels."""
    for found, values in cases:
        if all(found.get(name) == value for name, value in labels.items()):
            return float(median(each["steps_per_s"] for each in values))
    return None


def _rates(cases: Sequence[Any]) -> str:
    best: dict[tuple[str, str], float] = {}
    for labels, values in cases:
        key = labels["simulator"], labels["form"]
        best[key] = max(best.get(key, 0.0), median(each["steps_per_s"] for each in values))
    return "highest rates, million steps/s: " + ", ".join(
        f"{simulator} {form} {rate / 1e6:.3g}" for (simulator, form), rate in best.items()
    )


def _vectorised(cases: Sequence[Any]) -> str:
    most = max(labels["num_envs"] for labels, _ in cases)
    gym = _rate(cases, form="gymnasium", num_envs=1)
    best: dict[str, float] = {}
    for labels, values in cases:
        if labels["num_envs"] == most:
            rate = median(each["steps_per_s"] for each in values)
            best[labels["form"]] = max(best.get(labels["form"], 0.0), rate)
    assert gym is not None
    return f"with {most} environments over Gymnasium's loop of one: " + ", ".join(
        f"{form} {rate / gym:.0f}" for form, rate in best.items()
    )


def _calls_cost(cases: Sequence[Any]) -> str:
    totals = {
        (labels["num_envs"], labels["steps"]): median(
            sum(each[part] for part in ("python", "backend", "device")) for each in values
        )
        for labels, values in cases
    }
    few, many = min(steps for _, steps in totals), max(steps for _, steps in totals)
    return f"time of a step with {few} per call over {many} per call: " + ", ".join(
        f"{total / totals[envs, many]:.1f} with {envs} environments"
        for (envs, steps), total in totals.items()
        if steps == few and (envs, many) in totals
    )


def _calls(cases: Sequence[Any]) -> str:
    most = max(labels["steps"] for labels, _ in cases)
    return f"API calls and kernels for {most} steps: " + ", ".join(
        f"{labels['form']} {values[0]['api_calls']:,.0f} and {values[0]['launches']:,.0f}"
        for labels, values in cases
        if labels["steps"] == most
    )


def _fused(cases: Sequence[Any]) -> str:
    forms = dict.fromkeys(labels["form"] for labels, _ in cases)
    parts = []
    for form in forms:
        own = [labels for labels, _ in cases if labels["form"] == form]
        most = max(labels["steps"] for labels in own)
        gains = []
        for envs in sorted({labels["num_envs"] for labels in own}):
            one, many = (
                _rate(cases, form=form, num_envs=envs, steps=1),
                _rate(cases, form=form, num_envs=envs, steps=most),
            )
            if most > 1 and one and many:
                gains.append(many / one)
        if gains:
            parts.append(f"{form} {min(gains):.1f} to {max(gains):.1f} times by {most} steps per call")
    return "; ".join(parts)


def _fused_on_gpu(cases: Sequence[Any]) -> str:
    """By the clock: what a GPU does takes no CPU time."""
    rates = {
        (labels["form"], labels["num_envs"], labels["steps"]): median(each["steps_per_s"] for each in values)
        for labels, values in cases
    }
    most = max(steps for _, _, steps in rates)
    sizes = sorted({envs for form, envs, steps in rates if form == "warp-gpu" and steps == most})
    gains = [rates["warp-gpu", envs, most] / rates["warp-gpu", envs, 1] for envs in sizes]
    over = [
        f"{rates['warp-gpu', envs, most] / rates['xla', envs, most]:.0f} (N = {envs})"
        for envs in sizes
        if ("xla", envs, most) in rates
    ]
    best = {form: max(rate for (one, _, _), rate in rates.items() if one == form) for form, _, _ in rates}
    return (
        f"fused, {min(gains):.0f} to {max(gains):.0f} times by {most} steps per call; over XLA with as many steps "
        f"{', '.join(over)}; most, million steps/s: "
        + ", ".join(f"{form} {rate / 1e6:,.0f}" for form, rate in best.items())
    )


def _complexity(cases: Sequence[Any]) -> str:
    own = [labels for labels, _ in cases if labels["form"] == "c"]
    most, envs = (max(labels[name] for labels in own) for name in ("steps", "num_envs"))
    gains = {}
    for labels in own:
        key = labels["copies"], labels["compute"]
        one, many = (
            _rate(cases, form="c", num_envs=envs, copies=key[0], compute=key[1], steps=steps)
            for steps in (1, most)
        )
        if one and many:
            gains[key] = many / one
    light = {copies: gain for (copies, compute), gain in gains.items() if compute == 1}
    heavy = {compute: gain for (copies, compute), gain in gains.items() if copies == 1}
    return (
        f"fused C, {most} steps per call over 1 with {envs} environments: {light[1]:.1f} with one state, "
        f"{light[max(light)]:.1f} with {max(light)}; {heavy[max(heavy)]:.1f} with {max(heavy)} times the compute"
    )
