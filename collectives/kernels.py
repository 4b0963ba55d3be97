"""The one place that loads C kernels, and decides whether one of them or its reference in Python is used."""

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
    """A program in C, or a kind of programs, that does what slower code in Python, NumPy or torch does, too.

    Attributes:
        name: unlike that of any other
        module: that has it; its logger says when the reference is used instead
        reference: the readable code that tests compare it with, as ``module:name``
        without: what is different without the kernel, for the log; ``{}`` stands for whom it is made for
        flags: for the compiler, beside those of every program
        level: of the line in the log
    """

    name: str
    module: str
    reference: str
    without: str
    flags: tuple[str, ...] = ()
    level: int = logging.INFO

    def load(self, program: str, *, mirrors: Mirrors = NOTHING) -> ctypes.CDLL:
        """Compile a program, unless that was done before, and load it.

        Args:
            program: in C
            mirrors: structs and constants of the program that Python has, too

        Raises:
            MirrorError: program and Python disagree about one of them.
            CompilerError: it cannot be compiled here.
        """
        return load(program, self.flags, mirrors=mirrors)

    def made_or_none(
        self, make: Callable[[], _Made], *, whose: str = "", unfit: tuple[type[Exception], ...] = ()
    ) -> _Made | None:
        """What uses the kernel; None where its reference has to be used. Then the log says why, once in each process.

        Args:
            make: loads the program, and makes what uses it
            whose: whom it is made for
            unfit: what ``make`` raises where the kernel cannot do what is asked

        Raises:
            MirrorError: program and Python disagree about a struct or a constant: no reason to do without it.
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
