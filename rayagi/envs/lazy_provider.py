"""A family of environments that is imported when it is first asked: most need torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, cast

from actors.protocols import EnvInfo, VecEnv
from rayagi.envs.providers import EnvProvider, VecEnvArgs


class LazyProvider:
    """Implements Family by one that is made of ``module:Class`` and arguments when anything but its engines is asked for."""

    def __init__(self, engines: tuple[str, ...], where: str, *arguments: str) -> None:
        self.engines = engines
        self._where, self._arguments = where, arguments

    @cached_property
    def provider(self) -> EnvProvider:
        """The one that answers."""
        module, _, name = self._where.partition(":")
        return cast(EnvProvider, getattr(import_module(module), name)(*self._arguments))

    def ids(self) -> Iterable[str]:
        """As the family says."""
        return self.provider.ids()

    def knows(self, env_id: str) -> bool:
        """As the family says."""
        return self.provider.knows(env_id)

    def description(self, env_id: str) -> str:
        """As the family says."""
        return self.provider.description(env_id)

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        """As the family does."""
        self.provider.check(env_id, kwargs)

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """As the family says."""
        return self.provider.info(env_id, engine, kwargs)

    def make(self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs) -> VecEnv:
        """As the family does."""
        return self.provider.make(env_id, engine, kwargs, env_args)
