"""Code that a run folder or another settings file names: used only where it cannot have come with it, or if it is trusted.

- A run folder may name code of the working project: the current folder, without run folders (of a ``run.json``), the
  subfolder that the run is in, and installed packages.
- A settings file outside of the current folder may name all code but what lies beside it, in its folder or below. Packages
  installed for this Python are no such code.
- A settings file in the current folder is the working project's own, and may name anything.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from rayagi.config.errors import ConfigError
from rayagi.config.spec import RunSpec

_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of folders of installed packages."""


def refuse_untrusted_modules(spec: RunSpec, file: Path) -> None:
    """Check what ``spec``, read from ``file`` of a run folder, would import or start. Imports nothing.

    Raises:
        ConfigError: the task's module, the network's module, or an interpreter is not the working project's.
    """
    for setting, value, what, files in _named_code(spec):
        _check(setting, value, what, None if what == "program" else files, file)


def refuse_modules_beside(spec: RunSpec, file: Path) -> None:
    """Check what ``spec``, read from a settings file of no run folder, would import or start. Imports nothing.

    Raises:
        ConfigError: the file is not in the current folder, and what it names lies beside it.
    """
    project = Path.cwd().resolve()
    # Where the file lies, and where it leads to, if it is a link.
    folders = {file.absolute().parent.resolve(), file.resolve().parent}
    foreign = {folder for folder in folders if not folder.is_relative_to(project)}
    if not foreign:
        return
    for setting, value, _, files in _named_code(spec):
        for code in files or ():
            if any(_lies_in(code, folder) for folder in foreign) and not (
                code.resolve().is_relative_to(project) or _is_importable_package(code)
            ):
                raise ConfigError(
                    setting,
                    value,
                    f"names {code}, which lies beside this file outside of the working project, {project}, and would run "
                    "its code",
                    "run this in the folder of your project that has both, or, if you trust that code, with "
                    "--trust-modules",
                )


def _named_code(spec: RunSpec) -> Iterator[tuple[str, object, str, list[Path] | None]]:
    """(setting, its value, what it names, files that it would import or start) of each setting that names code.

    None: there are no such files.
    """
    module, python = spec.env.id.rpartition(":")[0], spec.env.kwargs.get("python")
    if module:
        yield "env.id", spec.env.id, f"module {module!r}", module_files(module)
    if spec.network.module is not None:
        place = spec.network.module.rpartition(":")[0]
        found = network_file(place) if place.endswith(".py") else None
        files = [found] if found else module_files(place)
        yield "network.module", spec.network.module, f"module {place!r}", files
    if python is not None:
        yield "env.kwargs.python", python, "program", [Path(str(python)).absolute()]


def _lies_in(code: Path, folder: Path) -> bool:
    """Whether a file is in a folder or below it; a link is where it lies and where it leads to."""
    return any(place.is_relative_to(folder) for place in (code.parent.resolve(), code.resolve()))


def _is_installed(code: Path) -> bool:
    code = code.resolve()
    return bool(_INSTALLED & set(code.parts)) or code.is_relative_to(_standard_library())


def _is_importable_package(code: Path) -> bool:
    """Whether a file is of a package installed for this Python: a folder of that name that came with settings is not."""
    installed = (Path(entry).resolve() for entry in sys.path if Path(entry).name in _INSTALLED)
    code = code.resolve()
    return code.is_relative_to(_standard_library()) or any(
        code.is_relative_to(folder) for folder in installed
    )


def _check(setting: str, value: object, what: str, files: list[Path] | None, config: Path) -> None:
    foreign = None if files is None else next((each for each in files if not _in_project(each, config)), None)
    if files is None or foreign is not None:
        where = f" ({foreign})" if foreign is not None else ""
        raise ConfigError(
            setting,
            value,
            f"names the {what}{where}, which is not in the working project, {Path.cwd()}, and would run its code",
            "run this in the folder of your project that has it, or, if you trust that code, with --trust-modules",
        )


def _in_project(code: Path, config: Path) -> bool:
    # Not where config.yaml leads to, if it is a link.
    project, code, run = Path.cwd().resolve(), code.resolve(), config.parent.resolve()
    if not code.is_relative_to(project) or in_run_folder(code) or code.is_relative_to(run):
        return False
    if _is_installed(code):
        return False
    # What is in one subfolder with the run may have come with it.
    together = project.joinpath(*run.relative_to(project).parts[:1]) if run.is_relative_to(project) else None
    return together is None or not code.is_relative_to(together)


def _standard_library() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()


def in_run_folder(path: Path) -> bool:
    """Whether a path is a run folder, or in one; a link is where it lies and where it leads to."""
    places = path.resolve(), path.parent.resolve()
    return any((folder / "run.json").exists() for place in places for folder in (place, *place.parents))


def module_files(name: str) -> list[Path] | None:
    """Files that importing a module would run, of its packages and its own. None: there is no such file."""
    path: list[str] | None = None  # sys.path
    files = []
    for part in name.split("."):
        found = PathFinder.find_spec(part, path) if part.isidentifier() else None
        if found is None:
            return None
        if found.origin is not None:  # else a package without __init__.py
            files.append(Path(found.origin))
        path = list(found.submodule_search_locations or ())
    return files


def network_file(place: str) -> Path | None:
    """The file that ``file.py`` names: in the working folder, then in the folders of Python's path."""
    files = (Path(folder, place).resolve() for folder in ("", *sys.path))
    return next((file for file in files if file.is_file()), None)
