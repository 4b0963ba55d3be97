"""``rayagi search``: find the configuration that trains fastest on this machine, by measuring."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from placement.errors import counted
from placement.search import Trial, TrialFailure, TrialMeasurement
from placement.text import aligned
from placement.validation import MAX_FINALISTS, undecided
from rayagi.cli.failures import UsageError
from rayagi.cli.output import complain, say
from rayagi.cli.search_explain import Explained, explain, explanation_text
from rayagi.cli.settings import machine_of_run, refuse_unmeasured, spec_from
from rayagi.coordinator.cluster import starts_local
from rayagi.coordinator.searching import SearchResult, SearchSettings, search
from rayagi.planning import usable_machine
from rayagi.run.atomic import make_writable
from rayagi.run.errors import disk_errors
from rayagi.run.quantities import bytes_text, duration_text

_WRITABLE = "free space there, or choose another folder with --out"
"""What to do if the figures cannot be written."""


def run(arguments: argparse.Namespace) -> int:
    """Search; returns the exit code."""
    if arguments.explain and not starts_local():
        raise UsageError(
            "--explain needs a local Ray, whose processes inherit the profiler: unset RAY_ADDRESS"
        )
    log = complain if arguments.json else say
    spec = spec_from(arguments)
    refuse_unmeasured(spec, "the search trains")
    machine = machine_of_run()
    settings = SearchSettings(
        objective=arguments.objective,
        budget_s=arguments.budget,
        gmis=_number(arguments.gmis),
        num_envs=_number(arguments.num_envs),
        folder=arguments.cache,
        again=arguments.again,
    )
    for gpu in usable_machine(spec, machine)[1]:
        log(gpu.text())
    folder = arguments.out or Path("runs") / f"search-{spec.env.id}"
    make_writable(folder, _WRITABLE)  # the figures come last
    log(f"Searching for the fastest configuration of {spec.env.id}. Ctrl-C keeps all measurements.")
    try:
        result = search(
            spec,
            machine,
            settings,
            on_trial=lambda trial: log(_line(trial)),
            on_start=lambda what: log(f"  measuring {what} ..."),
        )
    except (KeyboardInterrupt, SystemExit) as error:  # SystemExit: of Ray's handler of SIGTERM
        error.add_note(f"All measurements are kept: {_same_command(settings)} continues from there.")
        raise
    if not arguments.json:
        say("\n" + summary(result, run_options(arguments)))
    explained: list[Explained] = []
    try:
        log(f"\nFigures: {', '.join(str(path) for path in save_plots(result, folder))}")
        if arguments.explain:
            explained = explain(spec, machine, result, folder, log)
            log("\n" + explanation_text(explained))
    finally:  # the result is there, whatever follows it
        if arguments.json:
            profiles = {"profiles": [str(each.folder) for each in explained]} if explained else {}
            print(json.dumps(result.to_dict() | profiles, indent=1))
    return 0


def save_plots(result: SearchResult, folder: Path) -> list[Path]:
    """Figures 13 and 14 of the paper for this machine.

    Raises:
        DiskError: they cannot be written.
    """
    # Imported here: matplotlib is slow to import and needed only at the end.
    from rayagi.monitoring.search_plots import save_search_plots

    with disk_errors(folder, _WRITABLE):
        folder.mkdir(parents=True, exist_ok=True)
        return save_search_plots(result.trials, result.memory_bytes, folder, result.task)


def run_options(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The options of the same run for `rayagi train`, but its numbers of GMIs and environments."""
    names = ("config", "algorithm", "dataset", "template", "backend", "seed")
    given = [(name, getattr(arguments, name)) for name in names] + [("set", each) for each in arguments.set]
    words = (word for name, value in given if value is not None for word in (f"--{name}", str(value)))
    return (*words, *(("--trust-modules",) if arguments.trust_modules else ()))


def summary(result: SearchResult, options: Sequence[str] = ()) -> str:
    """The table of trials, the best one, and the command that uses it, with the run's other options."""
    best = result.best
    unit = "GMIs per GPU" if result.on_gpus else "GMIs"
    found = counted(best.gmis_per_gpu, "GMI") + (" per GPU" if result.on_gpus else "")
    head = (unit, "envs", "steps/s", "+-", "memory of a GMI", "projected", "Sat", "")
    fine = {each.candidate for each in result.trials if each.verdict != "coarse"}
    # Those of the coarse pass only where nothing followed.
    shown = [each for each in result.trials if each.verdict != "coarse" or each.candidate not in fine]
    rows = [head, *(_row(trial, best=trial is best) for trial in shown)]
    lines = aligned(rows, right=range(len(head)))
    ended = (
        ""
        if result.complete
        else f" The budget ended the search; {_same_command(result.settings)} continues it. {result.rest()}"
    )
    unsure = "" if best.verdict == "again" else " It was measured only once, briefly."
    unsure += _undecided(result)
    noise = "" if result.noise is None else f"\nNoise scale of the policy gradient: {result.noise.text()}."
    because = f" It is {best.reason}." if best.reason and best.verdict == "again" else ""
    option = "--set gmi.gmis_per_gpu=" if result.on_gpus else "--gmis "
    train = shlex.join(("rayagi", "train", result.task, *options))
    return "\n".join(
        [
            *lines,
            f"\nBest by {result.settings.objective}: {found}, {counted(best.num_envs, 'environment')} each, "
            f"{best.system_steps_per_s or 0:,.0f} steps/s, found in {duration_text(result.duration_s)}."
            f"{because}{ended}{unsure}{noise}",
            f"\nUse it:\n  {train} {option}{best.gmis_per_gpu} --num-envs {best.num_envs}",
            *(
                f"or let each machine use its own best:\n  {train} {each}"
                for each in _searched_by_a_run(result)
            ),
        ]
    )


