"""What the experiments' scripts share."""

from __future__ import annotations

import subprocess
import sys

import pytest

from experiments.scripts import run_program


def test_a_program_gives_what_it_wrote() -> None:
    ran = run_program([sys.executable, "-c", "print(6 * 7)"], stdout=subprocess.PIPE)
    assert ran.stdout == "42\n"


def test_a_program_that_fails_ends_the_script_with_its_status_and_command() -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(SystemExit, match=r"^status 3, of this command: .* -c 'raise SystemExit\(3\)'$"):
        run_program(command)
