"""The recorded runs of the asynchronous presets: with three seeds each, and stable."""

import json
from pathlib import Path

import pytest
import yaml

from rayagi.config.convert import run_spec_to_dict
from rayagi.config.presets import preset

RESULTS = Path(__file__).parents[3] / "experiments/learning/results"
STANDING = 1000.0
"""About the return of Ant-v5 for standing still."""


@pytest.mark.parametrize(
    ("algorithm", "name"), [("a3c", "Ant-v5_a3c_3e-4"), ("impala", "Ant-v5_impala_5e-4")]
)
def test_the_preset_is_what_was_recorded_and_every_seed_ends_walking(algorithm, name):
    recorded = json.loads((RESULTS / f"{name}.json").read_text())
    settings = yaml.safe_load(recorded["config"])[algorithm]
    assert settings == run_spec_to_dict(preset("Ant-v5", algorithm))[algorithm]
    assert [row["seed"] for row in recorded["seeds"]] == [0, 1, 2]
    for row in recorded["seeds"]:
        assert row["last"] > 1.4 * STANDING
        assert row["last"] > 0.75 * row["best"]