def _same_command(settings: SearchSettings) -> str:
    """The command that continues an unfinished search."""
    return "the same command without --again" if settings.again else "the same command"


def _undecided(result: SearchResult) -> str:
    """A sentence if the best is within the errors of others, and these are large; empty if not."""
    alike = undecided(result.best, result.trials)
    if not alike:
        return ""
    errors = [
        f"{each.gmis_per_gpu} x {each.num_envs} (+- {100 * each.outcome.relative_error:.0f} %)"
        for each in alike[:MAX_FINALISTS]
        if isinstance(each.outcome, TrialMeasurement)
    ]
    more = f" and {len(alike) - len(errors)} more" if len(alike) > len(errors) else ""
    again = " Repeat the search with --again while nothing else uses the machine." if result.complete else ""
    return f"\nThe measurements do not decide between {', '.join(errors)}{more}.{again}"


def _searched_by_a_run(result: SearchResult) -> Iterator[str]:
    """Options with which a run takes this search's result; none if it would start another search."""
    given = result.settings
    if given.objective != "throughput" or (given.gmis is not None and given.num_envs is not None):
        return
    gmis = "--gmis auto" if given.gmis is None else f"--gmis {given.gmis}"
    if result.on_gpus and given.gmis is not None:
        gmis = f"--set gmi.gmis_per_gpu={given.gmis}"
    yield f"{gmis} --num-envs {given.num_envs or 'auto'}"


def _number(given: int | str | None) -> int | None:
    """A fixed number; None if the search chooses it."""
    return given if isinstance(given, int) else None


def _line(trial: Trial) -> str:
    outcome = trial.outcome
    what = f"  {trial.gmis_per_gpu:>3} x {trial.num_envs:<5}"
    if trial.verdict == "cannot win":
        return f"  {trial.gmis_per_gpu:>3} x ...   not tried, cannot win: {trial.reason}"
    if isinstance(outcome, TrialFailure):
        return f"{what} {outcome.kind}: {outcome.reason}"
    if outcome is None:
        return f"{what} not tried: eq. 4 projects {bytes_text(trial.projected_bytes or 0)} a GMI, more than there is"
    if trial.system_steps_per_s is None:
        return f"{what} took {bytes_text(outcome.memory_bytes)} a GMI, more than its share"
    line = f"{what} {trial.system_steps_per_s:>9,.0f} steps/s +- {100 * outcome.relative_error:.0f} %"
    sat = "" if trial.saturation is None else f"  Sat {trial.saturation:.2f}"
    if trial.verdict == "compared":
        return f"{line}  measured again{_because(trial)}"
    if trial.verdict == "again":
        return f"{line}  measured again" + ("  best" + _because(trial) if trial.best else "")
    return line + sat + ("  best so far" if trial.best else "") + _ended(trial)


def _ended(trial: Trial) -> str:
    if trial.verdict in ("saturated", "plateau"):
        return f"  {trial.verdict}{_because(trial)}"
    return f"  ({trial.reason})" if trial.reason else ""


def _because(trial: Trial) -> str:
    return f": {trial.reason}" if trial.reason else ""


def _row(trial: Trial, *, best: bool) -> tuple[str, ...]:
    outcome = trial.outcome
    return (
        str(trial.gmis_per_gpu),
        str(trial.num_envs),
        f"{trial.system_steps_per_s:,.0f}" if trial.system_steps_per_s is not None else "-",
        f"{100 * outcome.relative_error:.0f} %" if isinstance(outcome, TrialMeasurement) else "-",
        bytes_text(outcome.memory_bytes) if isinstance(outcome, TrialMeasurement) else "-",
        bytes_text(trial.projected_bytes) if trial.projected_bytes is not None else "-",
        f"{trial.saturation:.2f}" if trial.saturation is not None else "-",
        _remark(trial, best=best),
    )


def _remark(trial: Trial, *, best: bool) -> str:
    if trial.verdict == "again":
        return "again, best" if best else "again"
    if best:
        return "best"
    if isinstance(trial.outcome, TrialFailure):
        says_why = trial.verdict == "coarse" or trial.outcome.kind in ("too long", "cannot be planned")
        return trial.outcome.kind if says_why else trial.verdict
    return "" if trial.verdict in ("first", "going on") else trial.verdict
