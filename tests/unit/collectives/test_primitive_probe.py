import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from members import run_group
from test_ring_transport import connected

from collectives.primitive_probe import (
    PrimitiveProbe,
    ProcessCapabilities,
    local_capabilities,
    primitive_unsupported_reason,
    probe,
    probe_primitives,
)

ON_CPU = ProcessCapabilities(host_id="h", shared_memory=True, device="cpu", nccl=None)
ON_GPU = ProcessCapabilities(host_id="h", shared_memory=True, device="GPU-a", nccl=(2, 29, 7))
OTHER_GPU = replace(ON_GPU, device="GPU-b")
ON_MIG = replace(ON_GPU, device="MIG-a")
OTHER_MIG = replace(ON_GPU, device="MIG-b")


def elsewhere(capabilities):
    return replace(capabilities, host_id="another")


def newer(*group, nccl=(2, 31, 0)):
    return [replace(capabilities, nccl=nccl) for capabilities in group]


@pytest.mark.parametrize(
    ("primitive", "group", "reason"),
    [
        ("ip", [ON_CPU, ON_GPU], ""),
        ("ip", [ON_CPU, elsewhere(ON_CPU)], "on 2 hosts"),
        ("ip", [ON_CPU, replace(ON_CPU, shared_memory=False)], "cannot share memory"),
        ("net", [ON_CPU, elsewhere(ON_GPU)], ""),
        ("rp", [ON_CPU, ON_CPU], ""),
        ("rp", [ON_CPU, ON_GPU], "some members compute on a CPU"),
        ("rp", [ON_GPU, OTHER_GPU], ""),
        ("rp", [ON_GPU, elsewhere(OTHER_GPU)], ""),
        ("rp", [ON_GPU, ON_GPU], "NCCL takes one rank per GPU"),
        ("rp", [ON_GPU, OTHER_GPU, ON_GPU], "NCCL takes one rank per GPU"),
        ("rp", [ON_GPU, replace(OTHER_GPU, nccl=None)], "built without NCCL"),
        ("rp", [ON_GPU, replace(OTHER_GPU, nccl=(2, 30, 0))], "different versions of NCCL: 2.29.7, 2.30.0"),
        ("rp", [ON_MIG, OTHER_MIG], "MIG instances from 2.31.0 on, and this is 2.29.7"),
        ("rp", newer(ON_MIG, OTHER_MIG), ""),
        ("device", [ON_CPU, ON_CPU], "no CUDA"),
        ("device", [ON_GPU, ON_GPU], ""),
        ("device", [ON_GPU, OTHER_GPU], "2 different GPUs"),
        ("device", [ON_MIG, OTHER_MIG], "MIG: CUDA IPC"),
        ("device", [ON_MIG, ON_MIG], ""),
        ("device", [ON_GPU, elsewhere(ON_GPU)], "on 2 hosts, or containers"),
    ],
)
def test_what_rules_a_primitive_out_is_known_beforehand(primitive, group, reason):
    found = primitive_unsupported_reason(primitive, group)
    assert (found == "") == (reason == "")
    assert reason in found


def test_a_process_on_a_cpu_knows_that_it_is_on_one():
    capabilities = local_capabilities(torch.device("cpu"))
    assert capabilities.device == "cpu"
    assert (capabilities.nccl is None) == (not dist.is_nccl_available())


def test_a_mig_instance_is_known_by_its_own_name(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-11,MIG-22")
    assert local_capabilities(torch.device("cuda", 0)).device == "MIG-11"


class Wrong:
    """A transport of one whose sums are too large by one at the end."""

    rank, world_size = 0, 1

    def __init__(self):
        self.closed = False

    def buffer(self, numel, dtype):
        return torch.zeros(numel, dtype=dtype)

    def all_reduce(self, tensor):
        tensor[-1] += 1

    def reduce_scatter(self, tensor):
        return 0, tensor.numel()

    def barrier(self):
        pass

    def close(self):
        self.closed = True


def test_a_wrong_sum_is_an_objection_and_the_transport_is_closed():
    transport = Wrong()
    assert probe(lambda: transport, 10.0) == "its all_reduce of known numbers gave a wrong sum"
    assert transport.closed


def test_a_transport_that_cannot_be_opened_is_an_objection():
    def refuse():
        raise OSError("no such device")

    assert probe(refuse, 10.0) == "its probe failed: no such device"


def test_a_probe_that_hangs_does_not_hang_the_member():
    end = threading.Event()
    assert probe(lambda: end.wait(60), 0.1) == "its probe did not end within 0.1 s"
    assert not end.is_set()
    end.set()


def test_members_agree_on_what_works_and_why_the_rest_does_not():
    opened = []

    def task(communicator, done):
        def failing():
            raise OSError("no permission")

        def open_device():
            opened.append(communicator.rank)

        everyone = (0, 1, 2)
        ring = PrimitiveProbe(members=everyone, open=lambda: connected(communicator))
        candidates = {
            "rp": ring,
            "ip": PrimitiveProbe(members=everyone, open=failing if communicator.rank == 1 else Right),
            "device": PrimitiveProbe(members=everyone, open=open_device),
            "net": PrimitiveProbe(members=(communicator.rank,), open=failing),
        }
        return probe_primitives(communicator, ON_CPU, candidates, 20.0)

    first, second, third = run_group("inprocess", 3, task)
    assert first == second == third
    assert first["rp"] == ""
    assert first["net"] == ""  # nobody needs it
    assert first["ip"] == "ranks 1: its probe failed: no permission"
    assert first["device"] == "ranks 0, 1, 2: no CUDA: these members compute on a CPU"
    assert opened == []


class Right(Wrong):
    """A transport of one: sums are there already."""

    def all_reduce(self, tensor):
        pass


def test_groups_of_one_primitive_are_probed_in_parallel():
    """Two GPUs of two GMIs: device within each. It fails in the second group, so it is offered to none."""

    def task(communicator, done):
        rank = communicator.rank
        capabilities = replace(ON_GPU, device="GPU-a" if rank < 2 else f"GPU-{rank}")
        members = (0, 1) if rank < 2 else (2, 3)
        return probe_primitives(
            communicator, capabilities, {"device": PrimitiveProbe(members=members, open=Right)}, 20.0
        )

    for found in run_group("inprocess", 4, task):
        assert found["device"] == "ranks 2, 3: its members are on 2 different GPUs"
