"""Commands on the experiments' pages and within sentences: read by the parser of the command or of the experiment."""

import argparse
import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rayagi.cli.parser import build_parser
from rayagi.cli.profile_parser import split_program
from tests.documents import PAGES, ROOT

EXPERIMENTS = sorted((ROOT / "experiments").glob("*/README.md"))
VALUES = {"SEED": "1", "N": "1000", "K": "10", "NAME": "ppo", "...": "out"}
"""Values for the names that stand for them."""
COMMAND = r"(?:rayagi [a-z]|python -m experiments\.|python experiments/)"
MENTIONS = ("arguments are required", "expected one argument")
"""What the parser says of a command that a sentence only names."""


def written_commands(page):
    """The commands of indented lines and within sentences, and on experiments' pages those of blocks; as words."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    block = re.compile(r"^```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    lines = [line for found in block.findall(text) for line in found.splitlines()]
    text = block.sub("", text)
    lines = re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE) + (lines if page in EXPERIMENTS else [])
    for command in (*lines, *re.findall(r"`([^`\n]*)`", text)):
        if re.match(COMMAND, command.strip()):
            yield [VALUES.get(word, word) for word in shlex.split(command, comments=True)]


@pytest.mark.parametrize("page", [*PAGES, *EXPERIMENTS], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_within_sentences_exist_with_their_options(page):
    for name, *words in written_commands(page):
        if name == "rayagi":
            own, _program = split_program(words)
            said = io.StringIO()
            try:
                with contextlib.redirect_stderr(said):
                    build_parser().parse_args(own)
            except SystemExit:
                assert any(each in said.getvalue() for each in MENTIONS), (words, said.getvalue())


def programs(page):
    """Module or file, and words, of the page's experiments."""
    for name, *words in written_commands(page):
        if name == "python":
            yield (words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])


def source_of(name):
    if "/" in name:
        return (ROOT / name).read_text(encoding="utf-8")
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    assert spec is not None, f"there is no module {name}"
    return Path(spec.origin).read_text(encoding="utf-8")


@pytest.mark.slow
def test_experiments_take_the_options_that_pages_give_them():
    asked = [
        one
        for page in (*PAGES, *EXPERIMENTS)
        for one in programs(page)
        if re.search("ArgumentParser|command_line", source_of(one[0]))
    ]
    assert len(asked) > 80
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=280,
        check=True,
    )
    said = json.loads(done.stdout.splitlines()[-1])
    assert [(one, what) for one, what in zip(asked, said, strict=True) if what] == []


class OptionsReadError(BaseException):
    """Raised once a program's options were read: nothing else of it runs."""


def read_by_its_program(name, words):
    """What a program says of the words; empty if it takes them."""
    real = argparse.ArgumentParser.parse_known_args
    depth = 0

    def parse_known_args(parser, args=None, namespace=None):
        nonlocal depth
        depth += 1
        try:
            found, rest = real(parser, args, namespace)
        finally:
            depth -= 1
        if depth:  # the parser of a program's subcommand
            return found, rest
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        raise OptionsReadError

    said = io.StringIO()
    sys.argv = [name, *words]
    argparse.ArgumentParser.parse_known_args = parse_known_args
    try:
        with contextlib.redirect_stderr(said):
            start = runpy.run_path if "/" in name else runpy.run_module
            start(name, run_name="__main__")
    except OptionsReadError:
        return ""
    except SystemExit as ended:
        return f"{ended}: {said.getvalue()[-300:]}" if ended.code else ""  # 0 for --help
    finally:
        argparse.ArgumentParser.parse_known_args = real
    return "it ran without reading options"


if __name__ == "__main__":
    sys.stdout.write(json.dumps([read_by_its_program(*one) for one in json.load(sys.stdin)]) + "\n")
