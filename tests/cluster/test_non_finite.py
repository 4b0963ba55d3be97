"""A real run whose loss becomes NaN, from the command to the checkpoint that stands."""

import json
import re
from pathlib import Path

import pytest
import yaml

from rayagi.cli import main
from rayagi.config.yaml_text import parse_yaml
from rayagi.coordinator.cluster import connected
from rayagi.run.checkpoints import CheckpointStore
from rayagi.run.measures import first_non_finite

pytestmark = pytest.mark.cluster
SMALL = ["--gmis", "1", "--num-envs", "8", "--set", "ppo.rollout_length=16", "--set", "ppo.num_minibatches=2"]


@pytest.mark.slow
def test_nan_in_the_loss_stops_the_run_and_the_last_good_checkpoint_stands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with connected():
        assert main(["train", "InvertedPendulum-v5", *SMALL, "--iterations", "5", "--name", "nan"]) == 0
        config = Path("runs/nan/config.yaml")
        settings = parse_yaml(config.read_text())
        settings["ppo"] |= {"value_coef": 3e38, "max_grad_norm": 0.0}  # gradients beyond float32
        config.write_text(yaml.safe_dump(settings))
        resume = ["train", "--resume", "runs/nan", "--iterations", "50", "--checkpoint-every", "1"]
        assert main(resume) == 1
        error = capsys.readouterr().err
    assert re.search(r"became (NaN or infinite in|nan at|inf at) iteration \d+", error), error
    assert "The last good checkpoint is iteration_000005" in error
    assert "Traceback" not in error
    assert json.loads(Path("runs/nan/run.json").read_text())["status"] == "failed"
    last = CheckpointStore(Path("runs/nan/checkpoints")).load()
    assert last.name == "iteration_000005"
    assert first_non_finite(last.state) is None
    assert main(["evaluate", "runs/nan", "--episodes", "2"]) == 0
