"""Commands, programs and links of the documentation: the fast ones run, the others are read by the real parser."""

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from rayagi.cli.parser import build_parser
from rayagi.cli.profile_parser import split_program
from rayagi.config.convert import with_settings
from rayagi.config.spec import EnvSpec, RunSpec
from tests.documents import PAGES, ROOT, SHELL, blocks, commands, is_fast, run_page, starts_ray

EXPERIMENTS = sorted((ROOT / "experiments").glob("*/README.md"))
NOT_OURS = {"curl", "export", "prometheus", "ray", "source", "ssh", "tensorboard"}


def each(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.relative_to(ROOT).as_posix())


def check_rayagi(words, page):
    own, _program = split_program(words)
    arguments = build_parser().parse_args(own)
    spec = RunSpec(algorithm=getattr(arguments, "algorithm", None) or "ppo", env=EnvSpec(id="Ant-v5"))
    with_settings(spec, getattr(arguments, "settings", []))


def check_python(words, page):
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words
    elif words[0] != "-c":
        assert (ROOT / words[0]).exists() or words[0] in {block.title for block in blocks(page)}, words


def check_make(words, page):
    for word in words:
        assert "=" in word or re.search(rf"^{word}:", (ROOT / "Makefile").read_text(), re.MULTILINE), word


def check_pip(words, page):
    (extras,) = re.findall(r"rayagi\[(.*)\]", words[-1])
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known), extras


CHECKS = {"rayagi": check_rayagi, "python": check_python, "make": check_make, "pip": check_pip}


@each([page for page in PAGES if not any(block.language == "diff" for block in blocks(page))])
def test_every_command_exists_with_its_options(page):
    """But on pages that change the checkout."""
    for block in blocks(page):
        if block.language in SHELL:
            for name, *words in commands(block):
                if name == "ray" and "--" in words:  # ray job submit ... -- COMMAND
                    name, *words = words[words.index("--") + 1 :]
                assert name in CHECKS or name in NOT_OURS, f"{name}: a command that no test knows"
                if name in CHECKS:
                    CHECKS[name](words, page)


@each(PAGES)
def test_a_comment_above_each_block_says_how_it_runs(page):
    """But files that other blocks use."""
    found = blocks(page)
    for block in found:
        if block.language in (*SHELL, "python") and block.mark is None and not block.reason:
            module = Path(block.title.removesuffix("/__init__.py")).stem or "of no file"
            used = any(module in other.text for other in found if other is not block)
            assert used, f"no comment says how it runs:\n{block.text}"


@each(PAGES)
def test_data_of_a_page_can_be_read(page):
    read = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads, "xml": ElementTree.fromstring}
    for block in blocks(page):
        if block.language in read:
            read[block.language](block.text)


@each([page for page in PAGES if any(map(is_fast, blocks(page)))])
def test_a_pages_fast_commands_run_in_order(page, tmp_path):
    run_page(page, tmp_path, is_fast)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@each([page for page in PAGES if any(block.takes("slow") for block in blocks(page)) and not starts_ray(page)])
def test_all_of_a_pages_commands_run_in_order(page, tmp_path):
    run_page(page, tmp_path)


@each([*PAGES, *EXPERIMENTS])
def test_links_between_files_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", text):
        assert (page.parent / link).exists(), link


def test_paths_of_pages_in_the_code_exist():
    named = {
        match: source
        for package in ("rayagi", "actors", "placement", "collectives", "tests", "experiments")
        for source in (ROOT / package).rglob("*.py")
        for match in re.findall(r"\bdocs/[\w/-]+\.md", source.read_text(encoding="utf-8"))
    }
    assert {name: source for name, source in named.items() if not Path(ROOT, name).exists()} == {}
