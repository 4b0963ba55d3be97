"""MPS with the real daemon: what shares a process sees, what it may not exceed, and that nothing is left."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from placement.backends import get_backend
from placement.backends.mps_control import MpsDaemon
from placement.inventory import local_machine
from placement.ledger import Ledger, all_ledgers
from placement.types import Slice
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.coordinator.session import Session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: nothing here was verified"),
    pytest.mark.skipif(
        shutil.which("nvidia-cuda-mps-control") is None,
        reason="no nvidia-cuda-mps-control: nothing here was verified",
    ),
]

INSIDE = """
import json, sys, torch
from placement.backends import get_backend
from placement.types import Share, Slice

share = Share(**json.loads(sys.argv[1]))
piece = Slice(node="here", backend="mps", gpu_uuid=share.gpu_uuid, gpu_fraction=0.5, share=share)
backend = get_backend("mps")
backend.enter(piece)
matrix = torch.randn(2048, 2048, device="cuda:0")
torch.cuda.synchronize()
backend.verify(piece)
seen = torch.cuda.get_device_properties(0).multi_processor_count
try:
    torch.empty(int(share.memory_bytes * 1.05), dtype=torch.uint8, device="cuda:0")
    refused = False
except torch.OutOfMemoryError:
    refused = True
print(json.dumps({"sms": seen, "refused": refused, "finite": bool((matrix @ matrix).isfinite().all())}), flush=True)
input()
"""


@pytest.fixture
def partitioned(tmp_path):
    gpu = local_machine().nodes[0].gpus[0]
    backend, ledger = get_backend("mps"), Ledger.open("test", tmp_path)
    shares = backend.partition(gpu, (0.5, 0.25), ledger)
    yield gpu, shares
    backend.restore(gpu.uuid, ledger)
    assert ledger.steps() == ()
    assert not MpsDaemon.from_pipe_directory(shares[0].pipe_directory).folder.exists()


@contextmanager
def entered(share):
    """A process in the share; it stays until its input ends."""
    fields = json.dumps({name: getattr(share, name) for name in share.__slots__})
    process = subprocess.Popen(
        [sys.executable, "-c", INSIDE, fields],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        try:
            process.communicate("\n", timeout=30)
        finally:
            process.kill()


def answer(process):
    line = process.stdout.readline()
    assert line, "a process in a share ended before it answered: its error is above"
    return json.loads(line)


def test_processes_are_held_to_their_shares_side_by_side(partitioned):
    gpu, shares = partitioned
    with entered(shares[0]) as one, entered(shares[1]) as other:
        found = [answer(one), answer(other)]
        clients = MpsDaemon.from_pipe_directory(shares[0].pipe_directory).clients()
        assert {one.pid, other.pid} <= set(clients)
    for share, seen in zip(shares, found, strict=True):
        assert seen["finite"]
        assert seen["refused"], "more memory than the share's was granted"
        assert seen["sms"] < (gpu.sm_count or 0)
        assert seen["sms"] <= share.sm_count + 8


def test_a_killed_client_leaves_its_neighbour_working(partitioned):
    _, shares = partitioned
    with entered(shares[0]) as victim, entered(shares[1]) as neighbour:
        answer(victim)
        gmi_slice = Slice(node="here", backend="mps", gpu_uuid=shares[0].gpu_uuid, share=shares[0])
        get_backend("mps").evict(gmi_slice, victim.pid)
        victim.kill()
        victim.wait()
        assert answer(neighbour)["finite"]
        assert get_backend("mps").health(replace(gmi_slice, share=shares[1])).state == "ok"


def test_two_gmis_train_on_mps_shares_and_nothing_is_left():
    spec = RunSpec(
        env=EnvSpec(id="InvertedPendulum-v5"),
        gmi=GmiSpec(gmis_per_gpu=2, num_gmis=2, num_envs=4),
        network=NetworkSpec(hidden=(16,)),
        learning=PPOSpec(rollout_length=8, num_minibatches=2, num_epochs=1),
    )
    with Session(spec) as session:
        assert session.plan.backend == "mps"
        assert [health.state for health in session.health()] == ["ok", "ok"]
        session.train(2)
    assert all_ledgers() == ([], [])
