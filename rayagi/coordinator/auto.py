"""Resolves ``"auto"``: numbers of GMIs and environments by a search, template and sizes by the model and short runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from placement.errors import PlanError, counted
from placement.types import Machine
from rayagi.config.learning import Template
from rayagi.config.rules import checked
from rayagi.config.spec import RunSpec
from rayagi.coordinator import template_choice
from rayagi.coordinator.search_store import Measuring, SearchStore
from rayagi.planning import uses_gpus
from rayagi.run.quantities import duration_text

BUDGET_S = 300.0
"""Time budget of a search that a run starts by itself; `rayagi search` has no default limit."""


_continued: set[Path] = set()
"""Stores of the searches that this process has continued: the trials of a Tune experiment resolve the same one."""


def resolve_auto(
    spec: RunSpec,
    machine: Machine,
    *,
    log: Callable[[str], None] = lambda text: None,
    measuring: Measuring = "unfinished",
) -> RunSpec:
    """Replace ``"auto"`` by values; given ones stay. Returns the spec itself if there is no ``"auto"``.

    Args:
        spec: the run
        machine: the machine of the run
        log: called with a sentence for each result and measurement
        measuring: what may be measured, which starts Ray

    Raises:
        PlanError: something is not cached, and nothing may be measured.
        NothingMeasuredError: no candidate runs here.
    """
    if spec.gmi.template == "auto":
        name = template_choice.chosen(spec, machine, log=log, measuring=measuring)
        spec = checked(template_choice.on_template(spec, cast("Template", name)))
    if spec.gmi.slices == "auto":
        # Imported here: it loads torch and Ray, and most runs give sizes.
        from rayagi.coordinator.unequal_choice import chosen_sizes

        return checked(spec.with_gmi(slices=chosen_sizes(spec, machine, log=log, measuring=measuring)))
    return _with_numbers(spec, machine, log, measuring) if spec.gmi.wants_search else spec


def _with_numbers(
    spec: RunSpec, machine: Machine, log: Callable[[str], None], measuring: Measuring
) -> RunSpec:
    """The spec with the numbers that a search finds."""
    # Imported here: it loads torch and Ray, and most runs give numbers.
    from rayagi.coordinator.searching import SearchSettings, search

    gmi = spec.gmi
    on_gpus = uses_gpus(spec, machine)
    settings = SearchSettings(
        gmis=_fixed_gmis(spec, on_gpus=on_gpus),
        num_envs=None if gmi.num_envs == "auto" else gmi.envs,
        budget_s=BUDGET_S,
    )
    store = SearchStore(spec, machine)
    found = store.load_note(settings.name())
    if found is None and measuring == "nothing":
        raise PlanError(
            "numbers left to a search",
            f"{spec.env.id} was not searched on this machine with this version",
            f"Run `rayagi search {spec.env.id}` first, or give numbers",
        )
    continues = measuring == "unfinished" and store.path not in _continued
    if found is None or (continues and not found["complete"]):
        begun = "Searching" if found is None else "Continuing the search of"
        log(
            f"{begun} the best configuration of {spec.env.id}, {duration_text(BUDGET_S)} at most; cached for later runs."
        )
        search(spec, machine, settings, on_start=lambda what: log(f"  measuring {what} ..."))
        _continued.add(store.path)
        found = SearchStore(spec, machine).load_note(settings.name())
        assert found is not None  # search() has saved it
    if not found["complete"]:
        log(f"The search is not complete. {found['rest']} `rayagi search {spec.env.id}` completes it.")
    gmis, num_envs = int(found["gmis"]), int(found["num_envs"])
    log(
        f"auto: {counted(gmis, 'GMI')}{' per GPU' if on_gpus else ''} of {counted(num_envs, 'environment')}, by search."
    )
    in_all = on_gpus and isinstance(gmi.num_gmis, int)
    found_gmi = spec.with_gmi(
        num_gmis=gmi.num_gmis if in_all else None if on_gpus else gmis,
        gmis_per_gpu=gmis if on_gpus and not in_all else None,
        num_envs=num_envs,
    )
    return checked(found_gmi)


def _fixed_gmis(spec: RunSpec, *, on_gpus: bool) -> int | None:
    """GMIs of one device if the user gave a number, else None."""
    gmi = spec.gmi
    if on_gpus and isinstance(gmi.gmis_per_gpu, int):
        return gmi.gmis_per_gpu
    if isinstance(gmi.num_gmis, int):
        return 1 if on_gpus else gmi.num_gmis  # a plan gives as many as that one per GPU
    return None
