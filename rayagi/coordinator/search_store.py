"""Cache of searches and profiles, keyed by machine, task, code and library versions; and what they predict of a plan.

One JSON file per key. A search writes after every trial; the next search replays the stored trials and continues.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import rayagi
from collectives.files import cache_folder
from placement.errors import counted
from placement.plan import PlacementPlan
from placement.search import TrialFailure, TrialMeasurement
from placement.types import Machine
from placement.validation import SUFFICIENT_DURATION_S, VALIDATION_ROUNDS, half_width
from rayagi.config.convert import run_spec_to_dict
from rayagi.config.spec import RunSpec
from rayagi.profiler.machine import cpu_model
from rayagi.run.atomic import make_writable, replace_json, waiting_for_lock
from rayagi.run.errors import DiskError
from rayagi.run.prediction import Prediction
from rayagi.run.versions import PACKAGES, package_version

_FREE_GMI = (
    "num_gmis",
    "gmis_per_gpu",
    "num_envs",
    "left_out",
    "reserve_timeout_s",
    "collective_timeout_s",
    "hang_timeout_s",
)
"""Fields of the gmi section that are not in the key: varied by the search, or without influence on measurements."""
_FREE_LEARNING = (
    "learning_rate",
    "gamma",
    "gae_lambda",
    "value_coef",
    "target_kl",
    "adam_eps",
    "obs_clip",
    "clip_ratio",
    "rho_bar",
    "c_bar",
    "rms_decay",
    "rms_eps",
    "cg_damping",
)
"""Numbers of the algorithm that scale terms, and leave the work of an update as it is: trials of a Tune experiment that
differ in them share one search."""
_OPTIONAL_LEARNING = ("entropy_coef", "max_grad_norm", "value_clip")
"""Numbers of which only 0 or None saves work."""
_CODE = (
    "actors",
    "collectives",
    "placement",
    *(
        f"rayagi/{package}"
        for package in ("algorithms", "coordinator", "envs", "models", "native", "serving")
    ),
)
"""Folders whose code a trial runs, in Python and C; a change there invalidates old measurements."""


_WRITABLE = "free space there, or give another folder with --cache"
"""What to do if the file cannot be written."""

Measuring = Literal["nothing", "missing", "unfinished"]
"""What a choice may measure. missing: what is not cached. unfinished: also what its budget ended, once per process, and what
may end otherwise the next time."""

_measured_here: set[tuple[Path, str]] = set()
"""Comparisons that this process has measured: file and name of the note."""


def default_folder() -> Path:
    """Where measurements are kept."""
    return cache_folder("search")


class SearchStore:
    """Measurements of one task on one machine. Missing or unreadable files count as empty.

    Several processes may measure at the same time: what each saves is added to the file.

    Args:
        spec: the task
        machine: the machine
        folder: of the file; None: ~/.cache/rayagi/search
        again: what the file has counts as missing, and stays until this store saves a new value
    """

    def __init__(
        self, spec: RunSpec, machine: Machine, folder: Path | None = None, *, again: bool = False
    ) -> None:
        self.key = search_key(spec, machine)
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:12]
        name = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in spec.env.id)
        self.path = (folder or default_folder()) / f"{name}-{digest}.json"
        self._content = self._read()
        self._unwritten = _empty()
        """What was saved since the file was written: that may have failed."""
        self._again = again
        self._saved: set[tuple[str, str]] = set()
        """(kind, name) of what this store has saved."""
        self._remeasured: set[str] = set()
        """Candidates with a new trial, whose stored comparisons and validation rounds belong to the old one."""

    def outcome(
        self, gmis_per_gpu: int, num_envs: int, round_: int = 0
    ) -> TrialMeasurement | TrialFailure | None:
        """The stored outcome of a candidate; None if there is none.

        Args:
            gmis_per_gpu: of the candidate
            num_envs: of the candidate
            round_: 0: the search's trial; 1, 2, ...: a validation round; -1, -2, ...: a comparison
        """
        stored = self._stored("outcomes", _name(gmis_per_gpu, num_envs, round_))
        if stored is None:
            return None
        return TrialFailure(**stored) if "kind" in stored else TrialMeasurement(**stored)

    def trials(self, gmis_per_gpu: int) -> tuple[tuple[int, TrialMeasurement], ...]:
        """(environments, measurement) of the search's trials with ``gmis_per_gpu`` GMIs, ascending."""
        found = []
        for name in self._content["outcomes"]:
            gmis, _, envs = name.partition("x")
            if envs.isdecimal() and int(gmis) == gmis_per_gpu:
                outcome = self.outcome(gmis_per_gpu, int(envs))
                if isinstance(outcome, TrialMeasurement):
                    found.append((int(envs), outcome))
        return tuple(sorted(found, key=lambda trial: trial[0]))

    def rounds(self, gmis_per_gpu: int, num_envs: int) -> tuple[TrialMeasurement, ...]:
        """Validation rounds of a candidate; empty if there is only one short round."""
        asked = (self.outcome(gmis_per_gpu, num_envs, round_) for round_ in range(1, VALIDATION_ROUNDS + 1))
        found = tuple(outcome for outcome in asked if isinstance(outcome, TrialMeasurement))
        return (
            found if len(found) > 1 or any(each.duration_s >= SUFFICIENT_DURATION_S for each in found) else ()
        )

    def save_outcome(
        self, gmis_per_gpu: int, num_envs: int, outcome: TrialMeasurement | TrialFailure, round_: int = 0
    ) -> None:
        """Store a measurement, or a failure by memory or time. Crashes and hangs may not recur and are not stored.

        Raises:
            DiskError: the file cannot be written.
        """
        if isinstance(outcome, TrialMeasurement) or outcome.is_final:
            if self._again and round_ == 0:
                self._remeasured.add(_name(gmis_per_gpu, num_envs, 0))
            self._save("outcomes", _name(gmis_per_gpu, num_envs, round_), asdict(outcome))

    def load_note(self, name: str) -> dict[str, Any] | None:
        """A stored profile or search result by name; None if there is none."""
        return self._stored("notes", name)

    def save_note(self, name: str, value: Mapping[str, Any]) -> None:
        """Store a profile or search result.

        Raises:
            DiskError: the file cannot be written.
        """
        self._save("notes", name, dict(value))

    def load_comparison(self, name: str, measuring: Measuring) -> dict[str, Any] | None:
        """A stored comparison by name; None if there is none, or it has to be repeated.

        One that may end otherwise the next time counts in the process that measured it, which may create many trials of a
        Tune experiment, and in those trials (``"missing"``), which were given the resources of its result.
        """
        stored = self.load_note(name)
        if stored is None:
            return None
        if measuring != "missing" and not stored["is_final"] and (self.path, name) not in _measured_here:
            return None
        found: dict[str, Any] = stored["found"]
        return found

    def save_comparison(
        self, name: str, found: Mapping[str, Any], *, is_final: bool, log: Callable[[str], None]
    ) -> None:
        """Store a comparison; ``is_final``: whether it would end the same again."""
        _measured_here.add((self.path, name))
        self.try_save_note(name, {"found": dict(found), "is_final": is_final}, log)

    def try_save_note(self, name: str, value: Mapping[str, Any], log: Callable[[str], None]) -> None:
        """As ``save_note``, for runs that can go on without a cache: logs where it cannot be written."""
        try:
            self.save_note(name, value)
        except DiskError as error:
            log(
                f"The measurement is not cached, and the next run repeats it: cannot write {self.path}: {error.reason}."
            )

    def make_folder(self) -> None:
        """Make the file's folder, before the first measurement.

        Raises:
            DiskError: no file can be made in it.
        """
        make_writable(self.path.parent, _WRITABLE)

    def _read(self) -> dict[str, Any]:
        try:
            stored = json.loads(self.path.read_text())
            content = {"outcomes": dict(stored["outcomes"]), "notes": dict(stored["notes"])}
            if stored["key"] == self.key and stored["digest"] == _digest(content):
                return content
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass
        return _empty()

    def _stored(self, kind: str, name: str) -> dict[str, Any] | None:
        if self._again and (kind, name) not in self._saved:
            return None
        found: dict[str, Any] | None = self._content[kind].get(name)
        return found

    def _save(self, kind: str, name: str, value: dict[str, Any]) -> None:
        self._content[kind][name] = self._unwritten[kind][name] = value
        self._saved.add((kind, name))
        self._write()

    def _write(self) -> None:
        self.make_folder()
        with waiting_for_lock(self.path.parent, _WRITABLE):
            # With what other processes have saved since this one read it.
            stored = self._read()
            stored["outcomes"] = self._without_replaced(stored["outcomes"])
            content = {kind: stored[kind] | self._unwritten[kind] for kind in stored}
            # As a reader will have it: JSON makes lists of tuples, and text of keys.
            content = json.loads(json.dumps(content))
            replace_json(self.path, {"key": self.key, "digest": _digest(content), **content})
        self._content, self._unwritten = content, _empty()

    def _without_replaced(self, outcomes: Mapping[str, Any]) -> dict[str, Any]:
        """Without the old comparisons and rounds of candidates that were measured again."""
        return {
            name: outcome
            for name, outcome in outcomes.items()
            if name.partition(" ")[0] not in self._remeasured or ("outcomes", name) in self._saved
        }


