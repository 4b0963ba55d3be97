"""The table of the profiler's validation, and that its commands are of this version."""

from pathlib import Path

from experiments.profiler.validation import RAYAGI, programs, row
from rayagi.cli.parser import build_parser


def test_a_row_has_errors_before_and_after():
    found = {
        "calibration": "annotation 410 ns, call 61 ns, measured on 2026-11-26 by 3 rounds",
        "validation": {
            "plain": [9e9, 11e9],
            "instrumented": [12e9, 13e9],
            "corrected": [10e9, 10.2e9],
            "plain_wall": [5e9, 5e9],
            "instrumented_wall": [6e9, 6e9],
            "corrected_wall": [4.9e9, 5e9],
        },
    }
    assert row("SB3 PPO", found) == (
        "| SB3 PPO | 10.0 +- 14.1% | +25.0 % | +1.0 % | -1.0 % | annotation 410 ns, call 61 ns |"
    )


def test_commands_of_rayagi_are_understood():
    own = [
        command[len(RAYAGI) :] for command in programs(Path()).values() if command[: len(RAYAGI)] == RAYAGI
    ]
    assert len(own) == 3
    for command in own:
        assert build_parser().parse_args(command).command == "train"
