"""Time limits of partitioning with a stand-in for Ray; with real actors it is tested in tests/cluster."""

from types import SimpleNamespace

import pytest
import ray.exceptions

import actors.partitioners
from actors.gmi import WorkerInfo
from actors.partitioners import PARTITION_TIMEOUT_S, RESTORE_TIMEOUT_S, Partitioners
from placement.plan import make_plan
from placement.types import Machine, Node, Share
from tests.fakes.mps import gpu


class OneNode:
    """A partitioner of one node whose calls are answered at once; keeps the limits with which it was waited for."""

    def __init__(self):
        self.limits = {}

    def __getattr__(self, name):
        answer = shares_of if name == "partition" else lambda: None
        return SimpleNamespace(remote=lambda *given: (name, answer(*given)))

    def get(self, ref, timeout):
        name, answer = ref
        self.limits[name] = timeout
        return answer


def shares_of(wanted):
    return [
        tuple(Share(kind="mps", gpu_uuid=one.uuid, sm_partition="G/D") for _ in sizes)
        for one, sizes in wanted
    ]


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_a_node_partitions_its_gpus_one_after_another_and_has_the_time_for_it(monkeypatch, num_gpus):
    """Without persistence mode a driver takes tens of seconds for the first MPS server on eight GPUs."""
    gpus = tuple(gpu(f"GPU-{index}", index=index) for index in range(num_gpus))
    node = Node(name="n", cores=tuple(range(16)), memory_total_bytes=2**40, gpus=gpus, ray_node_id="id")
    plan = make_plan(Machine(nodes=(node,), origin="test"), backend="mps", gmis_per_gpu=2, num_envs=1)
    workers = [
        WorkerInfo(index=i, node_id="id", hostname="", pid=0, cores=(), num_threads=1, gpu_ids=())
        for i in range(plan.num_gmis)
    ]
    there = OneNode()
    stand_in = SimpleNamespace(
        get=there.get, kill=lambda *_, **__: None, is_initialized=lambda: True, exceptions=ray.exceptions
    )
    monkeypatch.setattr(actors.partitioners, "ray", stand_in)
    partitioners = Partitioners("a run")
    monkeypatch.setattr(partitioners, "_start", lambda *_: partitioners._handles.update(n=there))
    monkeypatch.setattr(actors.partitioners, "time", SimpleNamespace(monotonic=lambda: 0.0))
    partitioners.partition(plan, workers)
    partitioners.restore()
    assert there.limits == {
        "partition": num_gpus * PARTITION_TIMEOUT_S,
        "restore": num_gpus * RESTORE_TIMEOUT_S,
    }
