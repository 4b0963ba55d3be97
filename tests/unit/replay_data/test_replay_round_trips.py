"""What is exported to a format and read again is the same, whatever wrote it first."""

import errno
import os
import resource
import signal
from itertools import pairwise

import numpy as np
import pyarrow
import pytest
import torch
from trajectories_by_hand import assert_equal, content, trajectories

from actors.replay import Column, ReplaySchema, ReplayStore
from placement.inventory import limits
from rayagi.replay import export, load, open_source, saved
from rayagi.replay.saved import store_source
from rayagi.replay.summary import summarize
from rayagi.replay.tables import parquet_files
from rayagi.replay.trajectories import FLAGS, is_obs
from rayagi.run.errors import DiskError
from rayagi.serving.errors import DatasetError, ExportError

SUFFIX = {"d4rl": ".hdf5", "torch": ".pt"}
FORMATS = ["rayagi", "rayagi-arrow", "minari", "minari-hdf5", "lerobot", "rllib", "d4rl", "torch"]


def store_of(rows, extras=()):
    """A store with these trajectories."""
    columns = [
        Column(name=name, dtype=values.dtype, shape=values.shape[1:], extra=int(is_obs(name)))
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


@pytest.mark.parametrize("kind", FORMATS)
def test_a_trajectory_is_split_behind_steps_that_end_it(tmp_path, kind):
    """As a demonstration that goes on after its task is solved: readers of steps would split it, those of episodes not."""
    needs(kind)
    short, whole, last = trajectories(lengths=(2, 6, 1), ends="tuu")
    whole["terminated"][1] = whole["truncated"][2] = True
    out = tmp_path / f"out{SUFFIX.get(kind, '-v0')}"
    assert export(store_source(store_of([short, whole, last]), tmp_path), out, kind) == 5
    pieces = [
        {name: values[begin : end + is_obs(name)] for name, values in whole.items()}
        for begin, end in ((0, 2), (2, 3), (3, 6))
    ]
    with load(out) as again:
        found = [{name: each[name] for name in short} for each in content(again)]
    assert_equal(found, [short, *pieces, last])


def test_many_episodes_keep_their_order(tmp_path):
    short = trajectories(ends="tut")[1]
    rows = [{**short, "reward": np.full_like(short["reward"], number)} for number in range(300)]
    export(store_source(store_of(rows), tmp_path), tmp_path / "out", "rllib")
    assert [path.name for path in parquet_files(tmp_path / "out")] == [
        "part-00000.parquet",
        "part-00001.parquet",
    ]
    with load(tmp_path / "out") as store:
        assert [int(each["reward"][0]) for each in content(store)] == [*range(300)]


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


def of_parts(row):
    """A trajectory with images beside its observations."""
    images = (np.arange(len(row["obs"]) * 12) % 256).reshape(-1, 2, 2, 3).astype(np.uint8)
    rest = {name: values for name, values in row.items() if name != "obs"}
    return {"obs.cam": images, "obs.state": row["obs"], **rest}


def test_observations_of_several_parts_in_tensors(tmp_path):
    wanted = [of_parts(row) for row in trajectories()]
    export(store_source(store_of(wanted), tmp_path), tmp_path / "parts.pt", "torch")
    with load(tmp_path / "parts.pt") as store:
        assert_equal(content(store), wanted)
    with pytest.raises(ExportError, match="several parts: export it to minari or torch"):
        export(open_source(tmp_path / "parts.pt"), tmp_path / "parts.h5", "d4rl")


@pytest.mark.parametrize("kind", ["minari", "minari-hdf5"])
def test_minari_reads_observations_of_several_parts_as_a_dict(tmp_path, kind):
    needs(kind)
    import minari

    wanted = [of_parts(row) for row in trajectories(ends="tut")]
    export(store_source(store_of(wanted), tmp_path), tmp_path / "parts-v0", kind)
    with load(tmp_path / "parts-v0") as store:
        assert_equal([{name: each[name] for name in wanted[0]} for each in content(store)], wanted)
    for episode, row in zip(minari.MinariDataset(tmp_path / "parts-v0" / "data"), wanted, strict=True):
        for part in ("cam", "state"):
            np.testing.assert_array_equal(episode.observations[part], row[f"obs.{part}"])


def test_a_slash_in_a_name_is_refused_where_it_would_begin_a_group(tmp_path):
    needs("minari-hdf5")
    wanted = [
        {f"{name}/x" if name == "obs.cam" else name: values for name, values in of_parts(row).items()}
        for row in trajectories(ends="tut")
    ]
    source = store_source(store_of(wanted), tmp_path)
    with pytest.raises(
        ExportError,
        match=r"has the column obs.cam/x, whose slash begins a group in HDF5: export it to minari",
    ):
        export(source, tmp_path / "hdf5-v0", "minari-hdf5")
    export(source, tmp_path / "arrow-v0", "minari")
    with load(tmp_path / "arrow-v0") as store:
        assert_equal([{name: each[name] for name in wanted[0]} for each in content(store)], wanted)


def test_tensors_without_next_observations_of_parts(tmp_path):
    """A step that did not terminate is left out, and its observation is the one after the step before."""
    state, cam = torch.arange(5.0)[:, None], torch.arange(5, dtype=torch.uint8)
    steps = {"obs.state": state, "obs.cam": cam, "action": torch.zeros(5)}
    torch.save({**steps, "terminals": torch.tensor([0, 1, 0, 0, 0])}, tmp_path / "parts.pt")
    found = list(open_source(tmp_path / "parts.pt").read())
    assert [each["obs.cam"].tolist() for each in found] == [[0, 1, 1], [2, 3, 4]]
    assert [each["obs.state"][:, 0].tolist() for each in found] == [[0, 1, 1], [2, 3, 4]]
    torch.save({**steps, "next_obs.cam": cam + 1}, tmp_path / "parts.pt")
    with pytest.raises(DatasetError, match=r"has 'next_obs.cam' but no 'next_obs.state': add it, or remove"):
        open_source(tmp_path / "parts.pt")


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


@pytest.mark.parametrize("kind", ["rayagi", "rayagi-arrow", "minari", "lerobot", "rllib", "d4rl", "torch"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, kind):
    """A limit on a file's size: each column fits, and all of them do not."""
    needs(kind)
    source = store_source(store_of(trajectories(lengths=(9000,), ends="t", obs_shape=(4,))), tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    try:
        with pytest.raises(DiskError, match=r"cannot write .*: File too large; free space there"):
            export(source, tmp_path / f"out{SUFFIX.get(kind, '-v0')}", kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_space_for_tensors_is_reserved_before_it_is_mapped(tmp_path, monkeypatch):
    """A write into a mapped file on a full disk is a bus error."""
    asked, source = [], store_source(store_of(trajectories()), tmp_path)

    def full(descriptor, offset, length):
        asked.append(length)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match="No space left on device"):
        export(source, tmp_path / "out.pt", "torch")
    assert asked == [9 * 2 * 4]  # nine steps of two reals, the first column's
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


def test_a_saved_replay_without_a_column_is_not_restored(tmp_path, monkeypatch):
    saved.save(store_of(trajectories()), tmp_path / "replay")
    monkeypatch.delattr(ReplayStore, "create")
    for opened in (load, open_source):
        with pytest.raises(DatasetError, match="has no column 'nope': its columns are obs, action"):
            opened(tmp_path / "replay", columns=["nope"])


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_ends_an_export_to_rllib(tmp_path):
    calls = []

    def progress(done, total):
        calls.append(done)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        export(store_source(store_of(trajectories()), tmp_path), tmp_path / "out", "rllib", progress)
    assert calls == [9]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["minari", "minari-hdf5"])
def test_images_are_the_same_in_minari(tmp_path, kind):
    needs(kind)
    wanted = trajectories(ends="tut")
    for each in wanted:
        each["obs"] = np.random.default_rng(0).integers(0, 256, (len(each["obs"]), 32, 32, 3), np.uint8)
    export(store_source(store_of(wanted), tmp_path), tmp_path / "out-v0", kind)
    with load(tmp_path / "out-v0") as store:
        assert_equal(content(store), wanted)


def test_large_steps_have_small_chunks(tmp_path):
    h5py = pytest.importorskip("h5py", reason="the extra 'hdf5' is not installed")
    rows = trajectories(lengths=(4,), ends="t")
    rows[0]["obs"] = np.ones((5, 256, 256, 3), np.uint8)
    export(store_source(store_of(rows), tmp_path), tmp_path / "out.hdf5", "d4rl")
    with h5py.File(tmp_path / "out.hdf5") as file:
        assert file["observations"].chunks == (5, 256, 256, 3)  # of 196,608 bytes: 5 are less than 1 MiB
        assert file["rewards"].chunks == (8192,)
    assert (tmp_path / "out.hdf5").stat().st_size < 4 * 2**20


@pytest.mark.parametrize("kind", ["d4rl", "torch"])
def test_cut_trajectories_that_fit_together_stay_apart(tmp_path, kind):
    needs(kind)
    wanted = trajectories(ends="ccc")
    for before, after in pairwise(wanted):
        after["obs"][0] = before["obs"][-1]
    out = tmp_path / f"out{SUFFIX[kind]}"
    export(store_source(store_of(wanted), tmp_path), out, kind)
    with load(out) as store:
        assert_equal(content(store), wanted)
    assert open_source(out).left_out == ()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("goal", kind) for kind in ("rayagi", "rayagi-arrow", "rllib")),
        *((name, "lerobot") for name in ("timestamp", "index", "next_obs", "next.reward")),
        *((name, "torch") for name in ("next_obs", "trajectory_number", "actions")),
    ],
)
def test_further_columns_that_a_format_would_lose(tmp_path, name, kind):
    rows = [{**each, name: each["reward"]} for each in trajectories()]
    with pytest.raises(ExportError, match=f"has the columns {name}, .*export it to .*minari"):
        export(store_source(store_of(rows), tmp_path), tmp_path / f"out{SUFFIX.get(kind, '')}", kind)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_store_with_other_columns_than_trajectories(tmp_path, kind):
    """Of a user: ``info``, ``load`` and saving work, exports say what is missing."""
    columns = (Column(name="obs", dtype="float32"), Column(name="terminated", dtype="int8", shape=(1,)))
    store = ReplayStore.create(ReplaySchema(columns, 3), 2)
    for length in (3, 2):
        store.insert(
            {"obs": np.ones((1, length), np.float32), "terminated": np.zeros((1, length, 1), np.int8)}
        )
    saved.save(store, tmp_path / "replay")
    source = open_source(tmp_path / "replay")
    assert summarize(source)["lengths"] == {"min": 2, "mean": 2.5, "max": 3}
    with load(tmp_path / "replay", max_length=2) as cut:
        assert cut.status()["length"].tolist() == [2, 1, 2]
    flag = "" if kind in ("lerobot", "d4rl", "torch") else f"{kind} needs a column truncated; "
    message = (
        f"cannot be exported: {kind} needs a column action; {flag}obs has extra=0 where 1 is needed; "
        r"terminated has shape \[1\] where one number a step is needed; terminated is of int8 where bool is needed"
    )
    with pytest.raises(ExportError, match=message):
        export(source, tmp_path / f"out{SUFFIX.get(kind, '')}", kind)


