"""The green backend, as far as it can be tested without a GPU."""

import pytest

from placement.backends import get_backend
from placement.errors import PartitionError, PlanError, SliceError
from placement.ledger import Ledger
from placement.plan import make_plan
from placement.types import Machine, Node, Share, Slice
from tests.fakes.mps import gpu


def test_shares_are_whole_groups_of_sms_and_nothing_is_made(tmp_path):
    backend, ledger = get_backend("green"), Ledger.open("run", tmp_path)
    # 132 SMs: 66 and 43.99 down to groups of 8
    shares = backend.partition(gpu(), (0.5, 0.3333), ledger)
    assert [share.sm_count for share in shares] == [64, 40]
    assert [share.memory_bytes for share in shares] == [None, None]
    backend.restore("GPU-1", ledger)
    assert list(tmp_path.iterdir()) == []


def test_a_share_below_one_group_is_refused(tmp_path):
    with pytest.raises(PartitionError, match=r"green contexts have at least 8 SMs. Set gmis_per_gpu lower"):
        get_backend("green").partition(gpu(), (0.05,), Ledger.open("run", tmp_path))


def test_without_cuda_entering_says_so():
    share = Share(kind="green", gpu_uuid="GPU-1", sm_count=64)
    gmi_slice = Slice(node="n", backend="green", gpu_uuid="GPU-1", gpu_fraction=0.5, share=share)
    with pytest.raises(SliceError, match=r"no CUDA device|a torch without green contexts"):
        get_backend("green").enter(gmi_slice)


def test_a_plan_with_shares_below_one_group_is_refused():
    node = Node(name="n", cores=tuple(range(32)), memory_total_bytes=1, gpus=(gpu(),))
    machine = Machine(nodes=(node,), origin="test")
    assert make_plan(machine, backend="green", gmis_per_gpu=4, num_envs=1).num_gmis == 4
    with pytest.raises(PlanError, match="green contexts have at least 8 SMs"):
        make_plan(machine, backend="green", gmis_per_gpu=20, num_envs=1)
