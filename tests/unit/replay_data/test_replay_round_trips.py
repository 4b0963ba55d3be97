"""What is exported to a format and read again is the same, whatever wrote it first."""

import numpy as np
import pytest
from trajectories_by_hand import assert_equal, content, trajectories

from actors.replay import Column, ReplaySchema, ReplayStore
from placement.inventory import limits
from rayagi.replay import export, load, open_source, saved
from rayagi.replay.stored import store_source
from rayagi.serving.errors import ExportError

SUFFIX = {"d4rl": ".hdf5", "torch": ".pt"}
FORMATS = ["rayagi", "rayagi-arrow", "minari", "minari-hdf5", "lerobot", "rllib", "d4rl", "torch"]


def store_of(rows, extras=()):
    """A store with these trajectories."""
    columns = [
        Column(name=name, dtype=values.dtype, shape=values.shape[1:], extra=int(name == "obs"))
        for name, values in rows[0].items()
    ]
    longest = max(len(each["reward"]) for each in rows)
    store = ReplayStore.create(ReplaySchema(tuple(columns), longest), len(rows))
    for each in rows:
        store.insert({name: values[None] for name, values in each.items()})
    return store


def needs(kind):
    """Skip if the library of a format is not installed."""
    if kind.startswith("minari"):
        pytest.importorskip("minari", reason="the extra 'minari' is not installed")
    if kind in ("d4rl", "minari-hdf5"):
        pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")


@pytest.mark.parametrize("action", [np.float32, np.int64])
@pytest.mark.parametrize("kind", FORMATS)
def test_export_then_import_is_equal(tmp_path, kind, action):
    needs(kind)
    # RLlib and Minari have no trajectories that a recording cut.
    ends = "tut" if kind in ("rllib", "minari", "minari-hdf5") else "tuc"
    wanted = trajectories(ends=ends, action=action)
    out = tmp_path / f"out{SUFFIX.get(kind, '-v0')}"
    store = store_of(wanted)
    assert export(store_source(store, tmp_path), out, kind) == 3
    names = wanted[0].keys()
    with load(out) as again:
        found = [{name: each[name] for name in names} for each in content(again)]
    assert_equal(found, wanted)
    second = tmp_path / f"second{SUFFIX.get(kind, '-v0')}"
    export(open_source(out), second, kind)
    with load(second) as again:
        assert_equal([{name: each[name] for name in names} for each in content(again)], wanted)
    with pytest.raises(ExportError, match="exists already"):
        export(open_source(out), second, kind)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([out.name, second.name])


def test_many_episodes_keep_their_order(tmp_path):
    short = trajectories(ends="tut")[1]
    rows = [{**short, "reward": np.full_like(short["reward"], number)} for number in range(200)]
    export(store_source(store_of(rows), tmp_path), tmp_path / "out", "rllib")
    with load(tmp_path / "out") as store:
        assert [int(each["reward"][0]) for each in content(store)] == [*range(200)]


@pytest.mark.parametrize("kind", ["rllib", "minari"])
def test_a_cut_trajectory_counts_as_truncated(tmp_path, kind):
    needs(kind)
    export(store_source(store_of(trajectories(ends="ccc")), tmp_path), tmp_path / "out-v0", kind)
    with load(tmp_path / "out-v0") as store:
        assert [each["truncated"][-1] for each in content(store)] == [True] * 3


@pytest.mark.parametrize("kind", ["minari", "lerobot", "d4rl", "torch"])
def test_further_columns_come_back_if_they_are_named(tmp_path, kind):
    needs(kind)
    wanted = trajectories(ends="tut")
    for number, each in enumerate(wanted):
        each["goal"] = np.full((len(each["reward"]), 3), number, np.float32)
    out = tmp_path / f"out{SUFFIX.get(kind, '-v0')}"
    export(store_source(store_of(wanted), tmp_path), out, kind)
    assert open_source(out).left_out == ("goal",)
    with load(out, columns=["goal"]) as store:
        assert_equal(content(store), wanted)


def test_a_failed_export_leaves_nothing(tmp_path):
    class StoppedError(Exception):
        pass

    def progress(done, total):
        if done > 3:
            raise StoppedError

    for kind in ("rayagi", "lerobot", "torch", "rllib"):
        with pytest.raises(StoppedError):
            export(store_source(store_of(trajectories()), tmp_path), tmp_path / "out.pt", kind, progress)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "message"), [("rayagi", "no rewards"), ("rllib", "no rewards")])
def test_columns_that_a_format_does_not_have(tmp_path, kind, message):
    rows = [{name: values for name, values in each.items() if name != "reward"} for each in trajectories()]
    store = ReplayStore.create(
        ReplaySchema(
            tuple(
                Column(name=name, dtype=values.dtype, shape=values.shape[1:], extra=int(name == "obs"))
                for name, values in rows[0].items()
            ),
            5,
        ),
        3,
    )
    for each in rows:
        store.insert({name: values[None] for name, values in each.items()})
    with pytest.raises(ExportError, match=message):
        export(store_source(store, tmp_path), tmp_path / "out", kind)


def test_a_saved_replay_takes_half_of_what_its_process_may_use(tmp_path, monkeypatch):
    """A container may have less memory than its host; the other rows are on disk."""
    saved.save(store_of(trajectories()), tmp_path / "replay")
    given, create = [], ReplayStore.create

    def creating(*args, **options):
        given.append(options["memory_bytes"])
        return create(*args, **options)

    monkeypatch.setattr(limits, "memory_bytes", lambda: 2**20)
    monkeypatch.setattr(ReplayStore, "create", creating)
    assert open_source(tmp_path / "replay").kind == "replay"
    assert given == [2**19]
