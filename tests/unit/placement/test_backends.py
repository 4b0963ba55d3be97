from __future__ import annotations

import json
import os
import sys

import pytest

from placement.backends import BACKENDS, get_backend, unpartitioned
from placement.backends.base import pin_to_cores
from placement.backends.unpartitioned import DirectBackend
from placement.errors import PlanError, SliceError
from placement.ledger import Ledger
from placement.plan import make_plan
from placement.types import Machine, Node, Slice
from rayagi.cli.parser import build_parser
from tests.fakes.mps import gpu
from tests.programs import run_python

MISSING_CORE = 1023
"""The last core that the default affinity mask can name; no test machine has it."""

ENTER = """
import json, os, sys
from placement.backends import get_backend
from placement.types import Slice
piece = Slice(node="n", backend="cpu", cores=tuple(json.loads(sys.argv[1])), num_threads=int(sys.argv[2]))
os.environ.update(get_backend("cpu").environment(piece))
assert "torch" not in sys.modules
get_backend("cpu").enter(piece)
import torch
torch.zeros(1000) + 1
print(json.dumps([sorted(os.sched_getaffinity(0)), torch.get_num_threads(), torch.get_num_interop_threads()]))
"""


def test_a_process_that_enters_a_cpu_slice_has_its_cores_and_threads():
    core = min(os.sched_getaffinity(0))
    done = run_python(
        ENTER,
        json.dumps([core]),
        "1",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert json.loads(done.stdout) == [[core], 1, 1]


def test_a_core_that_does_not_exist_is_refused_and_the_affinity_stays():
    before = os.sched_getaffinity(0)
    with pytest.raises(SliceError, match=rf"1 core \({MISSING_CORE}\).*at most {len(before)}"):
        pin_to_cores((MISSING_CORE,))
    assert os.sched_getaffinity(0) == before


def test_a_slice_with_one_missing_core_is_refused_whole():
    before = os.sched_getaffinity(0)
    with pytest.raises(SliceError) as caught:
        pin_to_cores((min(before), MISSING_CORE))
    assert str(MISSING_CORE) in caught.value.wanted
    assert os.sched_getaffinity(0) == before


def test_a_slice_without_cores_leaves_the_affinity():
    before = os.sched_getaffinity(0)
    pin_to_cores(())
    assert os.sched_getaffinity(0) == before


def test_the_direct_backend_leaves_the_choice_of_the_gpu_to_ray():
    gmi_slice = Slice(node="n", backend="direct", num_threads=4, gpu_uuid="GPU-1", gpu_fraction=0.5)
    backend = get_backend("direct")
    environment = backend.environment(gmi_slice)
    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "0"
    assert environment["OMP_NUM_THREADS"] == "4"
    assert backend.device(gmi_slice) == "cuda:0"


def test_a_process_of_the_direct_backend_sees_the_planned_gpu_whatever_order_cuda_counts_in(
    monkeypatch, tmp_path
):
    """Ray gives an index of NVML's, by PCI bus; CUDA's own order begins with the fastest GPU, which may be another one."""
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "0"})  # as Ray sets it
    monkeypatch.setattr(unpartitioned, "limit_torch_threads", lambda num_threads: None)
    order_of_cuda = {"0": "GPU-fast", "1": "GPU-slow"}
    seen = []

    def first_call_of_cuda():
        visible = os.environ["CUDA_VISIBLE_DEVICES"]
        seen.append(order_of_cuda.get(visible, visible))
        return True

    monkeypatch.setattr("torch.cuda.is_available", first_call_of_cuda)
    slow = gpu("GPU-slow", index=0)
    backend = get_backend("direct")
    (share,) = backend.partition(slow, (1.0,), Ledger.open("run", tmp_path))
    planned = Slice(node="n", backend="direct", gpu_uuid="GPU-slow", gpu_fraction=1.0, share=share)
    backend.enter(planned)
    assert seen == ["GPU-slow"]
    assert backend.environment(planned)["CUDA_VISIBLE_DEVICES"] == "GPU-slow"


def test_the_direct_backend_refuses_a_slice_without_a_gpu():
    with pytest.raises(SliceError, match="Wanted a GPU"):
        get_backend("direct").environment(Slice(node="n", backend="direct"))


def test_the_device_of_a_cpu_slice_is_the_cpu():
    assert get_backend("cpu").device(Slice(node="n", backend="cpu", cores=(0,))) == "cpu"


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_can_be_named_and_says_why_it_is_unavailable(name):
    assert build_parser().parse_args(["train", "--backend", name]).backend == name
    assert BACKENDS[name].name == name
    nothing = BACKENDS[name].availability(Node(name="n", cores=(), memory_total_bytes=1), None)
    assert not nothing.usable
    assert len(nothing.reason.split()) > 2
    assert nothing.hint


class HalfBackend(DirectBackend):
    """Uses GPUs of two shares only."""

    name = "half"

    def predict_limits(self, node, gpu, sizes):
        if len(sizes) != 2:
            raise PlanError(f"{len(sizes)} GMIs", "half has two per GPU", "Set gmis_per_gpu to 2")
        return super().predict_limits(node, gpu, sizes)


def test_a_line_in_the_registry_is_all_that_a_new_backend_needs(monkeypatch):
    monkeypatch.setitem(BACKENDS, "half", HalfBackend())
    node = Node(name="n", cores=tuple(range(8)), memory_total_bytes=1, gpus=(gpu(),))
    machine = Machine(nodes=(node,), origin="test")
    plan = make_plan(machine, backend="half", gmis_per_gpu=2, num_envs=1)
    assert [gmi_slice.backend for gmi_slice in plan.slices] == ["half", "half"]
    with pytest.raises(PlanError, match="half has two per GPU"):
        make_plan(machine, backend="half", gmis_per_gpu=3, num_envs=1)
    with pytest.raises(PlanError, match="the backends are cpu, direct, mps, mig, green, half"):
        get_backend("vgpu")


@pytest.mark.parametrize("name", ["vgpu", "CPU"])
def test_a_backend_that_does_not_exist_is_refused_with_those_that_do(name):
    with pytest.raises(PlanError, match="the backends are cpu, direct"):
        get_backend(name)
