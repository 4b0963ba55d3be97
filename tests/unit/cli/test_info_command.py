"""`rayagi info`, and planning for every machine that is recorded here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from placement.inventory import load_machine
from rayagi.cli import main
from tests.fakes.gpus import a_free_mig_gpu
from tests.fakes.nvml import FakeDriver

MACHINES = Path(__file__).parents[2] / "data" / "machines"


def printed(capsys, *arguments) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def lines_of(capsys, name: str, *more) -> dict[str, tuple[str, str]]:
    """Backend -> (usable, why) on a recorded machine."""
    text = printed(capsys, "info", "--machine", str(MACHINES / f"{name}.json"), *more)
    rows = text.split("usable  why\n")[1].splitlines()
    cells = [row.split(maxsplit=3) for row in rows]
    return {backend: (usable, why) for _, backend, usable, why in cells}


@pytest.mark.parametrize(
    ("name", "usable"),
    [
        ("cpu2", {"cpu"}),
        ("a100_40x1", {"cpu", "direct", "mps", "green"}),
        ("a100_80x8", {"cpu", "direct", "mps", "green"}),
        ("h200x1", {"cpu", "direct", "mps", "green"}),
        ("a30x1", {"cpu", "direct", "mps", "green"}),
        ("v100x1", {"cpu", "direct", "mps"}),  # no MIG, and its SMs are not recorded
        ("rtx4090x1", {"cpu", "direct", "mps"}),
        ("a100_40x1_mig_cut", {"cpu", "mig"}),  # only its instances are devices
        ("a100_40x1_mps_taken", {"cpu", "direct", "green"}),
    ],
)
def test_each_backend_is_listed_with_its_availability_and_reason(name, usable, capsys):
    answers = lines_of(capsys, name)
    assert set(answers) == {"cpu", "direct", "mps", "mig", "green"}
    assert {backend for backend, (answer, _) in answers.items() if answer == "yes"} == usable
    assert all(why for _, why in answers.values())


def test_mode_off_says_what_to_run_on_the_gpu_at_hand(capsys):
    _, ampere = lines_of(capsys, "a100_40x1")["mig"]
    _, hopper = lines_of(capsys, "h100x1")["mig"]
    assert "sudo nvidia-smi -i GPU-00010000-0000-4000-8000-000000000000 -mig 1" in ampere
    assert "--gpu-reset" in ampere
    assert "--gpu-reset" not in hopper


def test_gpus_instances_processes_and_links_are_shown(capsys):
    cut = printed(capsys, "info", "--machine", str(MACHINES / "a100_40x1_mig_cut.json"))
    assert "3g.20gb  0-3            42   20.0 GiB  yes     MIG-00000001" in cut
    used = printed(capsys, "info", "--machine", str(MACHINES / "a100_80x4_in_use.json"))
    assert "GPU 2 is used by process 5002 (79.0 GiB)" in used
    dgx = printed(capsys, "info", "--machine", str(MACHINES / "a100_40x8.json"))
    assert "NUMA node 1: cores 64-127, 512.0 GiB" in dgx
    assert dgx.count("NV12") == 56  # both halves of the matrix


def test_this_machine_is_recorded_for_elsewhere(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu = a_free_mig_gpu()
    uuid = gpu.make(9, 4)
    FakeDriver(gpu).install(monkeypatch)
    output = printed(capsys, "info", "--json", str(tmp_path / "here.json"))
    assert f"rayagi plan TASK --machine {tmp_path / 'here.json'}" in output
    (node,) = load_machine(tmp_path / "here.json").nodes
    assert [one.uuid for one in node.gpus[0].mig_instances] == [uuid]
    assert json.loads(printed(capsys, "info", "--json"))["nodes"][0]["driver_version"] == "580.65.06"
    plan = printed(
        capsys,
        "plan",
        "Ant-v5",
        "--machine",
        str(tmp_path / "here.json"),
        "--backend",
        "mig",
        "--num-envs",
        "8",
    )
    assert "dp_only on mig: 1 GMI" in plan


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("cpu2", "cpu"),
        ("a100_40x1", "mps"),
        ("a100_40x8", "mps"),
        ("a100_80x1", "mps"),
        ("a100_80x8", "mps"),
        ("h100x1", "mps"),
        ("h100x8", "mps"),
        ("h200x8", "mps"),
        ("a30x1", "mps"),
        ("v100x1", "mps"),
        ("rtx4090x1", "mps"),
        ("a30x8", "mps"),
        ("v100x8", "mps"),
        ("rtx4090x8", "mps"),
        ("a100_40x1_mps_taken", "direct"),
    ],
)
def test_every_recorded_machine_can_be_planned_for(name, backend, capsys):
    shares = [] if backend == "cpu" else ["--set", "gmi.gmis_per_gpu=2"]
    file = str(MACHINES / f"{name}.json")
    plan = printed(capsys, "plan", "Ant-v5", "--machine", file, "--num-envs", "64", *shares)
    assert f"dp_only on {backend}: " in plan


def test_a_machine_without_usable_backends_reports_it(capsys):
    file = str(MACHINES / "a100_80x4_in_use.json")
    assert main(["plan", "Ant-v5", "--machine", file, "--num-envs", "64", "--backend", "mig"]) == 2
    assert "MIG mode is off" in capsys.readouterr().err


def test_gpus_that_cannot_be_used_are_listed_with_the_plan(capsys):
    file = str(MACHINES / "a100_80x4_in_use.json")
    plan = printed(capsys, "plan", "Ant-v5", "--machine", file, "--num-envs", "64")
    assert "dp_only on mps: 6 GMIs" in plan  # three on each of the two that can be used
    assert plan.count("Without GPU ") == 2


def test_a_file_that_cannot_be_written_is_bad_input(capsys, tmp_path):
    assert main(["info", "--json", str(tmp_path / "no" / "folder.json")]) == 2
    assert "cannot be written (No such file" in capsys.readouterr().err


def test_an_unreachable_cluster_is_an_error(monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert main(["info", "--cluster"]) == 2
    assert "no Ray cluster answers at 127.0.0.1:1" in capsys.readouterr().err
