"""`rayagi serve` on a Ray of this machine: every template, a full disk, a killed GMI; and RLlib reads what it wrote."""

import json
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pytest

from rayagi.cli import main
from rayagi.serving.dataset import open_dataset
from rayagi.serving.rllib import offline_settings, spaces

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "serving"))
from saved_runs import saved_run

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_of_this_machine")]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return saved_run(Path("runs"), iterations=(6,))


def serve(run, *options):
    return main(["serve", str(run), "--out", "d", "--backend", "cpu", *options])


def test_two_gmis_serve_and_rllib_reads_it(run, capsys):
    assert serve(run, "--gmis", "2", "--num-envs", "3", "--steps", "1200") == 0, capsys.readouterr().err
    table = pyarrow.dataset.dataset("d/data").to_table()
    assert table.num_rows == 1200
    assert set(table["gmi"].to_pylist()) == {0, 1}
    assert set(table["env"].to_pylist()) == set(range(6))
    (session,) = json.loads(Path("d/provenance.json").read_text())["sessions"]
    assert (session["num_gmis"], session["envs"], session["status"]) == (2, [3, 3], "finished")
    episodes = list(open_dataset("d").episodes(whole_only=True))
    assert len(episodes) == json.loads(Path("d/statistics.json").read_text())["episodes"] > 0

    from ray.rllib.algorithms.bc import BCConfig
    from ray.rllib.core import DEFAULT_MODULE_ID
    from ray.rllib.offline.offline_data import OfflineData
    from ray.rllib.offline.offline_prelearner import OfflinePreLearner

    config = (
        BCConfig()
        .environment(**spaces("d"))
        .offline_data(**offline_settings("d"))
        .training(train_batch_size_per_learner=256)
    )
    batch = OfflineData(config).data.take_batch(256)
    own = tuple(spaces("d").values())
    # As RLlib's own OfflineData makes it.
    module_spec = config.get_multi_rl_module_spec(spaces={DEFAULT_MODULE_ID: own})
    learner = OfflinePreLearner(config=config, spaces=own, module_spec=module_spec)
    (first, *others) = learner._map_to_episodes(batch)["episodes"]
    assert len(others) == 255
    # Which of the files Ray reads first is Ray's business.
    same = [row for row in table.to_pylist() if str(row["episode"]) == first.id_]
    step = [np.asarray(values).tolist() for values in (first.get_observations(0), first.get_actions(0))]
    assert step in [[row["obs"], row["action"]] for row in same]
    ready = learner(batch)
    assert ready["default_policy/obs"].shape == (256, 4)
    assert ready["default_policy/actions"].shape == (256, 1)


@pytest.mark.slow
def test_simulators_with_an_agent_apart_write_the_same_rows_as_dp_only(run, capsys):
    for template, gmis, out in (("dp_only", "1", "one"), ("mp_dp", "3", "three")):
        envs = "4" if template == "dp_only" else "2"
        options = ["--template", template, "--gmis", gmis, "--num-envs", envs, "--steps", "400", "--explore"]
        assert main(["serve", str(run), "--out", out, "--backend", "cpu", *options]) == 0, (
            capsys.readouterr().err
        )
    tables = [pyarrow.dataset.dataset(f"{out}/data").to_table().to_pylist() for out in ("one", "three")]
    for rows in tables:
        rows.sort(key=lambda row: (row["episode"], row["step"]))
        for row in rows:
            del row["gmi"]
    assert len(tables[0]) == 400
    assert [(row["episode"], row["step"]) for row in tables[0]] == [
        (row["episode"], row["step"]) for row in tables[1]
    ]
    for name in ("obs", "action", "log_prob", "reward"):
        assert np.array([row[name] for row in tables[0]]) == pytest.approx(
            np.array([row[name] for row in tables[1]]), abs=1e-4
        )


@pytest.mark.slow
def test_a_full_disk_ends_it_with_one_message_and_complete_files(run, capsys):
    with when_written("d", lambda pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, (3000, 3000))):
        code = serve(run, "--gmis", "2", "--num-envs", "2", "--time", "10m", "--rows-per-file", "256")
    error = capsys.readouterr().err
    assert code == 1, error
    assert "File too large; free space there, or serve to another folder with --out" in error
    assert "Traceback" not in error
    assert "Complete and readable in" in error
    dataset = open_dataset("d")
    assert dataset.files
    assert sorted(path.name for path in Path("d/data").iterdir()) == [
        file.path.name for file in dataset.files
    ]
    assert dataset.arrow().count_rows() == dataset.statistics.rows > 0
    assert json.loads(Path("d/provenance.json").read_text())["sessions"][0]["status"] == "failed"


@pytest.mark.slow
def test_a_killed_gmi_is_named_and_what_it_posted_is_there(run, capsys):
    def kill_the_gmi(writer):
        os.kill(gmi_of(writer), signal.SIGKILL)

    with when_written("d", kill_the_gmi):
        code = serve(run, "--gmis", "2", "--num-envs", "2", "--time", "10m", "--rows-per-file", "256")
    error = capsys.readouterr().err
    assert code == 1, error
    assert "was lost during" in error
    dataset = open_dataset("d")
    assert sorted(path.name for path in Path("d/data").iterdir()) == [
        file.path.name for file in dataset.files
    ]
    # Of both GMIs, the last file too, which was not full: nothing is left unfinished.
    assert {file.gmi for file in dataset.files} == {0, 1}
    assert dataset.arrow().count_rows() == dataset.statistics.rows


class when_written:
    """Does something to one writer of a dataset once two files are complete, while the block runs."""

    def __init__(self, folder, act):
        self._folder, self._act = Path(folder).absolute(), act
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self):
        while not self._over.wait(0.05):
            pids = holders(self._folder / ".writers")
            with suppress(FileNotFoundError):
                if pids and len(list((self._folder / "data").glob("s*"))) >= 2:
                    self._act(pids[0])
                    return

    def __enter__(self):
        self._thread.start()

    def __exit__(self, *error):
        self._over.set()
        self._thread.join()


def holders(path):
    """Processes that have a file open."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if entry.readlink() == path:
                found.append(int(entry.parts[2]))
    return found


def gmi_of(writer):
    """The process whose outbox a writer has mapped."""
    for line in Path(f"/proc/{writer}/maps").read_text().splitlines():
        if "rayagi-channel:" in line:
            inode = line.split()[4]
            for entry in Path("/proc").glob("[0-9]*/fd/*"):
                with suppress(OSError):
                    owner = int(entry.parts[2])
                    if owner != writer and str(entry.stat().st_ino) == inode:
                        return owner
    raise AssertionError("no GMI found")
