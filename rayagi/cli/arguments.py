"""Helpers shared by the commands' argument parsers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rayagi.run.quantities import parse_bytes, parse_count, parse_duration_s


def add_command(commands: Any, name: str, text: str, examples: str) -> argparse.ArgumentParser:
    """A command's parser, with its description, examples and ``--debug``. Its full name is the argument ``command``;
    ``refuse`` ends the process for arguments that it does not have.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an abbreviated option could start minutes of unwanted work
    )
    parser.set_defaults(command=parser.prog.removeprefix("rayagi "), refuse=partial(_refuse, parser))
    add_flag(parser, "--debug", "show tracebacks")
    return parser


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """With the option that is spelled alike, if there is one."""
    options = [option for action in parser._actions for option in action.option_strings]
    given = (word.partition("=")[0] for word in unknown if word.startswith("-"))
    near = [f"did you mean {found[0]}? " for word in given if (found := get_close_matches(word, options, 1))]
    parser.error(
        f"unrecognized arguments: {' '.join(unknown)}; {''.join(near)}{parser.prog} --help lists what it takes"
    )


def add_flag(parser: Any, name: str, text: str) -> None:
    """An option without a value."""
    parser.add_argument(name, action="store_true", help=text)


def add_value(parser: Any, name: str, metavar: str, text: str, **more: Any) -> None:
    """An argument whose ``metavar`` says its type (``_TYPES``); others are texts."""
    parser.add_argument(name, metavar=metavar, type=_TYPES.get(metavar, str), help=text, **more)


def add_trust(parser: Any) -> None:
    """The option ``--trust-modules`` of a command that opens a run folder or reads settings."""
    text = (
        "import what a run folder or a settings file names (task, network) from wherever it is; default: for a run "
        "folder from the current folder only, but not from run folders or installed packages; for a file outside of the "
        "current folder not from beside it"
    )
    add_flag(parser, "--trust-modules", text)


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a parser so that argparse shows its error message."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def seed_argument(text: str) -> int:
    """Parse a seed."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not an integer of at least 0")
    return int(text)


duration_argument = checked(parse_duration_s)
count_argument = checked(parse_count)
bytes_argument = checked(parse_bytes)

_TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("N", "L"), count_argument),
    "TIME": duration_argument,
    "BYTES": bytes_argument,
    **dict.fromkeys(("DATASET", "DIR", "FILE", "FOLDER", "JSON", "OUT", "PATH", "RUN"), Path),
}
"""Type of an argument by its ``metavar``."""


def skip_argument(text: str) -> int:
    """Parse a count that may be 0."""
    return 0 if text == "0" else count_argument(text)
