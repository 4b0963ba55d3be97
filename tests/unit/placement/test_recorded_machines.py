from __future__ import annotations

import json
from pathlib import Path

import pytest

from placement.errors import InventoryError
from placement.inventory import dump_machine, load_machine, local_machine

MACHINES = Path(__file__).parents[2] / "data" / "machines"


@pytest.mark.parametrize(
    ("name", "nodes", "cores", "gpus"),
    [
        ("cpu2", 1, 2, 0),
        ("cpu16", 1, 16, 0),
        ("a100x1", 1, 12, 1),
        ("h100x8", 1, 192, 8),
        ("two_nodes_h100x8", 2, 384, 16),
    ],
)
def test_recorded_machines_have_what_their_names_say(name, nodes, cores, gpus):
    machine = load_machine(MACHINES / f"{name}.json")
    assert (len(machine.nodes), machine.num_cores, machine.num_gpus) == (nodes, cores, gpus)
    assert machine.origin == str(MACHINES / f"{name}.json")


@pytest.mark.parametrize("path", sorted(MACHINES.glob("*.json")), ids=lambda path: path.stem)
def test_a_machine_comes_back_as_it_was_written(path: Path, tmp_path: Path):
    machine = load_machine(path)
    dump_machine(machine, tmp_path / "copy.json")
    assert load_machine(tmp_path / "copy.json").nodes == machine.nodes
    assert (tmp_path / "copy.json").read_text() == path.read_text()


def test_this_machine_can_be_recorded(tmp_path: Path):
    machine = local_machine()
    dump_machine(machine, tmp_path / "here.json")
    assert load_machine(tmp_path / "here.json").nodes == machine.nodes


NODE = {"name": "n", "cores": [0], "memory_total_bytes": 1}
GPU = {"index": 0, "uuid": "GPU-1", "name": "fake", "memory_total_bytes": 1}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[1]", "has schema list, this version reads 1"),
        ("{}", "has schema None"),
        ('{"schema": 99, "nodes": []}', "has schema 99, this version reads 1"),
        ('{"schema": 1}', "has no list of nodes"),
        ('{"schema": 1, "nodes": [7]}', r"nodes\[0\] is not an object"),
        ({"name": "n"}, r"nodes\[0\] lacks cores, memory_total_bytes"),
        (NODE | {"speed": 3}, r"nodes\[0\] has unknown keys speed"),
        (NODE | {"cores": 4}, r"nodes\[0\].cores is 4"),
        (NODE | {"cores": [0, 0]}, r"nodes\[0\].cores is \[0, 0\]"),
        (NODE | {"cores": [True]}, r"nodes\[0\].cores\[0\] is True, not int"),
        (NODE | {"memory_total_bytes": "8 GiB"}, r"nodes\[0\].memory_total_bytes is '8 GiB', not int"),
        (NODE | {"gpus": 8}, r"nodes\[0\].gpus is 8, not a list"),
        (NODE | {"gpus": [{"index": 0}]}, r"nodes\[0\].gpus\[0\] lacks memory_total_bytes, name, uuid"),
        (NODE | {"gpus": [GPU | {"compute_capability": "9.0"}]}, r"compute_capability is '9.0'"),
        (NODE | {"gpus": [GPU | {"sm_count": 1.5}]}, "sm_count is 1.5, not int or null"),
    ],
)
def test_a_bad_file_is_refused_with_its_path_and_the_place(content, problem, tmp_path: Path):
    path = tmp_path / "machine.json"
    path.write_text(content if isinstance(content, str) else json.dumps({"schema": 1, "nodes": [content]}))
    with pytest.raises(InventoryError, match=problem) as caught:
        load_machine(path)
    assert caught.value.source == str(path)


def test_two_nodes_of_one_name_are_refused(tmp_path: Path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"schema": 1, "nodes": [NODE, NODE]}))
    with pytest.raises(InventoryError, match="two nodes of one name among n, n"):
        load_machine(path)


def test_a_missing_file_is_said_so(tmp_path: Path):
    with pytest.raises(InventoryError, match=r"nowhere.json: cannot be read \(No such file"):
        load_machine(tmp_path / "nowhere.json")


def test_a_file_that_is_not_text_is_said_so(tmp_path: Path):
    path = tmp_path / "machine.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InventoryError, match="is not JSON"):
        load_machine(path)
