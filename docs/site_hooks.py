"""Hooks of `mkdocs build`: pages from outside docs/, links between them, and the reference that the code defines."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from rayagi.algorithms.registry import DEFINITIONS
from rayagi.cli.parser import build_parser
from rayagi.config.convert import run_spec_sections
from rayagi.config.spec import RunSpec
from rayagi.monitoring.catalogue import CATALOGUE, DERIVED, EVALUATION, GmiMetric, Metric

ROOT = Path(__file__).resolve().parents[1]
SHOWN = (".md", ".png", ".json", ".jsonl", ".csv")
"""Files of experiments/ that the site contains: pages, figures, and the measurements that pages link to."""
_LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)(#[^)\s]*)?\)")
_GENERATED = re.compile(r"<!-- generated: (\w+) -->")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the README as the home page, and the experiments' pages with their results."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    for path in sorted((ROOT / "experiments").rglob("*")):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in SHOWN and "/." not in name:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert what the code defines, and turn links between the repository's files into links between pages."""
    text = _GENERATED.sub(lambda found: GENERATED[found[1]](), markdown)
    return _LINK.sub(lambda found: f"]({_site_link(found[1], page.file.src_uri)}{found[2] or ''})", text)


def _site_link(link: str, page: str) -> str:
    """A relative link of the repository's page as one of the site. The site has docs/ at its top."""
    source = (
        page if page.startswith("experiments/") else "README.md" if page == "index.md" else f"docs/{page}"
    )
    target = os.path.normpath(os.path.join(os.path.dirname(source), link))
    target = "index.md" if target == "README.md" else target.removeprefix("docs/")
    return os.path.relpath(target, os.path.dirname(page) or ".")


def commands_text() -> str:
    """Every command's help, as the terminal shows it."""
    parts = []
    for name, parser in _commands(build_parser(), "rayagi"):
        parser.formatter_class = partial(
            argparse.RawDescriptionHelpFormatter, width=110, max_help_position=34
        )
        parts.append(f"## {name}\n\n```text\n{parser.format_help().rstrip()}\n```\n")
    return "\n".join(parts)


def _commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The command and those under it, depth first."""
    yield name, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, command in action.choices.items():
                yield from _commands(command, f"{name} {word}")


def settings_text() -> str:
    """A table for each section of a RunSpec."""
    sections = {name: kind for name, kind in run_spec_sections().items() if is_dataclass(kind)}
    top = [field for field in fields(RunSpec) if field.name not in (*sections, "learning")]
    parts = ["## Without a section\n", _settings_table("", RunSpec, top)]
    for name, kind in sections.items():
        readers = f"Read by `--algorithm` `{name}`.\n" if name in DEFINITIONS else ""
        parts += [
            f"## {name}\n",
            f"{inspect.getdoc(kind)}\n",
            readers,
            _settings_table(f"{name}.", kind, fields(kind)),
        ]
    return "\n".join(parts)


def _settings_table(prefix: str, kind: type, listed: typing.Iterable[Field[Any]]) -> str:
    hints = typing.get_type_hints(kind) | (run_spec_sections() if kind is RunSpec else {})
    notes = _field_notes(kind)
    rows = ["| setting | values | default | meaning |", "|---|---|---|---|"]
    for field in listed:
        default = field.default if field.default is not MISSING else {}
        cells = (f"`{prefix}{field.name}`", _type_text(hints[field.name]), f"`{_value_text(default)}`")
        rows.append(f"| {' | '.join(cells)} | {notes.get(field.name, '')} |")
    return "\n".join(rows) + "\n"


def _field_notes(kind: type) -> Mapping[str, str]:
    """Field -> the string below it in the class, or in the base class that declares it."""
    notes: dict[str, str] = {}
    for base in reversed([each for each in kind.__mro__ if is_dataclass(each)]):
        (definition,) = ast.parse(inspect.getsource(base)).body
        assert isinstance(definition, ast.ClassDef)
        for field, note in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(note, ast.Expr):
                assert isinstance(field.target, ast.Name)
                notes[field.target.id] = " ".join(ast.literal_eval(note.value).split()).replace("|", "\\|")
    return notes


def _type_text(hint: Any) -> str:
    """A type as users write its values."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return ", ".join(_type_text(each) for each in arguments)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if origin is tuple:
        return f"list of {_type_text(arguments[0])}"
    if origin is not None:
        return "mapping"
    return {int: "whole number", float: "number", str: "text", bool: "`true`, `false`", type(None): "`null`"}[
        hint
    ]


def _value_text(value: Any) -> str:
    """A default as YAML has it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value_text, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def metrics_text() -> str:
    """A table for each group of metrics."""
    parts = []
    everything = {each.name: each for each in (*CATALOGUE, *DERIVED, *EVALUATION)}.values()
    for group in typing.get_args(typing.get_type_hints(Metric)["group"]):
        rows = ["| metric | unit | over GMIs | meaning |", "|---|---|---|---|"]
        for each in (metric for metric in everything if metric.group == group):
            merge = each.merge if isinstance(each, GmiMetric) else "of the run"
            rows.append(f"| `{each.name}` | {each.unit} | {merge} | {each.help} |")
        parts.append(f"## {group}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


GENERATED = {"commands": commands_text, "settings": settings_text, "metrics": metrics_text}
"""Name in a page's ``<!-- generated: NAME -->`` -> what replaces it."""
