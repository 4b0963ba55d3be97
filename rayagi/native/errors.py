"""What can go wrong with a program in C."""

from __future__ import annotations


class CompilerError(Exception):
    """A program that cannot be had here: no compiler, or it refuses, or there is no room for what it makes."""
