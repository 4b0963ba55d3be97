"""Import of users' environments: ``module:Name`` names a class of an importable module, or an id that it registers."""

from __future__ import annotations

import os
import traceback
from importlib import import_module
from types import ModuleType
from typing import Any

from rayagi.envs.errors import EnvironmentOptionError


def user_module(env_id: str) -> ModuleType | None:
    """Import the module that an id names; None if it names none.

    Raises:
        EnvironmentOptionError: it cannot be imported; the message names the line if it is in the module itself.
    """
    name = env_id.rpartition(":")[0]
    if not name:
        return None
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise EnvironmentOptionError(env_id, _import_failure(name, error)) from error
        hint = f"; give the module's name, {name.removesuffix('.py')!r}" if name.endswith(".py") else ""
        raise EnvironmentOptionError(
            env_id,
            f"the module {name!r} cannot be imported: there is no {error.name} in {os.getcwd()}, nor on Python's path"
            f"{hint}; run this where it is, or set PYTHONPATH",
        ) from error
    except (Exception, SystemExit) as error:  # any exception of the user's code
        raise EnvironmentOptionError(env_id, _import_failure(name, error)) from error


def user_class(env_id: str, base: type[Any]) -> type[Any] | None:
    """The class that an id names, if it derives from ``base``; otherwise None.

    Raises:
        EnvironmentOptionError: the module cannot be imported.
    """
    module, name = user_module(env_id), env_id.rpartition(":")[2]
    found = getattr(module, name, None) if module is not None else None
    return found if isinstance(found, type) and issubclass(found, base) else None


def unsupported_reason(env_id: str) -> str | None:
    """Why no provider accepts an id whose module can be imported; None if it names no module."""
    module, name = user_module(env_id), env_id.rpartition(":")[2]
    if module is None:
        return None
    bases = "rayagi.envs.tasks.Task or rayagi.envs.fused.Simulator"
    if not hasattr(module, name):
        own = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        has = f"; its classes: {', '.join(own)}" if own else ""
        place = getattr(module, "__file__", None) or module.__name__
        return f"{place} has no class {name!r}, and registers no Gymnasium environment of that name{has}"
    found = getattr(module, name)
    if not isinstance(found, type):
        return f"{name} is a {type(found).__name__}; it must be a class derived from {bases}"
    return f"the class {name} must derive from {bases}; its bases: {', '.join(b.__name__ for b in found.__bases__)}"


def _import_failure(name: str, error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    at = f" at {last.filename}:{last.lineno}" if "importlib" not in last.filename else ""
    return f"the module {name!r} cannot be imported: {type(error).__name__}{at}: {error}"
