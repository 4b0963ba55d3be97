"""Exceptions of users' environments: where they were raised, as one sentence."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rayagi.envs.errors import EnvError, EnvironmentFailedError

_LIBRARIES = re.compile(r"-packages[/\\](gymnasium[/\\](?!envs)|(mujoco|numpy|ray|torch)[/\\])")
_INSIDE = (str(Path(__file__).parent), "<frozen ")
_IN_CALLER = " in the code that called it"
_STDLIB = sysconfig.get_path("stdlib")


def failure_text(error: BaseException, otherwise: str = "") -> str:
    """The exception's first line, with ``file:line`` of its last frame outside rayagi, libraries and Python.

    ``otherwise``: where it was raised, if there is no such frame.
    """
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    at = f" at {own[-1].filename}:{own[-1].lineno}" if own else otherwise
    first_line = next(iter(str(error).strip().splitlines()), "it gives no reason")
    return f"{type(error).__name__}{at}: {first_line}"


def _is_library(path: str) -> bool:
    in_stdlib = path.startswith(_STDLIB) and "-packages" not in path
    return in_stdlib or path.startswith(_INSIDE) or _LIBRARIES.search(path) is not None


@contextmanager
def named_failures(env_id: str, where: Callable[[], str]) -> Iterator[None]:
    """Raise what an environment's code raises as EnvironmentFailedError; ``where``: the environment and its step."""
    try:
        yield
    except EnvError:
        raise
    except (Exception, SystemExit) as error:
        raise EnvironmentFailedError(env_id, where(), failure_text(error, _IN_CALLER)) from error
