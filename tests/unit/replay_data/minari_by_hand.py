"""Minari's datasets by hand: Minari itself is not needed."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def episode(length, end="t", **infos):
    """Row i of the observations has i everywhere; actions and rewards are i. ``infos``: by name, a row per observation."""
    last = np.arange(length) == length - 1
    return {
        "observations": np.stack([np.arange(length + 1.0)] * 2, 1),
        "actions": np.arange(length, dtype=np.float32)[:, None],
        "rewards": np.arange(length, dtype=np.float64),
        "terminations": last & (end == "t"),
        "truncations": last & (end == "u"),
        "infos": infos,
    }


def write_minari(path, episodes, data_format="hdf5", **about):
    """A folder with these episodes. ``about``: changes of metadata.json."""
    folder = path / "data"
    folder.mkdir(parents=True)
    steps = [len(each["rewards"]) for each in episodes]
    found = {"data_format": data_format, "total_episodes": len(episodes), "total_steps": sum(steps)}
    found |= {"jpeg_encoding": False, **about}
    (folder / "metadata.json").write_text(json.dumps(found))
    if data_format == "hdf5":
        _write_hdf5(folder, episodes)
        return path
    for number, each in enumerate(episodes):
        (folder / str(number)).mkdir()
        (folder / str(number) / "metadata.json").write_text(json.dumps({"total_steps": steps[number]}))
        rows = len(each["observations"])
        padded = {name: _padded(values, rows) for name, values in each.items() if name != "infos"}
        columns = {name: pa.array(values.tolist()) for name, values in padded.items()}
        if each["infos"]:
            infos = {name: values.tolist() for name, values in each["infos"].items()}
            columns["infos"] = pa.array([{name: infos[name][row] for name in infos} for row in range(rows)])
        pq.write_table(pa.table(columns), folder / str(number) / "0.parquet")
    return path


def _write_hdf5(folder, episodes):
    import h5py

    with h5py.File(folder / "main_data.hdf5", "w") as file:
        for number, each in enumerate(episodes):
            flat = {name: values for name, values in each.items() if name != "infos"}
            flat |= {f"infos/{name}": values for name, values in each["infos"].items()}
            for name, values in flat.items():
                file[f"episode_{number}/{name}"] = values


def _padded(values, rows):
    """As Minari writes what has a row per action: with one more."""
    return values if len(values) == rows else np.concatenate([values, np.zeros_like(values[:1])])
