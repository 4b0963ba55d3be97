"""Measures the structure of a checkout. See README.md.

python -m experiments.structure.run            this checkout
python -m experiments.structure.run --json     the same, for a comparison
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("actors", "collectives", "placement", "rayagi")
PRIVATE_WORDS = (Path(__file__).parent / "private_words.txt").read_text().split()


def sources(*suffixes: str) -> Iterator[Path]:
    """Files of the product under version control."""
    listed = subprocess.run(
        ["git", "ls-files", *PRODUCT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    yield from (ROOT / name for name in listed.stdout.splitlines() if name.endswith(suffixes))


def lines_per_package() -> dict[str, int]:
    """Lines of Python and C, by package."""
    found: Counter[str] = Counter()
    for path in sources(".py", ".c", ".h"):
        parts = path.relative_to(ROOT).parts
        found["/".join(parts[:2]) if parts[0] == "rayagi" and len(parts) > 2 else parts[0]] += len(
            path.read_text().splitlines()
        )
    return dict(sorted(found.items()))


def lines_by_kind() -> dict[str, int]:
    """Lines of Python and C that are code, imports, documentation (docstrings and comments of their own line), or blank."""
    found: Counter[str] = Counter()
    for path in sources(".py", ".c", ".h"):
        text = path.read_text()
        documented = docstring_lines(ast.parse(text)) if path.suffix == ".py" else set()
        mark = re.compile(r"\s*#" if path.suffix == ".py" else r"\s*(//|/?\*)")
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                found["blank"] += 1
            elif number in documented or mark.match(line):
                found["documentation"] += 1
            elif path.suffix == ".py" and re.match(r"\s*(from|import)\s", line):
                found["imports"] += 1
            else:
                found["code"] += 1
    return dict(found.most_common())


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines of strings that stand alone: of modules, classes and functions, and below fields."""
    return {
        number
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def classes_of_several_meanings() -> list[str]:
    """Public class names that are defined in more than one module."""
    where: dict[str, set[str]] = defaultdict(set)
    for path in sources(".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].add(str(path))
    return sorted(name for name, files in where.items() if len(files) > 1)


def commented_share() -> float:
    """Lines with a comment, over lines that are not blank."""
    comment = {".py": re.compile(r"(^|\s)# (?!type:|noqa|fmt:)"), ".c": re.compile(r"//|/\*|^\s*\*")}
    comment[".h"] = comment[".c"]
    commented = total = 0
    for path in sources(*comment):
        filled = [line for line in path.read_text().splitlines() if line.strip()]
        total += len(filled)
        commented += sum(bool(comment[path.suffix].search(line)) for line in filled)
    return commented / total


def private_words() -> dict[str, int]:
    """Lines that use a private word (docs/reference/glossary.md has the field's), by word."""
    words = re.compile(rf"(?<![A-Za-z])({'|'.join(PRIVATE_WORDS)})(?![a-z])", re.IGNORECASE)
    found: Counter[str] = Counter()
    for path in sources(".py", ".c", ".h"):
        for line in path.read_text().splitlines():
            found.update({match.lower() for match in words.findall(line)})
    return dict(found.most_common())


class IterationTrace:
    """What one call passes: files, functions, calls from one file into another, and the deepest nesting."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[tuple[str, str]] = set()
        self.crossings: set[tuple[str, str, str]] = set()
        self.depth = 0
        self._stack: list[str] = []

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """``sys.setprofile``'s hook."""
        code = frame.f_code
        if (
            not code.co_filename.startswith(str(ROOT))
            or "/experiments/" in code.co_filename
            or "/.venv/" in code.co_filename
        ):
            return
        if event == "call":
            name = str(Path(code.co_filename).relative_to(ROOT))
            self.files.add(name)
            self.functions.add((name, code.co_qualname))
            if self._stack and self._stack[-1] != name:
                self.crossings.add((self._stack[-1], name, code.co_qualname))
            self._stack.append(name)
            self.depth = max(self.depth, len(self._stack))
        elif event == "return" and self._stack:
            self._stack.pop()


def path_of_an_iteration(task: str) -> IterationTrace:
    """One iteration of one GMI with the defaults, after two to warm up."""
    from actors.gmi import GmiContext
    from rayagi.algorithms.factory import training_factory
    from rayagi.config.spec import EnvSpec, RunSpec

    program = training_factory(RunSpec(env=EnvSpec(id=task)))(GmiContext.local(task))
    for _ in range(2):
        program.iterate()
    path = IterationTrace()
    sys.setprofile(path)
    program.iterate()
    sys.setprofile(None)
    program.close()
    return path


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--task", default="HalfCheetah-v5", help="task of the iteration (%(default)s)")
    arguments = parser.parse_args()
    path, lines, words = path_of_an_iteration(arguments.task), lines_per_package(), private_words()
    found = {
        "iteration": {
            "files": len(path.files),
            "functions": len(path.functions),
            "crossings": len(path.crossings),
            "depth": path.depth,
        },
        "lines": {**lines, "all": sum(lines.values())},
        "lines_by_kind": lines_by_kind(),
        "classes_of_several_meanings": classes_of_several_meanings(),
        "commented_share": round(commented_share(), 4),
        "private_words": {**words, "all": sum(words.values())},
        "files": sorted(path.files),
    }
    print(json.dumps(found, indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()
