"""``"auto"`` for numbers of GMIs and environments: what a search on this machine found, or finds now."""

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
"""Of a search that a run makes for itself; `rayagi search` may take as long as it likes."""


def resolve_auto(
    spec: RunSpec,
    machine: Machine,
    *,
    log: Callable[[str], None] = lambda text: None,
    may_search: bool = True,
    folder: Path | None = None,
) -> RunSpec:
    """The spec with numbers in the place of ``"auto"``; itself where there is none. Numbers that are given stay.

    Args:
        spec: the run
        machine: where it will run
        tell: told what is found, or measured, as sentences
        may_search: whether to search where nothing was found before; starts Ray
        folder: where searches keep what they measured; None: ~/.cache/rayagi/search

    Raises:
        PlanError: nothing was searched here yet, and may not be now.
        NothingMeasuredError: no candidate runs here.
    """
    gmi = spec.gmi
    if not gmi.wants_search:
        return spec
    # Imported here: most runs give numbers, and need nothing of this.
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
            f"Searching how to cut this machine for {spec.env.id}, {duration_text(BUDGET_S)} at most; kept for the next run."
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
    """GMIs of one device where the user gave a number."""
    gmi = spec.gmi
    if on_gpus and isinstance(gmi.gmis_per_gpu, int):
        return gmi.gmis_per_gpu
    if isinstance(gmi.num_gmis, int):
        return 1 if on_gpus else gmi.num_gmis  # a plan gives as many as that one per GPU
    return None