@pytest.mark.parametrize("kind", ["rayagi", "minari", "rllib", "torch"])
def test_choices_below_zero(tmp_path, kind):
    """Such as of Discrete(3, start=-1): formats with spaces would have one without them."""
    needs(kind)
    wanted = trajectories(ends="tut", action=np.int64)
    for each in wanted:
        each["action"] -= 1
    wanted[0]["action"][0] = -1
    source, out = store_source(store_of(wanted), tmp_path), tmp_path / f"out{SUFFIX.get(kind, '-v0')}"
    if kind == "torch":
        export(source, out, kind)
        assert_equal(list(open_source(out).read()), wanted)
        return
    with pytest.raises(
        ExportError, match="has the action -1, where choices count from 0: export it to lerobot"
    ):
        export(source, out, kind)
    assert not out.exists()


def test_numbers_of_other_types_in_rayagi_s_own_format(tmp_path):
    wanted = trajectories(lengths=(2,), ends="t")[0]
    wanted |= {"reward": np.array([2**24 + 1, 3]), "policy_version": np.array([4.0, 5.0])}
    export(store_source(store_of([wanted]), tmp_path), tmp_path / "out", "rayagi")
    with load(tmp_path / "out") as store:
        (found,) = content(store)
    assert found["reward"].tolist() == [2**24, 3]  # float32 has 24 bits
    assert found["policy_version"].tolist() == [4, 5]
    for bad in (0.5, np.nan, np.inf):
        rows = [{**wanted, "policy_version": np.array([1.0, bad])}]
        with pytest.raises(ExportError, match="policy_version other than whole numbers"):
            export(store_source(store_of(rows), tmp_path), tmp_path / "bad", "rayagi")
    rows = [{**wanted, "log_prob": np.zeros((2, 1), np.float32)}]
    for kind in ("rayagi", "rllib"):
        with pytest.raises(ExportError, match=r"has log_prob: float32\[1\], where .* has one number a step"):
            export(store_source(store_of(rows), tmp_path), tmp_path / "bad", kind)
    export(store_source(store_of(rows), tmp_path), tmp_path / "out.pt", "torch")
    assert [
        column.shape
        for column in open_source(tmp_path / "out.pt").schema.columns
        if column.name == "log_prob"
    ] == [()]