def _empty() -> dict[str, Any]:
    return {"outcomes": {}, "notes": {}}


def _digest(content: Mapping[str, Any]) -> str:
    """Of outcomes and notes: a file that was damaged or edited counts as unreadable, whatever it still says."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _name(gmis_per_gpu: int, num_envs: int, round_: int) -> str:
    later = f" again {round_}" if round_ > 0 else f" compared {-round_}" if round_ else ""
    return f"{gmis_per_gpu}x{num_envs}{later}"


def search_key(spec: RunSpec, machine: Machine) -> dict[str, Any]:
    """The key: everything that a measurement depends on, as JSON-ready values."""
    task = run_spec_to_dict(spec)
    for name in ("seed", "evaluation", "total_env_steps"):
        del task[name]
    for name in _FREE_GMI:
        del task["gmi"][name]
    del task["network"]["initial_log_std"]
    learning = task[spec.algorithm]
    for name in learning.keys() & {*_FREE_LEARNING}:
        del learning[name]
    for name in learning.keys() & {*_OPTIONAL_LEARNING}:
        learning[name] = bool(learning[name])
    nodes = [
        {
            "cores": len(node.usable_cores),
            "memory_bytes": node.memory_total_bytes,
            "gpus": [[gpu.name, gpu.memory_total_bytes, gpu.sm_count] for gpu in node.usable_gpus],
        }
        for node in machine.nodes
    ]
    versions = {"python": platform.python_version(), **{name: package_version(name) for name in PACKAGES}}
    return {
        "task": task,
        "machine": {"nodes": nodes, "cpu": cpu_model()},
        "versions": versions,
        "code": code_digest(),
        "user_code": {
            name: _user_digest(name) for name in (spec.network.module, spec.env.id) if name and ":" in name
        },
    }


def _user_digest(reference: str) -> str:
    """Digest of the file of ``file.py:Class`` or ``package.module:Name``, without what it imports; "": none is found."""
    place = reference.rpartition(":")[0]
    if place.endswith(".py"):  # as rayagi.models.user_module looks for it
        files = [Path(folder, place) for folder in ("", *sys.path)]
    else:
        try:
            spec = find_spec(place)
        except ImportError:
            spec = None
        files = [Path(spec.origin)] if spec is not None and spec.origin else []
    found = next((file for file in files if file.is_file()), None)
    return hashlib.sha256(found.read_bytes()).hexdigest()[:16] if found else ""


@cache
def code_digest() -> str:
    """Digest of the code that a trial runs."""
    digest = hashlib.sha256()
    for name, file in code_files().items():
        digest.update(name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def code_files() -> dict[str, Path]:
    """Files of the code that a trial runs, by their path in the project."""
    root = Path(rayagi.__file__).parents[1]
    found = (
        path for folder in _CODE for path in (root / folder).rglob("*") if path.suffix in (".py", ".c", ".h")
    )
    return {str(path.relative_to(root)): path for path in sorted(found)}


def predict_throughput(spec: RunSpec, plan: PlacementPlan) -> Prediction | None:
    """Predict the plan's throughput; None if it was never measured on this machine.

    The mean of its validation rounds with their prediction interval, else the result of its single trial. A probe measures
    one device. A plan on n devices with equal numbers of GMIs is predicted n times as fast. Plans without some of their GMIs
    are not measured.
    """
    if plan.left_out or not plan.hosting("simulator"):
        return None
    devices = [gmi_slice.gpu_uuid for gmi_slice in plan.slices]
    num_devices = len(set(devices))
    per_device = plan.num_gmis // num_devices
    if any(devices.count(device) != per_device for device in devices):
        return None
    store = SearchStore(spec, plan.machine)
    candidate = f"{per_device} x {counted(plan.num_envs, 'environment')}"
    rounds = store.rounds(per_device, plan.num_envs)
    trial = store.outcome(per_device, plan.num_envs)
    measured = rounds or ((trial,) if isinstance(trial, TrialMeasurement) else ())
    if not measured:
        return None
    speeds = [outcome.steps_per_s for outcome in measured]
    steps = plan.num_envs * spec.learning.rollout_length
    return Prediction(
        predicted_steps_per_s=fmean(speeds) * plan.num_gmis,
        own_work_steps_per_s=fmean(_own_work_steps_per_s(outcome, steps) for outcome in measured),
        half_width=half_width(speeds) if rounds else None,
        source=f"{counted(len(rounds), 'measurement')} of {candidate}"
        if rounds
        else f"a short trial of {candidate}",
    )


def _own_work_steps_per_s(outcome: TrialMeasurement, steps: int) -> float:
    """Speed of a GMI without its waiting, as the health monitor measures it; ``steps``: of its iteration.

    steps / (steps / steps_per_s - sync_s)
    """
    return steps / (steps / outcome.steps_per_s - outcome.phases_s.get("sync_s", 0.0))
