"""Backend selection by `auto` on recorded machines, and errors of unavailable backends."""

from dataclasses import replace
from pathlib import Path

import pytest

from placement.backend_choice import choose_backend
from placement.errors import PlanError
from placement.inventory import load_machine
from placement.plan import make_plan
from placement.types import Machine

MACHINES = Path(__file__).parents[2] / "data" / "machines"
TRAINING = ("simulator", "agent", "trainer")
SERVING = ("simulator", "agent")


def machine(name: str) -> Machine:
    return load_machine(MACHINES / f"{name}.json")


def changed(name: str, *, node=None, **gpu) -> Machine:
    """The recorded machine with something about its node and all its GPUs changed."""
    found = machine(name)
    nodes = tuple(
        replace(one, gpus=tuple(replace(each, **gpu) for each in one.gpus), **(node or {}))
        for one in found.nodes
    )
    return replace(found, nodes=nodes)


@pytest.mark.parametrize(
    ("name", "roles", "per_gpu", "backend", "why"),
    [
        ("cpu2", TRAINING, 1, "cpu", "there is no GPU"),
        ("v100x1", TRAINING, 3, "mps", "mps for training"),
        ("v100x1", SERVING, 3, "mps", "mps for serving; not mig, since"),
        ("a100_40x8", TRAINING, 3, "mps", "exchange gradients freely"),
        ("a100_40x8", TRAINING, 1, "direct", "each GMI has a GPU to itself"),
        ("h100x8", TRAINING, 2, "mps", "mps for training"),
        ("rtx4090x1", SERVING, 2, "mps", "has no MIG"),
        ("a100_40x1_mig_cut", SERVING, 2, "mig", "its isolation pays"),
        ("a100_40x1_mig_cut", TRAINING, 2, "mig", "the GPUs are in MIG mode; not mps, since"),
        (
            "a100_40x1_mps_taken",
            TRAINING,
            2,
            "direct",
            "not mps, since an MPS server that this run did not start",
        ),
    ],
)
def test_auto_follows_the_papers_where_the_machine_allows(name, roles, per_gpu, backend, why):
    chosen, reason = choose_backend(machine(name), "auto", roles=roles, gmis_per_gpu=per_gpu)
    assert chosen == backend
    assert why in reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"node": {"mps_control": False}}, "has no nvidia-cuda-mps-control on PATH"),
        ({"compute_capability": (6, 0)}, "has compute capability 6.0, and MPS shares need 7.0"),
        ({"mps_running": True}, "an MPS server that this run did not start uses GPU-"),
    ],
)
def test_where_mps_cannot_be_used_training_shares_plainly_and_the_plan_says_why(changes, reason):
    plan = make_plan(changed("h100x1", **changes), num_envs=1, gmis_per_gpu=2)
    assert plan.backend == "direct"
    assert reason in plan.reason
    assert reason in plan.table()


@pytest.mark.parametrize(
    ("backend", "changes", "texts"),
    [
        ("mps", {"mps_running": True}, ("backend='mps'", "did not start", "rayagi cleanup", "echo quit")),
        ("mps", {"mig_enabled": True}, ("is in MIG mode", "nvidia-smi -i GPU-", "-mig 0")),
        ("mps", {"compute_mode": "prohibited"}, ("admits no process", "-c DEFAULT")),
        ("direct", {"mig_enabled": True}, ("is in MIG mode", "CUDA_VISIBLE_DEVICES=MIG-")),
        ("green", {"node": {"cuda_version": (12, 2)}}, ("supports CUDA 12.2", "need 12.4", "550")),
        ("green", {"sm_count": None}, ("number of SMs of GPU-", "is not known")),
    ],
)
def test_an_unavailable_backend_is_refused_with_a_hint(backend, changes, texts):
    with pytest.raises(PlanError) as caught:
        make_plan(changed("h100x1", **changes), num_envs=1, gmis_per_gpu=2, backend=backend)
    for text in texts:
        assert text in str(caught.value)


def test_a_gpu_that_nothing_can_use_is_an_error_with_every_reason():
    with pytest.raises(
        PlanError, match=r"backend='auto': not mps, since .* not direct, since .* admits no process"
    ):
        choose_backend(changed("h100x1", compute_mode="prohibited"), "auto", roles=TRAINING, gmis_per_gpu=2)


@pytest.mark.parametrize("backend", ["mps", "green", "direct"])
def test_slices_of_every_gpu_backend_ask_ray_for_fractions(backend):
    plan = make_plan(machine("h100x8"), num_envs=1, gmis_per_gpu=3, backend=backend)
    assert {gmi_slice.backend for gmi_slice in plan.slices} == {backend}
    assert plan.bundles()[0]["GPU"] == 0.3333
    assert plan.slices[0].label() == f"{backend}[{plan.slices[0].gpu_uuid[:12]} x0.33]"