@pytest.mark.parametrize(
    "reward",
    [
        np.array([2**64 - 1, 3], np.uint64),
        np.array([-(2**63), 3], np.int64),
        np.array([200, 3], np.uint8),
        np.array([True, False]),
        np.array([0.1, 3]),
    ],
    ids=lambda reward: reward.dtype.name,
)
@pytest.mark.parametrize("kind", ["rllib", "rayagi"])
def test_rewards_of_other_types_become_float32(tmp_path, kind, reward):
    wanted = trajectories(lengths=(2,), ends="t")[0] | {"reward": reward}
    export(store_source(store_of([wanted]), tmp_path), tmp_path / "out", kind)
    (found,) = open_source(tmp_path / "out").read()
    assert found["reward"].dtype == np.float32
    np.testing.assert_array_equal(found["reward"], reward.astype(np.float32))


def test_types_and_shapes_in_lerobot(tmp_path):
    """One number is a scalar there, whatever its shape was; of float observations and actions a vector."""
    (wanted,) = trajectories(lengths=(2,), ends="t", obs_shape=())
    columns = {"x": np.float64, "y": np.int64, "z": bool}
    wanted |= {"action": wanted["action"][:, 0]}
    wanted |= {name: np.ones((2, 1), dtype) for name, dtype in columns.items()}
    export(store_source(store_of([wanted]), tmp_path), tmp_path / "out", "lerobot")
    (found,) = open_source(tmp_path / "out", columns=list(columns)).read()
    shapes = {name: (values.dtype, values.shape) for name, values in found.items() if name not in FLAGS}
    assert shapes == {
        "obs": (np.float32, (3, 1)),
        "action": (np.float32, (2, 1)),
        "reward": (np.float32, (2,)),
        **{name: (np.dtype(dtype), (2,)) for name, dtype in columns.items()},
    }


