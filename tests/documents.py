"""The commands and programs of the documentation's pages: finds them, runs them, or reads them with the real parser.

A comment above a fenced block says how it runs:

    <!-- run -->                                        in the unit tests
    <!-- run: slow -->                                  in the slow tests
    <!-- run: cluster -->                               in the slow tests of tests/cluster: it starts Ray
    <!-- run: head -->                                  in tests/cluster/test_job_submit.py, on the head of a cluster
    <!-- run: cluster background until "ready" -->      goes on once a line with this text was printed; SIGTERM at the end
    <!-- run: cluster last -->                          of the blocks that need the background commands before it
    <!-- run: cluster; "--time 5m" becomes "--iterations 2" -->      with less to do than a reader has
    <!-- run: cluster; after "rayagi train Ant-v5 --name NAME" -->   with what a reader has done before
    <!-- run: cluster; files of "docs/tutorials/own-task.md" -->     with another page's files
    <!-- run: cluster; needs "GPU", else "no GPU" -->   without a GPU each command fails, and its last line has this text;
                                                        a module's name likewise
    <!-- not run: REASON -->                            never; its commands are read by the real parser

All marked blocks of a page run in order in one folder, which also holds the page's files: blocks with a title. A block
``diff`` with a title changes a file of the checkout, in a copy that shadows it. ``{port}`` is a free port, the same on all
of the page.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from collectives.files import cache_folder
from placement.inventory import local_machine
from rayagi.envs import RenderingError, render_env

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
SHELL = ("sh", "bash", "console")
PACKAGES = ("rayagi", "actors", "collectives", "placement")
TIMEOUT_S = 400

_BLOCK = re.compile(
    r"(?:^<!-- (?P<way>run|not run)(?P<mark>.*?) -->\n)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_VIDEO = re.compile(r" --video \S+")
_TEXT = r'"((?:[^"\\]|\\.)*)"'
_SHORTER = re.compile(rf"{_TEXT} becomes {_TEXT}")
_TOOLS = {
    "rayagi": f"{shlex.quote(sys.executable)} -m rayagi",
    "python": shlex.quote(sys.executable),
    "pip": f"{shlex.quote(sys.executable)} -m pip",
    "ray": f"{shlex.quote(sys.executable)} -m ray.scripts.scripts",
    "tensorboard": f"{shlex.quote(sys.executable)} -m tensorboard.main",
}
"""Commands of this checkout, whatever else is installed."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    text: str
    mark: str | None
    """What the comment above it says after ``run``; None without such a comment."""
    reason: str | None
    """Why it does not run, as the comment ``not run`` says; None without such a comment."""

    @property
    def shortened(self) -> str:
        """What a reader has done before, and the text with what its comment replaces."""
        text = self.text
        for long, short in _SHORTER.findall(self.mark or ""):
            long, short = _unquoted(long), _unquoted(short)
            assert long in text, f"the block has no {long!r}:\n{self.text}"
            text = text.replace(long, short)
        return "".join(f"{before}\n" for before in self._texts("after")) + text

    @property
    def until(self) -> str | None:
        """The text that a background command prints when it is ready; None for others."""
        return next(iter(self._texts("background until")), None)

    @property
    def pages(self) -> tuple[Path, ...]:
        """Other pages whose files it uses."""
        return tuple(ROOT / name for name in self._texts("files of"))

    @property
    def needs(self) -> tuple[str, str] | None:
        """What its commands need, and what they say without it; None if they need nothing."""
        found = re.search(rf"needs {_TEXT}, else {_TEXT}", self.mark or "")
        return (found[1], _unquoted(found[2])) if found else None

    def takes(self, word: str) -> bool:
        """Whether its comment has the word: ``cluster``, ``slow`` or ``head``."""
        return word in re.sub(_TEXT, "", self.mark or "").replace(";", " ").replace(":", " ").split()

    def _texts(self, word: str) -> list[str]:
        return [_unquoted(text) for text in re.findall(rf"\b{word} {_TEXT}", self.mark or "")]


