"""EnvProvider: a kind of environments with its ids and constructor; its definition; users' classes; options."""

from __future__ import annotations

import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from numbers import Real
from pkgutil import resolve_name
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, cast

import gymnasium
from gymnasium.envs.registration import EnvSpec

from actors.protocols import EnvInfo, VecEnv
from placement.errors import counted
from rayagi.envs.errors import EnvironmentOptionError, SimulationError, failure_text
from rayagi.envs.process_state import process_state_kept

if TYPE_CHECKING:
    from torch import Tensor

_logger = logging.getLogger("rayagi.envs")


@dataclass(frozen=True, slots=True)
class VecEnvArgs:
    """Arguments of a VecEnv: N environments starting at a global index, the seed, and the threads they may use."""

    num_envs: int
    first_env_index: int
    seed: int
    num_threads: int


class EnvProvider(ABC):
    """Environments of one kind."""

    catalogue: ClassVar[Mapping[str, type[Any]]] = {}
    """Classes of the ids that ``rayagi envs`` lists."""
    base: ClassVar[type[Any] | None] = None
    """Base class of users' own, whose ids are ``module:Class``."""

    @classmethod
    def find(cls, env_id: str) -> type[Any] | None:
        """The class of an id; None if there is none. Raises EnvironmentOptionError for a module that cannot be imported."""
        found = cls.catalogue.get(env_id)
        return found if found is not None or cls.base is None else user_class(env_id, cls.base)

    def knows(self, env_id: str) -> bool:
        """Whether the provider has an id, listed or not."""
        return self.find(env_id) is not None

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:  # noqa: B027 - some check in ``info``
        """Validate the options without simulating. Raises EnvironmentOptionError."""

    @abstractmethod
    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """Sizes and limits. Raises EnvError."""

    @abstractmethod
    def make(self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs) -> VecEnv:
        """Construct the environments. Raises EnvError."""


