"""Versions of packages, machine and commit of a run."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import rayagi
from placement.inventory.limits import allowed_cores
from rayagi.profiler.machine import cpu_model

PACKAGES = ("torch", "ray", "mujoco", "gymnasium", "numpy")


def package_version(name: str) -> str:
    """Installed version of a package, or ``not installed``."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def rayagi_version() -> str:
    """Version of rayagi; read from pyproject.toml if it is not installed."""
    installed = package_version("rayagi")
    if installed != "not installed":
        return installed
    project = Path(rayagi.__file__).parents[1] / "pyproject.toml"
    for line in project.read_text().splitlines() if project.exists() else ():
        if line.startswith("version"):
            return line.split('"')[1]
    return "unknown"


def git_commit() -> str | None:
    """Git commit of rayagi, with ``+changes`` if files differ from it; None outside a checkout."""
    root = Path(rayagi.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    described = ["git", "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+changes"]
    try:
        done = subprocess.run(described, cwd=root, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def usable_cores() -> int:
    """Cores that this process may use, by affinity and quota."""
    cores, _ = allowed_cores()
    return len(cores)


def collect_versions() -> dict[str, str | int | None]:
    """Content of versions.json."""
    return {
        "rayagi": rayagi_version(),
        "git_commit": git_commit(),
        "python": platform.python_version(),
        **{name: package_version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu_model": cpu_model(),
        "cores": usable_cores(),
    }
