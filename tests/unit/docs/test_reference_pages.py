"""The reference that is made from the code has all of it, with a meaning for each."""

import re
import shlex

from docs.site_hooks import commands_text, metrics_text, settings_text
from rayagi.cli.parser import build_parser
from rayagi.cli.profile_parser import split_program
from rayagi.config.convert import setting_paths
from tests.public_names import public_names


def rows(text):
    """First cell -> the row's cells."""
    cells = [
        re.split(r" (?<!\\)\| ?", line.strip("| ") + " ")
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    return {row[0].strip("`"): row for row in cells}


def test_every_setting_has_a_row_with_its_meaning():
    settings = {name for name, kind in setting_paths().items() if kind != "section"}
    table = rows(settings_text())
    assert set(table) == settings
    assert [name for name, row in table.items() if not row[-1].strip()] == []


def test_a_row_shows_the_values_and_the_default_as_a_file_has_them():
    table = rows(settings_text())
    assert table["gmi.transport"][1:3] == ["`auto`, `shm`, `tcp`, `gloo`", "`auto`"]
    assert table["network.hidden"][1:3] == ["list of whole number", "`[256, 128, 64]`"]
    assert table["gmi.slices"][1:3] == ["list of number, `auto`, `null`", "`null`"]
    assert table["gmi.replan"][1:3] == ["`true`, `false`", "`false`"]


def test_every_metric_has_a_row():
    assert set(rows(metrics_text())) == set(public_names()["metrics"])


def test_every_command_is_explained_with_its_options():
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", commands_text(), re.MULTILINE | re.DOTALL))
    for command, options in public_names()["commands"].items():
        for option in options:
            assert all(word in sections[command] for word in option.split() if word.startswith("-")), (
                command,
                option,
            )


def test_the_examples_of_the_commands_help_are_commands():
    examples = re.findall(r"^ +(rayagi .*?)(?:  .*| \| .*)?$", commands_text(), re.MULTILINE)
    assert len(examples) > 80
    for example in examples:
        own, _program = split_program(shlex.split(example)[1:])
        build_parser().parse_args(own)
