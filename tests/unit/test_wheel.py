"""What a wheel has: users who do not work in a checkout install one."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.documents import ROOT

PACKAGES = ("rayagi", "actors", "placement", "collectives")


@pytest.mark.slow
def test_a_wheel_has_every_file_of_the_packages(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    source = tmp_path / "source"  # a build leaves files beside its sources
    for name in (*listed, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        str(source),
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
    ]
    subprocess.run([*command, "--no-index", "--wheel-dir", str(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert len(listed) > 500
    assert set(listed) <= set(zipfile.ZipFile(wheel).namelist())
