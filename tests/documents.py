"""The commands and programs of the documentation's pages: finds them, runs them, or reads them with the real parser.

A comment above a fenced block says how it runs:

    <!-- run -->                                        in the unit tests
    <!-- run: cluster -->                               in tests/cluster: the page starts Ray
    <!-- run: cluster background until "ready" -->      goes on once a line with this text was printed; SIGTERM at the end
    <!-- run: cluster; "--time 5m" becomes "--iterations 2" -->      with less to do than a reader has

All marked blocks of a page run in order in one folder, which also holds the page's files: blocks with a title. A block
``diff`` with a title changes a file of the checkout, in a copy that shadows it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rayagi.envs import RenderingError, render_env

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SHELL = ("sh", "bash", "console")
TIMEOUT_S = 240

_BLOCK = re.compile(
    r'(?:^<!-- run(?P<mark>.*?) -->\n)?^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_VIDEO = re.compile(r" --video \S+")
_SHORTER = re.compile(r'"((?:[^"\\]|\\.)*)" becomes "((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    text: str
    mark: str | None
    """What the comment above it says after ``run``; None without a comment."""

    @property
    def shortened(self) -> str:
        """The text with what its comment replaces."""
        text = self.text
        for long, short in _SHORTER.findall(self.mark or ""):
            long, short = (part.replace('\\"', '"') for part in (long, short))
            assert long in text, f"the block has no {long!r}:\n{self.text}"
            text = text.replace(long, short)
        return text

    @property
    def until(self) -> str | None:
        """The text that a background command prints when it is ready; None for others."""
        found = re.search(r'background until "([^"]+)"', self.mark or "")
        return found[1] if found else None


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [
        Block(found["language"], found["title"] or "", found["text"], found["mark"])
        for found in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def starts_ray(page: Path) -> bool:
    """Whether a marked block of the page starts Ray."""
    return any(block.mark is not None and "cluster" in block.mark for block in blocks(page))


def runs(page: Path) -> bool:
    """Whether a block of the page is marked."""
    return any(block.mark is not None for block in blocks(page))


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a shell block as words, without prompts, comments and variables before them."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def run_page(page: Path, folder: Path) -> str:
    """Run the page's marked blocks in a folder of its own; returns all that they printed.

    Raises:
        AssertionError: a command failed; the message has its output.
    """
    found = blocks(page)
    for name in ("tests", "experiments"):  # commands that name them are for a checkout
        (folder / name).symlink_to(ROOT / name)
    write_files(page, folder)
    with ExitStack() as running:
        return "".join(_run_block(block, folder, running) for block in found if block.mark is not None)


def write_files(page: Path, folder: Path) -> None:
    """Write the page's files into a folder; those of the checkout's packages into a copy."""
    for block in blocks(page):
        if block.title:
            _write(block, folder)


def _write(block: Block, folder: Path) -> None:
    path = folder / block.title
    package = Path(block.title).parts[0]
    if package in ("rayagi", "actors", "collectives", "placement") and not (folder / package).exists():
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    if block.language == "diff":
        lines = block.text.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if not line.startswith("+"))
        new = "".join(line[1:] for line in lines if not line.startswith("-"))
        text = path.read_text()
        assert text.count(old) == 1, f"{block.title} does not contain once:\n{old}"
        path.write_text(text.replace(old, new))
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)


def _run_block(block: Block, folder: Path, running: ExitStack) -> str:
    if block.language == "python":
        script = folder / (block.title or "snippet.py")
        script.write_text(block.shortened)
        return _run([sys.executable, str(script)], folder)
    assert block.language in SHELL, f"a block of {block.language!r} cannot run"
    text = block.shortened if "--video" not in block.text or _can_draw() else _VIDEO.sub("", block.shortened)
    shell = ["bash", "-euo", "pipefail", "-c", text]
    if block.until is None:
        return _run(shell, folder)
    return _start(shell, folder, block.until, running)


def _run(words: list[str], folder: Path) -> str:
    done = subprocess.run(
        words,
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{words[-1]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def _start(words: list[str], folder: Path, ready: str, running: ExitStack) -> str:
    """Start a command that ends with the page, and wait until it prints ``ready``."""
    process = subprocess.Popen(
        [*words[:-1], f"exec {words[-1]}"],
        cwd=folder,
        env=_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    running.callback(_end, process)
    printed = ""
    for line in process.stdout:
        printed += line
        if ready in line:
            return printed
    raise AssertionError(f"{words[-1]} ended before it printed {ready!r}:\n{printed}")


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=30)
    finally:
        process.kill()


def _environment(folder: Path) -> Mapping[str, str]:
    """Variables for commands ``rayagi`` and ``python`` of this checkout.

    ``ray.init()`` without an address joins any cluster that runs on the machine, such as another test's, which ends when
    that test does. ``local`` starts one of the page's own.
    """
    kept = {name: value for name, value in os.environ.items() if name != "RAY_JOB_ID"} | {
        "RAY_ADDRESS": "local"
    }
    tools = folder / ".bin"
    tools.mkdir(exist_ok=True)
    for name, words in (("rayagi", "-m rayagi "), ("python", "")):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}"$@"\n')
        tool.chmod(0o755)
    return kept | {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": f"{folder}:{ROOT}"}


@cache
def _can_draw() -> bool:
    """Whether this machine has OpenGL."""
    try:
        render_env("InvertedPendulum-v5").close()
    except RenderingError:
        return False
    return True
