from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.errors import InventoryError
from placement.inventory import dump_machine, load_machine, local_machine
from placement.types import Gpu, GpuLink, GpuProcess, Machine, MigInstance, Node, NumaNode
from tests.data.machines import make

MACHINES = Path(__file__).parents[2] / "data" / "machines"


@pytest.mark.parametrize(
    ("name", "nodes", "cores", "gpus"),
    [
        ("cpu2", 1, 2, 0),
        ("cpu16", 1, 16, 0),
        ("a100x1", 1, 12, 1),
        ("h100x8", 1, 192, 8),
        ("two_nodes_h100x8", 2, 384, 16),
        ("a100_40x8", 1, 128, 8),
        ("h200x8", 1, 192, 8),
        ("a30x8", 1, 64, 8),
        ("v100x8", 1, 64, 8),
        ("rtx4090x8", 1, 64, 8),
        ("a100_80x4_in_use", 1, 32, 4),
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


def test_a_file_from_before_a_field_was_there_still_loads():
    (gpu,) = load_machine(MACHINES / "a100x1.json").nodes[0].gpus
    assert "mig_enabled" not in (MACHINES / "a100x1.json").read_text()
    assert (gpu.mig_enabled, gpu.mig_instances, gpu.processes) == (None, (), ())


def test_the_recorded_machines_are_what_their_generator_writes(tmp_path: Path):
    make.main(tmp_path)
    for path in tmp_path.glob("*.json"):
        assert path.read_text() == (MACHINES / path.name).read_text()


def test_what_the_driver_reported_survives_the_file():
    gpu = load_machine(MACHINES / "a100_40x1_mig_cut.json").nodes[0].gpus[0]
    assert [(one.profile, one.start, one.size, one.in_use) for one in gpu.mig_instances] == [
        ("3g.20gb", 0, 4, True),
        ("2g.10gb", 4, 2, False),
        ("1g.5gb", 6, 1, False),
    ]
    dgx = load_machine(MACHINES / "a100_40x8.json").nodes[0]
    assert len(dgx.gpu_links) == 28  # pairs of 8
    first, last = dgx.gpus[0], dgx.gpus[7]
    assert dgx.link(last.uuid, first.uuid).nvlinks == 12
    assert dgx.link(first.uuid, first.uuid) is None
    assert (last.numa_node, last.cores) == (1, tuple(range(64, 128)))


def test_this_machine_can_be_recorded(tmp_path: Path):
    machine = local_machine()
    dump_machine(machine, tmp_path / "here.json")
    assert load_machine(tmp_path / "here.json").nodes == machine.nodes


@st.composite
def nodes(draw) -> Node:
    """Nodes with every kind of field, optional ones there or not."""
    number = st.integers(0, 2**40)
    some = st.none() | number
    instances = st.builds(
        MigInstance,
        uuid=st.text(),
        profile=st.text(),
        memory_bytes=number,
        start=some,
        size=some,
        sm_count=some,
    )
    gpus = draw(
        st.lists(
            st.builds(
                Gpu,
                index=number,
                uuid=st.text(),
                name=st.text(),
                memory_total_bytes=number,
                compute_capability=st.none() | st.tuples(number, number),
                mig_enabled=st.none() | st.booleans(),
                mig_instances=st.lists(instances, max_size=3).map(tuple),
                compute_mode=st.sampled_from([None, "default", "exclusive_process", "prohibited"]),
                processes=st.lists(st.builds(GpuProcess, pid=number, memory_used_bytes=some), max_size=2).map(
                    tuple
                ),
                cores=st.lists(number, max_size=3).map(tuple),
            ),
            max_size=3,
            unique_by=lambda gpu: gpu.uuid,
        )
    )
    pairs = [(one.uuid, other.uuid) for one, other in combinations(gpus, 2)]
    return Node(
        name=draw(st.text()),
        cores=tuple(draw(st.sets(number, max_size=4))),
        memory_total_bytes=draw(number),
        gpus=tuple(gpus),
        ray_cpus=draw(st.none() | st.floats(0, 1e6)),
        gpu_links=tuple(
            GpuLink(gpus=pair, nvlinks=draw(number), path=draw(st.sampled_from([None, "PIX", "SYS"])))
            for pair in pairs
        ),
        numa_nodes=(NumaNode(index=0, cores=(1, 2), memory_bytes=3),),
        cuda_version=draw(st.none() | st.tuples(number, number)),
    )


@settings(max_examples=50, deadline=None)
@given(nodes())
def test_any_machine_comes_back_as_it_was_written(node):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "machine.json"
        dump_machine(Machine(nodes=(node,), origin="made"), path)
        assert load_machine(path).nodes == (node,)


NODE = {"name": "n", "cores": [0], "memory_total_bytes": 1}
GPU = {"index": 0, "uuid": "GPU-1", "name": "fake", "memory_total_bytes": 1}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
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
        (NODE | {"gpus": [GPU, GPU]}, "has two of one uuid among GPU-1, GPU-1"),
        (NODE | {"gpus": [GPU | {"compute_mode": "shared"}]}, "compute_mode is 'shared', not 'default' or"),
        (
            NODE | {"gpus": [GPU | {"mig_instances": [{"uuid": "MIG-1"}]}]},
            r"mig_instances\[0\] lacks memory_bytes",
        ),
        (NODE | {"gpu_links": [{"gpus": ["GPU-1", "GPU-2"]}]}, "names GPUs that are not in it: GPU-1, GPU-2"),
        (NODE | {"cuda_version": [13]}, r"cuda_version is \[13\], not a list of 2 or null"),
        (NODE | {"gpus": [GPU | {"sm_count": 1.5}]}, "sm_count is 1.5, not int or null"),
        (NODE | {"ray_cpus": math.nan}, r"nodes\[0\].ray_cpus is nan, not a finite number of at least 0"),
        (NODE | {"ray_cpus": math.inf}, r"nodes\[0\].ray_cpus is inf, not a finite number"),
        (NODE | {"ray_gpus": -1}, r"nodes\[0\].ray_gpus is -1, not a finite number"),
    ],
)
def test_a_bad_file_is_refused_with_its_path_and_the_place(content, problem, tmp_path: Path):
    path = tmp_path / "machine.json"
    path.write_text(content if isinstance(content, str) else json.dumps({"schema": 1, "nodes": [content]}))
    with pytest.raises(InventoryError, match=problem) as caught:
        load_machine(path)
    assert caught.value.what == str(path)


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
