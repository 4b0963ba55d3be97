"""A family of environments that is imported when it is first asked: most need torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, cast

from actors.protocols import EnvInfo, VecEnv
from rayagi.envs.families import Family, Place


class LazyFamily:
    """Implements Family by one that is made of ``module:Class`` and arguments when anything but its engines is asked for."""

    def __init__(self, engines: tuple[str, ...], where: str, *arguments: str) -> None:
        self.engines = engines
        self._where, self._arguments = where, arguments

    @cached_property
    def family(self) -> Family:
        """The one that answers."""
        module, _, name = self._where.partition(":")
        return cast(Family, getattr(import_module(module), name)(*self._arguments))

    def ids(self) -> Iterable[str]:
        """As the family says."""
        return self.family.ids()

    def knows(self, env_id: str) -> bool:
        """As the family says."""
        return self.family.knows(env_id)

    def description(self, env_id: str) -> str:
        """As the family says."""
        return self.family.description(env_id)

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        """As the family does."""
        self.family.check(env_id, kwargs)

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """As the family says."""
        return self.family.info(env_id, engine, kwargs)

    def make(self, env_id: str, engine: str, kwargs: Mapping[str, Any], place: Place) -> VecEnv:
        """As the family does."""
        return self.family.make(env_id, engine, kwargs, place)