@pytest.mark.parametrize("kind", ["lerobot", "d4rl", "torch"])
def test_transitions_without_flags(tmp_path, kind):
    """As DQN's and SAC's replays have them."""
    needs(kind)
    wanted = [{k: v for k, v in each.items() if k not in FLAGS} for each in trajectories()]
    for each in wanted:
        each["discount"] = np.full(len(each["reward"]), 0.5, np.float32)
    out = tmp_path / f"out{SUFFIX.get(kind, '')}"
    export(store_source(store_of(wanted), tmp_path), out, kind)
    with load(out, columns=["discount"]) as store:
        found = content(store)
    assert not any(each["terminated"].any() for each in found)
    assert_equal([{name: each[name] for name in wanted[0]} for each in found], wanted)


def test_a_dataset_is_read_in_parts(tmp_path):
    """pyarrow's own settings hold the whole file, and batches that are made of it ahead: here 85 MB."""
    rng, steps = np.random.default_rng(0), 2000
    ends = np.arange(steps) == steps - 1
    columns = {
        "obs": rng.random((steps + 1, 64), np.float32),
        "action": rng.random((steps, 8), np.float32),
        "reward": rng.random(steps, np.float32),
        "terminated": ends,
        "truncated": np.zeros(steps, bool),
    }
    store = store_of([columns] * 40)
    export(store_source(store, tmp_path), tmp_path / "out", "lerobot")
    before = pyarrow.total_allocated_bytes()
    source = open_source(tmp_path / "out")
    held = [pyarrow.total_allocated_bytes() - before for _ in source.read()]
    assert len(held) == 40
    assert max(held) < 40e6
