"""`rayagi replay`: info, import, export, sample and bench, on a dataset of torch tensors."""

import errno
import json
import os
import signal
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from actors.replay import Column, ReplaySchema, ReplayStore
from actors.replay.checkpoint_files import SegmentWriter
from placement.inventory import limits
from rayagi.cli import main
from rayagi.replay import load
from rayagi.replay.saved import save


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """Three trajectories of 3, 2 and 4 steps; rewards 0 to 8."""
    monkeypatch.chdir(tmp_path)
    count = torch.arange(9.0)
    ends = torch.zeros(9, dtype=torch.bool)
    ends[[2, 8]] = True
    limits = torch.zeros(9, dtype=torch.bool)
    limits[4] = True
    flat = {"obs": count[:, None], "next_obs": count[:, None] + 1, "action": torch.stack([count, -count], 1)}
    torch.save(flat | {"reward": count, "terminated": ends, "truncated": limits, "goal": count}, "d.pt")
    return tmp_path


def test_info_of_a_dataset_and_of_a_saved_replay(dataset, capsys):
    assert main(["replay", "import", "d.pt", "saved", "--columns", "goal"]) == 0
    assert "3 rows of 9 steps" in capsys.readouterr().out
    for path, columns in (("d.pt", ["--columns", "goal"]), ("saved", [])):
        assert main(["replay", "info", path, "--json", *columns]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["trajectories"] == 3
        assert found["steps"] == 9
        assert found["lengths"] == {"min": 2, "mean": 3, "max": 4}
        # 0 + 1 + 2, 3 + 4, 5 + 6 + 7 + 8
        assert found["returns"] == {"min": 3, "mean": 12, "max": 26}
        assert found["ends"] == {"terminated": 2, "truncated": 1, "cut": 0}
        # Steps: obs 4, action 8, reward 4, two flags, goal 4; and three last observations.
        assert found["bytes"] == 9 * 22 + 3 * 4
        assert [column["name"] for column in found["columns"]][-1] == "goal"
    assert main(["replay", "info", "d.pt"]) == 0
    text = capsys.readouterr().out
    assert "2 terminated, 1 truncated" in text
    assert "not read: goal" in text


def test_a_replay_larger_than_its_memory_is_imported_in_pieces(dataset, capsys):
    flat = {name: values.repeat(500, *[1] * (values.ndim - 1)) for name, values in torch.load("d.pt").items()}
    torch.save(flat, "big.pt")
    assert main(["replay", "import", "big.pt", "saved", "--memory", "300kB", "--max-length", "2"]) == 0
    with load("saved") as store:
        assert len(store) == 500 * (2 + 1 + 2)
        assert int(store.status()["length"].sum()) == 4500


def test_export_to_another_format_and_back(dataset, capsys):
    assert main(["replay", "export", "d.pt", "--to", "lerobot", "out"]) == 0
    assert "3 trajectories of 9 steps as lerobot" in capsys.readouterr().out
    assert main(["replay", "export", "out", "--to", "torch", "again.pt"]) == 0
    first, again = torch.load("d.pt"), torch.load("again.pt")
    assert again.pop("trajectory_number").tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    for name, values in again.items():
        assert values.equal(first[name])


@pytest.mark.parametrize(
    "selector", ["uniform", "sequences", "prioritized", "fifo", "lifo", "top-k", "without-replacement"]
)
def test_a_sample_is_the_same_for_the_same_seed(dataset, capsys, selector):
    arguments = ["replay", "sample", "d.pt", "--select", selector, "--batch", "3", "--length", "2", "--json"]
    texts = []
    for seed in ("1", "1"):
        assert main([*arguments, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    for row in json.loads(texts[0])["rows"]:
        # Rewards count up over all steps: 3 rows begin at 0, 3 and 5.
        assert row["first"]["reward"] == (0, 3, 5)[row["row"]] + row["step"]
        assert row["of"] == (3, 2, 4)[row["row"]]


def test_a_sample_as_text(dataset, capsys):
    assert main(["replay", "sample", "d.pt", "--batch", "64", "--rows", "2"]) == 0
    text = capsys.readouterr().out
    assert "2 of 64 rows of the batch" in text
    assert "terminated" in text


def test_a_bench_compares_with_memcpy(dataset, capsys):
    assert main(["replay", "bench", "d.pt", "--batch", "4", "--time", "0.01s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples_per_s"] > 0
    # Of each step: two observations, action, reward, two flags.
    assert found["sample_bytes"] == 8 + 8 + 4 + 2
    assert found["bytes_per_s"] == pytest.approx(found["samples_per_s"] * found["sample_bytes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "nothing"], "nothing: does not exist"),
        (["info", "."], "is of no known format"),
        (["info", "d.pt", "--columns", "x"], "d.pt: has no column 'x': its columns are obs, action"),
        (["info", "bad.pt"], "bad.pt: cannot be read as torch"),
        (["import", "d.pt", "d.pt"], "d.pt: exists already"),
        (["import", "d.pt", "x", "--memory", "1kB"], "memory_bytes is 1,000 where this table needs"),
        (["export", "d.pt", "d.pt", "--to", "torch"], "d.pt: exists already"),
        (["sample", "d.pt", "--select", "fifo"], "there are 3"),
        (["sample", "d.pt", "--length", "9"], "--length 9: the longest trajectory has 4 steps"),
        (["bench", "d.pt", "--length", "9"], "--length 9: the longest trajectory has 4 steps"),
        (
            ["sample", "d.pt", "--batch", str(10**15)],
            f"--batch {10**15}: no memory for so many rows of --length 1",
        ),
        (
            ["bench", "d.pt", "--batch", str(10**15)],
            f"--batch {10**15}: no memory for so many rows of --length 1",
        ),
        (["export", "d.pt", "x", "--to", "torch"], "torch is read from files .pt or .pth: name it x.pt"),
        (
            ["export", "d.pt", "x", "--to", "rllib", "--columns", "goal"],
            "the columns goal, which rllib does not keep",
        ),
    ],
)
def test_bad_input_is_one_sentence(dataset, capsys, arguments, message):
    (dataset / "bad.pt").write_bytes((dataset / "d.pt").read_bytes()[:500])
    assert main(["replay", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["sample", "bench"])
def test_a_batch_larger_than_free_memory_is_refused_before_it_is_allocated(
    dataset, capsys, monkeypatch, command
):
    monkeypatch.setattr(limits, "available_bytes", lambda: 10 * 2**20)
    monkeypatch.setattr(f"rayagi.cli.replay_{command}.select", None)
    # A step: two observations, action, reward, two flags, and a mask of each.
    values = 2 * 5 + 9 + 5 + 2 * 2
    batch = 10 * 2**20 // (2048 + 2 * values if command == "sample" else 4 * values) + 1
    assert main(["replay", command, "d.pt", "--batch", str(batch)]) == 2
    assert "they need 10 MiB where 10 MiB are free" in capsys.readouterr().err


def test_a_full_disk_is_a_failure_and_leaves_nothing(dataset, capsys, monkeypatch):
    def finish(writer):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(SegmentWriter, "finish", finish)
    assert main(["replay", "import", "d.pt", "out"]) == 1
    message = (
        "rayagi: cannot write out: No space left on device; free space there, or choose another folder\n"
    )
    assert capsys.readouterr().err == message
    assert [path.name for path in dataset.iterdir()] == ["d.pt"]


@pytest.mark.parametrize(
    "command",
    [["import", "out"], ["export", "out", "--to", "lerobot"], ["export", "out.pt", "--to", "torch"]],
)
def test_a_link_to_nothing_is_no_free_place(dataset, capsys, command):
    (dataset / command[1]).symlink_to("nowhere")
    assert main(["replay", command[0], "d.pt", *command[1:]]) == 2
    assert f"{command[1]}: exists already; choose another" in capsys.readouterr().err
    assert sorted(path.name for path in dataset.iterdir()) == ["d.pt", command[1]]


def test_sigterm_leaves_nothing_of_an_import(dataset, capsys, monkeypatch):
    monkeypatch.setattr(SegmentWriter, "finish", lambda writer: signal.raise_signal(signal.SIGTERM))
    assert main(["replay", "import", "d.pt", "out"]) == 130
    assert [path.name for path in dataset.iterdir()] == ["d.pt"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigterm_leaves_nothing_of_an_export(dataset, capsys, monkeypatch):
    @contextmanager
    def shown_progress(text):
        yield lambda done, total: signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("rayagi.cli.replay_export.shown_progress", shown_progress)
    assert main(["replay", "export", "d.pt", "--to", "lerobot", "out"]) == 130
    assert [path.name for path in dataset.iterdir()] == ["d.pt"]


def test_an_import_below_a_file(dataset, capsys):
    assert main(["replay", "import", "d.pt", "d.pt/x"]) == 1
    assert "cannot write d.pt: File exists" in capsys.readouterr().err


def test_a_sample_of_a_store_without_actions(dataset, capsys):
    store = ReplayStore.create(ReplaySchema((Column(name="x", dtype="float32"),), 2), 1)
    store.insert({"x": np.array([[7, 8]], np.float32)})
    save(store, dataset / "own")
    assert main(["replay", "sample", "own"]) == 0
    assert "x " in capsys.readouterr().out
    assert main(["replay", "info", "own"]) == 0
    assert "1 trajectory, 2 steps; 1 cut" in capsys.readouterr().out


@pytest.mark.parametrize(
    "rules", [{"shard": 1, "num_shards": 2}, {"removal": lambda status: [0]}], ids=["shard", "removal"]
)
def test_a_saved_shard_or_store_with_a_removal_function(dataset, capsys, rules):
    columns = (Column(name="obs", dtype="float32", extra=1), Column(name="action", dtype="float32"))
    store = ReplayStore.create(ReplaySchema(columns, 2), 2, **rules)
    keys = store.insert(
        {"obs": np.array([[1, 2, 3], [4, 5, 6]], np.float32), "action": np.ones((2, 2), np.float32)}
    )
    store.update_priorities(keys, np.array([3.0, 4.0]))
    save(store, dataset / "own")
    for command in (
        ["info"],
        ["sample"],
        ["bench", "--time", "0.01s"],
        ["export", "out.pt", "--to", "torch"],
    ):
        assert main(["replay", command[0], "own", *command[1:]]) == 0
        assert capsys.readouterr().err == ""
    assert torch.load("out.pt")["obs"].tolist() == [1, 2, 4, 5]
    with load("own") as again:
        assert (again.base, again.num_shards) == (0, 1)
        assert again.status()["priority"].tolist() == [3, 4]
        again.insert({"obs": np.array([[7, 8, 9]], np.float32), "action": np.ones((1, 2), np.float32)})
        assert len(again) == 2


def test_a_damaged_saved_replay(dataset, capsys):
    assert main(["replay", "import", "d.pt", "saved"]) == 0
    file = next(path for path in (dataset / "saved").iterdir() if path.name.startswith("status"))
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    assert main(["replay", "info", "saved"]) == 2
    assert "damaged" in capsys.readouterr().err