@dataclass(frozen=True)
class ProviderDefinition:
    """An EnvProvider in the registry. Most import torch, which takes seconds, so each is imported on first use."""

    engines: tuple[str, ...]
    """Engines that run its environments; the first is the default."""
    implementation: str
    """``module:Class`` of the EnvProvider."""
    arguments: tuple[str, ...] = ()
    """Arguments of the class."""
    extras: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Engine -> (rayagi's extra, packages that it installs), for engines that need one."""
    namespace: str = ""
    """What its ids begin with, except users' ``module:Class``; empty: its ids have nothing in common."""
    unlisted_ids: str = ""
    """The form of its ids, for ``rayagi envs``, if it lists none."""
    only_by_engine: bool = False
    """Whether it is used only if its engine is named; ``auto`` skips it."""

    @cached_property
    def provider(self) -> EnvProvider:
        """The provider, imported on first access."""
        return cast(EnvProvider, resolve_name(self.implementation)(*self.arguments))

    def knows(self, env_id: str) -> bool:
        """Whether the provider has an id. It is imported only for an id that it may have."""
        return (env_id.startswith(self.namespace) or ":" in env_id) and self.provider.knows(env_id)

    def unsupported_reason(self, engine: str) -> str | None:
        """Why an engine cannot be used here, and what to install; None if it can."""
        extra, packages = self.extras.get(engine, ("", ()))
        missing = [package for package in packages if find_spec(package) is None]
        if not missing:
            return None
        others = "".join(f", or take {other}" for other in self.engines if other != engine)
        return f"engine {engine} needs the package {' and '.join(missing)}: pip install 'rayagi[{extra}]'{others}"


def time_limit(
    env_id: str, kwargs: Mapping[str, Any], usual: int | None
) -> tuple[int | None, dict[str, Any]]:
    """The time limit (default ``usual``; option -1: none, as in ``gymnasium.make``), and the other options."""
    options = dict(kwargs)
    limit = options.pop("max_episode_steps", None)
    if limit is None:
        return usual, options
    if not _is_integer(limit) or (limit < 1 and limit != -1):
        raise EnvironmentOptionError(
            env_id, f"max_episode_steps is {limit!r}; it must be a positive integer, or -1 for no limit"
        )
    return (None if limit == -1 else limit), options


def check_options(env_id: str, task_class: type[Any], options: Mapping[str, Any]) -> None:
    """Validate a task's options, which are its dataclass fields.

    Raises:
        EnvironmentOptionError: an unknown option, or a value that is not of the kind of its default.
    """
    known = [field.name for field in fields(task_class)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise EnvironmentOptionError(
            env_id, f"there is no option {', '.join(unknown)}; it has max_episode_steps, {', '.join(known)}"
        )
    for field_ in fields(task_class):
        if field_.name in options:
            check_kind(env_id, field_.name, options[field_.name], field_.default)
    frame_skip = options.get("frame_skip", 1)
    if not _is_integer(frame_skip) or frame_skip < 1:
        raise EnvironmentOptionError(env_id, f"frame_skip is {frame_skip!r}; it must be a positive integer")


def check_kind(env_id: str, name: str, value: object, default: object) -> None:
    """Check that an option is of the kind of its default, if that is a boolean, a number, text, or a tuple of numbers.

    Raises:
        EnvironmentOptionError: it is not.
    """
    if isinstance(default, bool):
        fits, kind = isinstance(value, bool), "true or false"
    elif isinstance(default, float):
        fits, kind = _is_number(value), "a number"
    elif isinstance(default, str):
        fits, kind = isinstance(value, str), "text"
    elif isinstance(default, tuple):
        fits = isinstance(value, list | tuple) and len(value) == len(default) and all(map(_is_number, value))
        kind = f"a list of {counted(len(default), 'number')}"
    else:
        return
    if not fits:
        raise EnvironmentOptionError(env_id, f"{name} is {value!r}; it must be {kind}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def log_sim_errors(env_id: str, sim_errors: Mapping[str, int]) -> None:
    """Log the counts of simulation errors, for users without metrics."""
    if any(sim_errors.values()):
        counts = ", ".join(f"{count} {name}" for name, count in sim_errors.items() if count)
        _logger.warning("%s: simulation errors, whose worlds were reset: %s", env_id, counts)


def refuse_nonfinite(values: Tensor, quantity: str, first_env_index: int, steps: Tensor) -> None:
    """Raise SimulationError at the first environment with a value, (N, ...), that is not finite.

    Args:
        quantity: what the values are, for the message
        first_env_index: of these environments
        steps: of each one's episode, from 1   (N,)
    """
    if not values.sum().isfinite():  # one cheap sum detects any; finite values may overflow it
        bad = (~values.isfinite()).nonzero()
        if len(bad):
            env = int(bad[0, 0])
            raise SimulationError(first_env_index + env, int(steps[env]), quantity)


def check_num_envs(env_id: str, saved: int, num_envs: int) -> None:
    """Raise EnvironmentOptionError if a saved state is of another number of environments."""
    if saved != num_envs:
        raise EnvironmentOptionError(
            env_id,
            f"the saved state holds {counted(saved, 'environment')}, not {num_envs}; resume with num_envs={saved} per GMI",
        )


_FRESH_TORCH = ("set_default_dtype(torch.float32)", "set_grad_enabled(True)", "set_default_device('cpu')")


def torch_settings() -> tuple[str, ...]:
    """Settings of torch that hold for all code of this thread, as calls; those of a fresh torch if it is not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return _FRESH_TORCH
    return (
        f"set_default_dtype({torch.get_default_dtype()})",
        f"set_grad_enabled({torch.is_grad_enabled()})",
        f"set_default_device({torch.get_default_device().type!r})",
    )


def changed_torch(before: tuple[str, ...]) -> str:
    """What is wrong if a user's code has changed ``torch_settings`` since ``before``: networks would have them too."""
    made = [call for call, old in zip(torch_settings(), before, strict=True) if call != old]
    if not made:
        return ""
    return (
        f"its code calls torch.{made[0]}, which holds for rayagi's networks and learners too: give dtype= or device= where "
        "it makes tensors, and use `with torch.no_grad():` where it needs no gradients"
    )


def torch_modes() -> tuple[Any, bool]:
    """Default dtype and whether gradients are on: what of ``torch_settings`` is cheap enough for every step."""
    torch = sys.modules["torch"]
    return torch.get_default_dtype(), torch.is_grad_enabled()


def changed_modes(before: tuple[Any, bool]) -> str:
    """``changed_torch`` since ``before``, which is of ``torch_modes``."""
    dtype, grad = before
    return changed_torch((f"set_default_dtype({dtype})", f"set_grad_enabled({grad})", torch_settings()[2]))


def user_module(env_id: str) -> ModuleType | None:
    """Import the module that an id names; None if it names none.

    Raises:
        EnvironmentOptionError: it cannot be imported; the message names the line if it is in the module itself. Or it
            changes torch's settings.
    """
    name = env_id.rpartition(":")[0]
    if not name:
        return None
    before, ids = torch_settings(), set(gymnasium.registry)
    try:
        with process_state_kept():
            module = import_module(name)
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
    if reason := changed_torch(before):
        raise EnvironmentOptionError(env_id, reason)
    _added_ids.setdefault(module.__name__, set(gymnasium.registry) - ids)
    return module


_added_ids: dict[str, set[str]] = {}
"""Gymnasium's ids that the first import of a user's module added."""


def _registered_ids(module: ModuleType, cls: type[Any] | None = None) -> list[str]:
    """``module:id`` of the ids that a module registers, or (``cls``) of those that make a class."""
    own = module.__name__
    added = _added_ids.get(own, set()) if cls is None else set()
    wanted = (f"{own}:", f"{own}.") if cls is None else f"{cls.__module__}:{cls.__name__}"
    found = [
        env_id
        for env_id, spec in gymnasium.registry.items()
        if env_id in added
        or (_entry_point(spec).startswith(wanted) if cls is None else _entry_point(spec) == wanted)
    ]
    return [f"{own}:{env_id}" for env_id in sorted(found)]


def _entry_point(spec: EnvSpec) -> str:
    """``module:name`` of what makes an environment; empty if it has no name."""
    point = spec.entry_point
    if point is None or isinstance(point, str):
        return point or ""
    return f"{getattr(point, '__module__', '')}:{getattr(point, '__name__', '')}"


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
    ids = _registered_ids(module)
    registers = f"; it registers {', '.join(ids)}" if ids else ""
    if not hasattr(module, name):
        own = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        has = f"; its classes: {', '.join(own)}" if own else ""
        place = getattr(module, "__file__", None) or module.__name__
        return f"{place} has no class {name!r}, and registers no Gymnasium environment of that name{registers}{has}"
    found = getattr(module, name)
    if not isinstance(found, type):
        return f"{name} is a {type(found).__name__}; it must be a class derived from {bases}"
    if any(base.__module__.startswith("gymnasium.") for base in found.__mro__):
        if named := _registered_ids(module, found):
            return (
                f"{name} is a Gymnasium environment, which is named by a registered id: {' or '.join(named)}"
            )
        return (
            f"{name} is a Gymnasium environment, which is named by a registered id{registers}; put gymnasium.register("
            f"'{name}-v0', entry_point={name}, max_episode_steps=...) below it, and name {module.__name__}:{name}-v0"
        )
    return f"the class {name} must derive from {bases}; its bases: {', '.join(b.__name__ for b in found.__bases__)}"


def _import_failure(name: str, error: BaseException) -> str:
    return f"the module {name!r} cannot be imported: {failure_text(error)}"
