"""The one place that chooses between a compiled program and its reference in torch or Python."""

from __future__ import annotations

import ctypes
import logging

from collectives.compiler import CompilerError, load
from collectives.mirrors import Mirrors

_log = logging.getLogger(__name__)


def load_or_none(instead: str, program: str, *, mirrors: Mirrors) -> ctypes.CDLL | None:
    """A program in C, loaded; None where it cannot be compiled here.

    Args:
        instead: what is done without it, for one line of the log
        program: in C
        mirrors: structs and constants of the program that Python has, too

    Raises:
        MirrorError: program and Python disagree about one of them.
    """
    try:
        return load(program, mirrors=mirrors)
    except CompilerError as error:
        _log.info("%s: %s", instead, error)
        return None
