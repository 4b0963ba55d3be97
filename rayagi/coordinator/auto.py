"""Resolves ``"auto"`` numbers of GMIs and environments by a cached or a new search on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from placement.errors import PlanError, counted
from placement.types import Machine
from rayagi.config.rules import checked
from rayagi.config.spec import RunSpec
from rayagi.coordinator.search_store import SearchStore
from rayagi.planning import uses_gpus
from rayagi.run.quantities import duration_text

BUDGET_S = 300.0
"""Time budget of a search that a run starts by itself; `rayagi search` has no default limit."""


def resolve_auto(
    spec: RunSpec,
    machine: Machine,
    *,
    log: Callable[[str], None] = lambda text: None,
    may_search: bool = True,
    folder: Path | None = None,
) -> RunSpec:
    """Replace ``"auto"`` by numbers; given numbers stay. Returns the spec itself if there is no ``"auto"``.

    Args:
        spec: the run
        machine: the machine of the run
        log: called with a sentence for each result and measurement
        may_search: whether to search if there is no cached result; starts Ray
        folder: cache of the searches; None: ~/.cache/rayagi/search

    Raises:
        PlanError: there is no cached result, and ``may_search`` is False.
        NothingMeasuredError: no candidate runs here.
    """
    gmi = spec.gmi
    if not gmi.wants_search:
        return spec
    # Imported here, since most runs give numbers and need no search.
    from rayagi.coordinator.searching import SearchSettings, search

    on_gpus = uses_gpus(spec, machine)
    settings = SearchSettings(
        gmis=_fixed_gmis(spec, on_gpus=on_gpus),
        num_envs=None if gmi.num_envs == "auto" else gmi.envs,
        budget_s=BUDGET_S,
        folder=folder,
    )
    store = SearchStore(spec, machine, folder)
    found = store.load_note(settings.name())
    if found is None:
        if not may_search:
            raise PlanError(
                "numbers left to a search",
                f"{spec.env.id} was not searched on this machine with this version",
                f"Run `rayagi search {spec.env.id}` first, or give numbers",
            )
        log(
            f"Searching the best configuration of {spec.env.id}, {duration_text(BUDGET_S)} at most; cached for later runs."
        )
        best = search(spec, machine, settings, on_start=lambda what: log(f"  measuring {what} ...")).best
        found = {"gmis": best.gmis_per_gpu, "num_envs": best.num_envs}
    gmis, num_envs = int(found["gmis"]), int(found["num_envs"])
    log(f"auto: {counted(gmis, 'GMI')}{' per GPU' if on_gpus else ''} of {num_envs} environments, by search.")
    in_all = on_gpus and isinstance(gmi.num_gmis, int)
    cut = replace(
        gmi,
        num_gmis=gmi.num_gmis if in_all else None if on_gpus else gmis,
        gmis_per_gpu=gmis if on_gpus and not in_all else None,
        num_envs=num_envs,
    )
    return checked(replace(spec, gmi=cut))


def _fixed_gmis(spec: RunSpec, *, on_gpus: bool) -> int | None:
    """GMIs of one device if the user gave a number, else None."""
    gmi = spec.gmi
    if on_gpus and isinstance(gmi.gmis_per_gpu, int):
        return gmi.gmis_per_gpu
    if isinstance(gmi.num_gmis, int):
        return 1 if on_gpus else gmi.num_gmis  # a plan gives as many as that one per GPU
    return None