def _unquoted(text: str) -> str:
    return text.replace('\\"', '"')


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return [
        Block(
            found["language"],
            found["title"] or "",
            found["text"],
            found["mark"] if found["way"] == "run" else None,
            found["mark"].removeprefix(": ") if found["way"] == "not run" else None,
        )
        for found in _BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def is_fast(block: Block) -> bool:
    """Whether it runs in the unit tests."""
    return block.mark is not None and not any(map(block.takes, ("cluster", "slow", "head")))


def is_local(block: Block) -> bool:
    """Whether it runs without a cluster's head."""
    return block.mark is not None and not block.takes("head")


def starts_ray(page: Path) -> bool:
    """Whether a marked block of the page starts Ray."""
    return any(block.takes("cluster") for block in blocks(page))


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a shell block as words, without prompts, comments and variables before them."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        if words:
            yield words


def run_page(page: Path, folder: Path, chosen: Callable[[Block], bool] = is_local) -> str:
    """Run the page's chosen blocks in a folder of its own; returns all that they printed.

    Raises:
        AssertionError: a command failed; the message has its output.
    """
    for name in ("tests", "experiments", "Makefile", "pyproject.toml", "constraints.txt"):  # as in a checkout
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").mkdir()  # as `make setup` leaves it
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    (folder / ".venv" / ".ready").touch()
    write_files(page, folder)
    port = str(_free_port())
    with ExitStack() as running:
        printed = ""
        for block in filter(chosen, blocks(page)):
            printed += _run_block(block, folder, port, running)
            if block.takes("last"):
                running.close()
        return printed


def write_files(page: Path, folder: Path) -> None:
    """Write the page's files, and those of other pages that its blocks use; of the checkout's packages into a copy."""
    for block in blocks(page):
        for each in (block, *(each for other in block.pages for each in blocks(other))):
            if each.title:
                _write(each, folder)


def _free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def _write(block: Block, folder: Path) -> None:
    path = folder / block.title
    package = Path(block.title).parts[0]
    if package in PACKAGES and not (folder / package).exists():
        for each in PACKAGES:  # a part of them would be refused: which of two copies was meant?
            shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__"))
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


def _run_block(block: Block, folder: Path, port: str, running: ExitStack) -> str:
    text = block.shortened.replace("{port}", port)
    if block.language == "python":
        script = folder / (block.title or "snippet.py")
        script.write_text(text)
        return _run([sys.executable, str(script)], folder)
    assert block.language in SHELL, f"a block of {block.language!r} cannot run"
    if "--video" in text and not _can_draw():
        text = _VIDEO.sub("", text)
    if block.needs and not _has(block.needs[0]):
        return "".join(_run_refused(line, block.needs[1], folder) for line in text.splitlines())
    if block.until is None:
        return _run(_shell(text), folder)
    *before, last = text.splitlines()
    return _start(_shell("\n".join((*before, f"exec {last}"))), folder, block.until, running)


def _shell(text: str) -> list[str]:
    return ["bash", "-euo", "pipefail", "-c", text]


def _run(words: list[str], folder: Path) -> str:
    done = _finished(words, folder)
    assert done.returncode == 0, f"{words[-1]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def _run_refused(line: str, sentence: str, folder: Path) -> str:
    """Run a command that needs what this machine does not have: it fails, and says so in its last line."""
    done = _finished(_shell(line), folder)
    printed = done.stdout + done.stderr
    assert done.returncode != 0, f"{line} did not fail:\n{printed[-3000:]}"
    assert "Traceback" not in printed, printed
    assert sentence in done.stderr, f"{line} does not say {sentence!r}:\n{printed[-3000:]}"
    return printed


def _finished(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S * len(words[-1].splitlines()),
        check=False,
    )


def _start(words: list[str], folder: Path, ready: str, running: ExitStack) -> str:
    """Start a command that ends with the page, and wait until it prints ``ready``."""
    process = subprocess.Popen(
        words,
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
        process.communicate(timeout=120)
    finally:
        process.kill()


def _environment(folder: Path) -> Mapping[str, str]:
    """Variables for the tools of this checkout, with a cache of the page's own but for compiled kernels.

    ``ray.init()`` without an address joins any cluster that runs on the machine, such as another test's, which ends when
    that test does. ``local`` starts one of the page's own.
    """
    kept = {name: value for name, value in os.environ.items() if name != "RAY_JOB_ID"} | {
        "RAY_ADDRESS": "local"
    }
    if not (folder / ".cache").exists():
        (folder / ".cache" / "rayagi").mkdir(parents=True)
        (folder / ".cache" / "rayagi" / "kernels").symlink_to(cache_folder("kernels"))
    return kept | {
        "PATH": path_with_tools(folder),
        "PYTHONPATH": f"{folder}:{ROOT}",
        "XDG_CACHE_HOME": str(folder / ".cache"),
    }


def path_with_tools(folder: Path) -> str:
    """The variable PATH with the tools of this checkout first, which are made in the folder."""
    tools = folder / ".bin"
    if not tools.exists():
        tools.mkdir()
        for name, command in _TOOLS.items():
            tool = tools / name
            tool.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            tool.chmod(0o755)
    return f"{tools}:{os.environ['PATH']}"


@cache
def _has(what: str) -> bool:
    """Whether this machine has a GPU, or a module is installed."""
    if what == "GPU":
        return local_machine().num_gpus > 0
    return importlib.util.find_spec(what) is not None


@cache
def _can_draw() -> bool:
    """Whether this machine has OpenGL."""
    try:
        render_env("InvertedPendulum-v5").close()
    except RenderingError:
        return False
    return True
