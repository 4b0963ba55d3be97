"""Trajectories are read, stored and written many at a time, whatever their lengths, and stay what they are."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from trajectories_by_hand import assert_equal, content, trajectories

from actors.replay import ReplayStore
from rayagi.cli import main
from rayagi.replay import export, flat, load, open_source, saved
from rayagi.replay.saved import store_source
from rayagi.replay.summary import summarize
from rayagi.serving.dataset import open_dataset


def of_many_lengths(count=300):
    """Trajectories of 1 to 8 steps, a third of which terminate, are truncated, or are cut."""
    rng = np.random.default_rng(1)
    return trajectories(lengths=rng.integers(1, 9, count).tolist(), ends=rng.choice([*"tuc"], count).tolist())


def write(path, wanted, *, with_next):
    """A file of tensors with a row per step."""
    flat_columns = {
        name: np.concatenate([each[name] for each in wanted]) for name in wanted[0] if name != "obs"
    }
    flat_columns["obs"] = np.concatenate([each["obs"][:-1] for each in wanted])
    if with_next:
        flat_columns["next_obs"] = np.concatenate([each["obs"][1:] for each in wanted])
    lengths = [len(each["reward"]) for each in wanted]
    flat_columns["trajectory_number"] = np.repeat(np.arange(len(wanted)), lengths)
    torch.save({name: torch.from_numpy(values) for name, values in flat_columns.items()}, path)
    return path


def without_next(each):
    """What is left of a trajectory if nobody knows the observation after its last action; None: nothing."""
    known = each["obs"][:-1]
    if each["terminated"][-1]:
        return {**each, "obs": np.concatenate([known, known[-1:]])}
    shorter = {name: values[:-1].copy() for name, values in each.items()}
    if len(known) > 1:
        shorter["truncated"][-1] = each["truncated"][-1]
        return shorter
    return None


def pieces(each, size):
    """A trajectory in pieces of ``size`` steps, and the rest."""
    for begin in range(0, len(each["reward"]), size):
        yield {name: values[begin : begin + size + (name == "obs")] for name, values in each.items()}


@pytest.mark.parametrize("batch_bytes", [1, 300, 2**20])
@pytest.mark.parametrize("with_next", [True, False])
def test_trajectories_of_many_lengths(tmp_path, monkeypatch, with_next, batch_bytes):
    monkeypatch.setattr(flat, "BATCH_BYTES", batch_bytes)
    written = of_many_lengths()
    path = write(tmp_path / "a.pt", written, with_next=with_next)
    wanted = written if with_next else [each for each in map(without_next, written) if each is not None]
    source = open_source(path)
    assert source.lengths.tolist() == [len(each["reward"]) for each in wanted]
    assert_equal(list(source.read()), wanted)
    with load(path) as store:
        assert_equal(content(store), wanted)
    with load(path, max_length=3) as store:
        assert_equal(content(store), [piece for each in wanted for piece in pieces(each, 3)])


def test_trajectories_of_one_step_go_into_the_store_many_at_a_time(tmp_path, monkeypatch):
    count, calls, insert = 20_000, [], ReplayStore.insert

    def counted(store, rows, *args, **options):
        calls.append(len(rows["action"]))
        return insert(store, rows, *args, **options)

    steps = torch.arange(float(count))[:, None]
    # No observation is the one after the step before: shuffled transitions.
    columns = {"obs": steps, "next_obs": steps + 0.5, "action": -steps, "terminated": torch.zeros(count) > 0}
    torch.save({**columns, "reward": steps[:, 0]}, tmp_path / "a.pt")
    monkeypatch.setattr(ReplayStore, "insert", counted)
    with load(tmp_path / "a.pt") as store:
        assert sum(calls) == len(store) == count
        assert len(calls) < count / 1000
        assert store.status()["timestamp"].tolist() == [*range(count)]
        obs = np.concatenate([batch.columns["obs"] for batch in store_source(store, tmp_path).batches()])
        np.testing.assert_array_equal(obs.reshape(count, 2)[:, 1], steps[:, 0] + 0.5)
        ends = summarize(store_source(store, tmp_path))["ends"]
        assert ends == {"terminated": 0, "truncated": count - 1, "cut": 1}


def test_pieces_of_a_long_trajectory_that_do_not_fit_into_memory_together(tmp_path):
    """An insertion needs space in memory for all of its rows."""
    (each,) = trajectories(lengths=(4000,), ends="t")
    path = write(tmp_path / "a.pt", [each], with_next=True)
    with load(path, max_length=1, memory_bytes=450_000, folder=tmp_path) as store:
        assert store.counters()["spilled"] > 100
        assert_equal(content(store), list(pieces(each, 1)))


@pytest.mark.parametrize(
    ("kind", "suffix"), [("rayagi", ""), ("lerobot", ""), ("d4rl", ".hdf5"), ("torch", ".pt")]
)
def test_an_export_in_several_batches(tmp_path, monkeypatch, kind, suffix):
    if kind == "d4rl":
        pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    wanted = of_many_lengths(40)
    path = write(tmp_path / "a.pt", wanted, with_next=True)
    with load(path) as store:
        monkeypatch.setattr(saved, "_BLOCK_BYTES", 3 * store.schema.row_bytes)
        assert len(list(store_source(store, tmp_path).batches())) == 14  # of three trajectories, and one
        out = tmp_path / f"out{suffix}"
        assert export(store_source(store, tmp_path), out, kind) == 40
    with load(out) as store:
        assert_equal([{name: each[name] for name in wanted[0]} for each in content(store)], wanted)
    lengths = np.array([len(each["reward"]) for each in wanted])
    if kind == "lerobot":
        table = pq.read_table(out / "meta" / "episodes").to_pydict()
        assert table["dataset_from_index"] == (np.cumsum(lengths) - lengths).tolist()
        assert table["dataset_to_index"] == np.cumsum(lengths).tolist()
        frames = pq.read_table(out / "data").to_pydict()
        assert frames["index"] == [*range(lengths.sum())]
        assert frames["frame_index"] == [step for length in lengths for step in range(length)]
    if kind == "rayagi":
        whole = [each for each in wanted if each["terminated"][-1] or each["truncated"][-1]]
        statistics = open_dataset(out).statistics
        assert statistics.episodes == len(whole)
        assert statistics.length_sum == sum(len(each["reward"]) for each in whole)
        assert statistics.return_sum == pytest.approx(
            sum(each["reward"].sum(dtype=np.float64) for each in whole)
        )


def test_the_information_about_many_trajectories(tmp_path, capsys):
    wanted = of_many_lengths()
    wanted[7]["obs"][0] = np.nan
    path = write(tmp_path / "a.pt", wanted, with_next=True)
    assert main(["replay", "info", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    returns = [each["reward"].sum(dtype=np.float64) for each in wanted]
    assert found["returns"] == pytest.approx(
        {"min": min(returns), "mean": np.mean(returns), "max": max(returns)}
    )
    ended = {name: sum(bool(each[name][-1]) for each in wanted) for name in ("terminated", "truncated")}
    assert found["ends"] == {**ended, "cut": 300 - sum(ended.values())}
    assert {column["name"]: column["not_finite"] for column in found["columns"]}["obs"] == 2
    assert found["trajectories"] == 300
