"""Brings the profiler into processes whose program knows nothing of it: a command's, and all Python processes it starts.

They inherit two environment variables. PYTHONPATH begins with the folder ``startup``, whose ``sitecustomize`` Python imports
at its start; RAYAGI_PROFILE says where and what to record.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from collectives.environment import temporary_environment
from rayagi.profiler import session
from rayagi.profiler.layout import HOOKS, Category
from rayagi.profiler.program import split_command
from rayagi.profiler.schedule import Schedule, Turns

VARIABLE = "RAYAGI_PROFILE"
_STARTUP = Path(__file__).parent / "startup"
_HELPER_SCRIPTS = re.compile(
    r"/multiprocessing/resource_tracker|/ray/(dashboard|autoscaler)/|/ray/_private/(log_monitor|runtime_env)|/ray/util/client/"
)
_HELPER_CODE = "from multiprocessing.resource_tracker import"


def injected(
    environment: Mapping[str, str],
    profile: Path,
    packages: Mapping[str, Category],
    schedule: Schedule | None,
    limit_mb: int,
    hooks: frozenset[str] = HOOKS,
    turns: Sequence[frozenset[str]] = (),
    gpu: bool = False,
) -> dict[str, str]:
    """An environment for a command, so that its Python processes are recorded into a profile."""
    settings = {
        "profile": str(profile),
        "root": str(Path(__file__).parents[2]),
        "packages": {name: int(category) for name, category in packages.items()},
        "schedule": None if schedule is None else asdict(schedule),
        "limit_mb": limit_mb,
        "hooks": sorted(hooks),
        "turns": [sorted(each) for each in turns],
        "gpu": gpu,
    }
    path = environment.get("PYTHONPATH")
    return {
        **environment,
        VARIABLE: json.dumps(settings),
        "PYTHONPATH": str(_STARTUP) if not path else os.pathsep.join((str(_STARTUP), path)),
    }


@contextmanager
def recording(profile: Path, packages: Mapping[str, Category], schedule: Schedule) -> Iterator[None]:
    """Python processes that this one starts within the block are recorded into a profile, GPUs too. Not thread-safe."""
    changed = injected(os.environ, profile.absolute(), packages, schedule, session.DEFAULT_LIMIT_MB, gpu=True)
    with temporary_environment({name: changed[name] for name in (VARIABLE, "PYTHONPATH")}):
        yield


def is_helper(command: Sequence[str]) -> bool:
    """Whether a Python process is one of Python's or Ray's own, in which nothing of the program runs."""
    kind, word, _ = split_command(["python", *command[1:]])
    if kind == "-c":
        return word.startswith(_HELPER_CODE)
    return _HELPER_SCRIPTS.search(f"/{word.replace('.', '/')}" if kind == "-m" else word) is not None


def record_this_process(text: str) -> None:
    """Begin a session for the rest of the process's life.

    Raises:
        ProfilerError: the profile's folder is gone, say.
    """
    if is_helper(sys.orig_argv):
        return
    settings = json.loads(text)
    started = session.start(
        Path(settings["profile"]),
        {name: Category(number) for name, number in settings["packages"].items()},
        schedule=None if settings["schedule"] is None else Schedule(**settings["schedule"]),
        limit_mb=settings["limit_mb"],
        hooks=frozenset(settings["hooks"]),
        turns=Turns([frozenset(each) for each in settings["turns"]]) if settings["turns"] else None,
        gpu=settings["gpu"],
    )
    atexit.register(session.stop, started)
