"""The arithmetic of the GPU rollouts' experiment; its measurements need a GPU."""

import json
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from experiments.gpu_rollouts import run
from experiments.gpu_rollouts.cases import Case, covered, ratios
from experiments.gpu_rollouts.precompile import gpu_blocks, recorded_blocks


def test_covered_counts_overlapping_kernels_once():
    # [0, 4) and [2, 5) make 5, [7, 9) two more; [3, 4) lies within.
    assert covered([(7.0, 9.0), (0.0, 4.0), (2.0, 5.0), (3.0, 4.0)]) == 7.0
    assert covered([]) == 0.0


def test_modes_are_compared_with_the_host_loop_of_their_round():
    runs = [{"mode": "captured", "steps_per_s": 900.0}, {"mode": "host loop", "steps_per_s": 300.0}]
    assert ratios(runs) == {"captured": 3.0, "host loop": 1.0}
    assert ratios(runs[:1]) == {}


def test_the_table_has_medians_of_equal_cases():
    case = Case("rayagi/Ant-v0", 256, 32, "captured", False)
    common = {**{name: getattr(case, name) for name in case.__slots__}, "launches": 9, "gpu_share": 0.5}
    rows = run.table([{**common, "steps_per_s": rate, "against_host": rate / 10} for rate in (10, 30, 20)])
    assert rows.splitlines()[-1] == (
        "| rayagi/Ant-v0 | 256 | 32 | rollout | captured | 20 | 10 - 30 | 2.0 | 9 | 50% |"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["run", "--out", str(tmp_path / "results")])
    assert run.main() == 1
    assert "Nothing was measured: there is no GPU here." in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_a_case_that_fails_leaves_the_others(monkeypatch, capsys, tmp_path):
    def measure(case, seconds):
        if case.mode == "captured":
            raise RuntimeError("operation not permitted when stream is capturing")
        common = {name: getattr(case, name) for name in case.__slots__}
        return {**common, "steps_per_s": 3.0, "launches": 9, "gpu_share": 0.5}

    monkeypatch.setattr(run, "measure", measure)
    monkeypatch.setattr(run, "missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    options = ["--tasks", "rayagi/Ant-v0", "--num-envs", "4", "--repeats", "1", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["run", *options])
    assert run.main() == 1
    assert '"failed": "RuntimeError: operation not permitted' in capsys.readouterr().out
    (kept,) = tmp_path.glob("*.json")
    runs = json.loads(kept.read_text())["runs"]
    assert [(one["mode"], one["update"]) for one in runs] == [
        ("uncaptured", True), ("host loop", True), ("uncaptured", False), ("host loop", False),
    ]  # fmt: skip


def test_threads_of_a_block_are_noted_where_a_launch_asks_for_them():
    asked, seen = defaultdict(set), []
    kernel = SimpleNamespace(module=SimpleNamespace(name="solver"))
    warp = SimpleNamespace(
        launch=lambda *given, **_: seen.append(given), launch_tiled=lambda *given, **_: None
    )
    original = warp.launch
    with recorded_blocks(warp, asked):
        warp.launch(kernel, 4)
        warp.launch_tiled(kernel, [4], block_dim=64)
    assert asked == {"solver": {256, 64}}
    assert seen == [(kernel, 4)]
    assert warp.launch is original


def test_kernels_with_single_threads_on_a_cpu_are_compiled_for_every_size_of_the_model():
    assert gpu_blocks({256, 64}, {32, 128}) == {256, 64}
    assert gpu_blocks({1, 64}, {32, 128}) == {32, 64, 128}
