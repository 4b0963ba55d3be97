"""Lazily imported EnvProvider: most providers import torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib import import_module
from typing import Any, cast

from actors.protocols import EnvInfo, VecEnv
from rayagi.envs.providers import EnvProvider, VecEnvArgs


class LazyProvider:
    """Implements EnvProvider by delegation to ``module:Class(*arguments)``, imported on first use; ``engines`` is known."""

    def __init__(self, engines: tuple[str, ...], where: str, *arguments: str) -> None:
        self.engines = engines
        self._where, self._arguments = where, arguments

    @cached_property
    def provider(self) -> EnvProvider:
        """The provider, imported on first access."""
        module, _, name = self._where.partition(":")
        return cast(EnvProvider, getattr(import_module(module), name)(*self._arguments))

    def ids(self) -> Iterable[str]:
        """Delegates."""
        return self.provider.ids()

    def knows(self, env_id: str) -> bool:
        """Delegates."""
        return self.provider.knows(env_id)

    def description(self, env_id: str) -> str:
        """Delegates."""
        return self.provider.description(env_id)

    def check(self, env_id: str, kwargs: Mapping[str, Any]) -> None:
        """Delegates."""
        self.provider.check(env_id, kwargs)

    def info(self, env_id: str, engine: str, kwargs: Mapping[str, Any]) -> EnvInfo:
        """Delegates."""
        return self.provider.info(env_id, engine, kwargs)

    def make(self, env_id: str, engine: str, kwargs: Mapping[str, Any], env_args: VecEnvArgs) -> VecEnv:
        """Delegates."""
        return self.provider.make(env_id, engine, kwargs, env_args)
