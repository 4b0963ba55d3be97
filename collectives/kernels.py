"""Loads C kernels, and falls back to the Python reference where one cannot be compiled."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from collectives.compiler import CompilerError, load
from collectives.mirrors import NOTHING, Mirrors

_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A C program, or a family of generated ones, that replaces slower code in Python, NumPy or torch.

    Attributes:
        name: unique
        module: that uses it; its logger reports the fallback to the reference
        reference: the readable code that tests compare it with, as ``module:name``
        without: log message for the fallback; ``{}`` is replaced by the kernel's user
        flags: for the compiler, in addition to the common ones
        level: of the log message
    """

    name: str
    module: str
    reference: str
    without: str
    flags: tuple[str, ...] = ()
    level: int = logging.INFO

    def load(self, program: str, *, mirrors: Mirrors = NOTHING) -> ctypes.CDLL:
        """Compile a program with this kernel's flags, or take it from the cache, and load it: ``compiler.load``."""
        return load(program, self.flags, mirrors=mirrors)

    def made_or_none(
        self, make: Callable[[], _Made], *, whose: str = "", unfit: tuple[type[Exception], ...] = ()
    ) -> _Made | None:
        """The result of ``make``; None if the reference has to be used, with the reason logged once per process.

        Args:
            make: loads the program and makes the object that uses it
            whose: the kernel's user, for the log message
            unfit: exceptions of ``make`` that mean that the kernel does not support the request

        Raises:
            MirrorError: C and Python disagree about a struct or a constant; a bug, so there is no fallback.
        """
        reasons: tuple[type[Exception], ...] = (CompilerError, *unfit)
        try:
            return make()
        except reasons as error:
            _log_once(self.module, self.level, f"{self.without.format(whose)}: {error}")
            return None


@cache
def _log_once(logger: str, level: int, text: str) -> None:
    logging.getLogger(logger).log(level, "%s", text)
