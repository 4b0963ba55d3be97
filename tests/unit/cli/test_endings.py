import shlex
from dataclasses import replace

import pytest

from placement.errors import PlanError
from rayagi.cli.endings import Resumed, after_failure, conclude, record_outcome
from rayagi.config.presets import preset
from rayagi.envs import EnvironmentFailedError, SimulationError
from rayagi.run.errors import DiskError, NonFiniteResultError, RunVersionError, UnstableSimulationsError
from rayagi.run.folder import create_run, open_run
from rayagi.run.limits import Position, Stop
from rayagi.run.training_loop import TrainingOutcome


def ended_by(error, out):
    """A run of HalfCheetah-v5 that ends with ``error``; returns its folder and the notes added to the error."""
    folder = create_run(out, "HalfCheetah-v5", seed=0, rayagi_version="0")
    folder.progress_csv.write_text("iteration\n1\n")
    spec = preset("HalfCheetah-v5")
    spec = replace(spec, learning=replace(spec.learning, learning_rate=4e-4))
    after_failure(folder, spec, error, before=None)
    return folder, "\n".join(error.__notes__)


def test_a_run_ended_by_a_full_disk_can_be_resumed(tmp_path):
    folder, message = ended_by(DiskError("x", "no room", "make some"), tmp_path)
    assert (
        message
        == f"No checkpoint had been saved yet. Start it again with:\n  rayagi train --resume {folder.path}"
    )
    assert open_run(folder.path).record.status == "failed"


def test_commands_that_continue_a_run_can_be_copied_though_its_path_has_spaces(tmp_path):
    folder, message = ended_by(DiskError("x", "no room", "make some"), tmp_path / "my runs")
    *_, resume, path = shlex.split(message)
    assert (resume, path) == ("--resume", str(folder.path))
    text = str(RunVersionError("my runs/a", 9, 1, "9.0"))
    assert "--config 'my runs/a'/config.yaml" in text


def test_a_full_disk_after_the_end_of_a_run_loses_its_report_only(tmp_path):
    folder = create_run(tmp_path, "HalfCheetah-v5", seed=0, rayagi_version="0")
    folder.progress_csv.write_text("iteration,env_steps_total,train_s\n7,700,1\n")
    (folder.path / "learning_curve.png").mkdir()  # it cannot be written, as on a full disk
    position = Position(
        iteration=7,
        env_steps=700,
        train_s=1.0,
        evaluation_return=None,
        training_return=None,
        training_episodes=0,
    )
    outcome = TrainingOutcome(
        stop=Stop(limit="iterations", reason="7 iterations done"),
        position=position,
        checkpoint="iteration_000007",
        best_return=None,
    )
    record_outcome(folder, outcome, "")
    with pytest.raises(DiskError) as failed:
        conclude(folder, preset("HalfCheetah-v5"), outcome)
    saved = f"The run is saved (iteration_000007). Write its report with:\n  rayagi report {folder.path}"
    assert failed.value.__notes__ == [saved]
    assert open_run(folder.path).record.status == "finished"


def test_the_traceback_of_an_environments_exception_is_in_a_file(tmp_path):
    error = EnvironmentFailedError("a", "reset", "no goal")
    error.__cause__ = KeyError("goal")
    folder, message = ended_by(error, tmp_path)
    assert f"The traceback is in {folder.path}/error.log." in message
    assert "KeyError: 'goal'" in (folder.path / "error.log").read_text()


@pytest.mark.parametrize(
    "error", [NonFiniteResultError("loss", float("nan"), 3, 300), SimulationError(0, 5, "qvel")]
)
def test_a_diverged_run_restarts_with_half_the_learning_rate(tmp_path, error):
    folder, message = ended_by(error, tmp_path)
    assert (
        f"rayagi train HalfCheetah-v5 --config {folder.path}/config.yaml --set ppo.learning_rate=0.0002"
        in message
    )
    assert "--resume" not in message


@pytest.mark.parametrize(("unstable", "allowed"), [(300, "0.06"), (9_000, "1")])
def test_a_run_of_unstable_simulations_restarts_with_twice_the_allowed_share(tmp_path, unstable, allowed):
    # A resumed run keeps the limit that it just exceeded, so --resume would fail again.
    folder, message = ended_by(UnstableSimulationsError(unstable, 10_000, 0.01), tmp_path)
    wanted = f"rayagi train HalfCheetah-v5 --config {folder.path}/config.yaml --set env.max_unstable_share={allowed}"
    assert message.endswith(wanted)
    assert "--resume" not in message


@pytest.mark.parametrize("saved", [False, True])
def test_a_resumed_run_keeps_its_record_only_if_it_did_not_go_on(tmp_path, saved):
    folder = create_run(tmp_path, "HalfCheetah-v5", seed=0, rayagi_version="0")
    folder.checkpoints.save({"shared": {}, "local": [], "num_gmis": 1}, {"iteration": 1, "env_steps": 10})
    folder.update(status="finished", reason="10 min of training done")
    before = Resumed(folder.record, folder.checkpoints.names())
    folder.update(status="running", reason="")
    if saved:
        folder.checkpoints.save({"shared": {}, "local": [], "num_gmis": 1}, {"iteration": 2, "env_steps": 20})
    error = PlanError("num_gmis=4", "a GPU share was lost", "Set num_gmis to 1")
    after_failure(folder, preset("HalfCheetah-v5"), error, before=before)
    found = open_run(folder.path).record
    assert (found.status, found.reason == before.record.reason) == (
        ("failed", False) if saved else ("finished", True)
    )
    assert ("--resume" in error.__notes__[-1]) is saved
