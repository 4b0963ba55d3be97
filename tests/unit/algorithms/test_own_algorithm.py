"""The tutorial's algorithm, as a reader copies it, fits every network and space that rayagi's own ones fit."""

import os
import subprocess
import sys

from tests.documents import ROOT, write_files


def test_the_tutorials_algorithm_fits_every_network_and_space(tmp_path):
    write_files(ROOT / "docs/tutorials/own-algorithm.md", tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.algorithms.own_algorithm"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
