"""Which program a command runs. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def program_of(command: Sequence[str]) -> tuple[str, list[str]]:
    """A program's name and its arguments: the script's name or the module's where Python runs it."""
    kind, word, arguments = split_command(command)
    if kind == "-c":
        return f"-c {word}", arguments
    return word if kind == "-m" else os.path.basename(word).removesuffix(".py"), arguments


def script_of(command: Sequence[str]) -> str:
    """Path of the file that a command runs: a script of Python's, or a module below the current folder.

    Empty for other programs, which their name identifies, and where there is no such file.
    """
    kind, word, _ = split_command(command)
    if kind == "-c":
        return ""
    places = [f"{word.replace('.', '/')}{end}" for end in (".py", "/__main__.py")] if kind == "-m" else [word]
    found = (Path(place).resolve() for place in places if place.endswith(".py") and os.path.isfile(place))
    return str(next(found, ""))


def split_command(command: Sequence[str]) -> tuple[str, str, list[str]]:
    """Option before the program, ``-m`` or ``-c`` of Python's, or empty; the program; its arguments."""
    if not command:
        return "", "", []
    program, rest = command[0], list(command[1:])
    if not os.path.basename(program).startswith("python"):
        return "", program, rest
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in ("-m", "-c") and rest:
            return option, rest[0], rest[1:]
        if option in ("-W", "-X") and rest:
            rest.pop(0)
    return ("", rest[0], rest[1:]) if rest else ("", program, [])
