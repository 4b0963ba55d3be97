"""The default layout on GPUs: its sources in order, its limits, and what counts as given."""

from __future__ import annotations

import dataclasses

import pytest

from placement.inventory import load_machine
from rayagi.cli import train
from rayagi.cli.main import main
from rayagi.cli.parser import build_parser
from rayagi.config.presets import preset
from rayagi.coordinator.default_layout import with_default_layout
from rayagi.coordinator.search_store import SearchStore
from rayagi.coordinator.searching import SearchSettings
from rayagi.planning import plan_of

MACHINES = "tests/data/machines"
DGX = load_machine(f"{MACHINES}/a100_80x8.json")
"""Eight A100 and 128 cores."""
V100 = load_machine(f"{MACHINES}/v100x1.json")
"""One V100."""
ANT = preset("Ant-v5")


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch, tmp_path):
    """Searches are cached in the test's own folder."""
    monkeypatch.setattr("rayagi.coordinator.search_store.default_folder", lambda: tmp_path)


def with_gmi(spec=ANT, **gmi):
    return dataclasses.replace(spec, gmi=dataclasses.replace(spec.gmi, **gmi))


def small(machine, *, cores=None, memory_bytes=None):
    """The machine with fewer cores, or GPUs with less memory."""
    (node,) = machine.nodes
    if memory_bytes is not None:
        gpus = tuple(dataclasses.replace(gpu, memory_total_bytes=memory_bytes) for gpu in node.gpus)
        node = dataclasses.replace(node, gpus=gpus)
    if cores is not None:
        node = dataclasses.replace(node, cores=node.cores[:cores], numa_nodes=())
    return dataclasses.replace(machine, nodes=(node,))


def layout(spec, machine, folder, **options):
    """GMIs per GPU, environments, and what was said."""
    lines = []
    found = with_default_layout(spec, machine, log=lines.append, **options)
    return found.gmi.gmis_per_gpu, found.gmi.num_envs, "".join(lines)


def test_eight_a100_get_the_papers_gmis_and_say_where_from(tmp_path):
    """16 cores per GPU: 5 for each of three GMIs, with the preset's 32 environments on each."""
    gmis, num_envs, text = layout(ANT, DGX, tmp_path)
    assert (gmis, num_envs) == (3, 160)
    assert text == (
        "Default layout: 3 GMIs per GPU of 160 environments, not measured on this machine (the papers' layout: GMI-DRL "
        "Table 6, preprint Figure 10); `rayagi search Ant-v5` measures it."
    )
    plan = plan_of(with_gmi(gmis_per_gpu=gmis, num_envs=num_envs), DGX)
    assert (plan.num_gmis, plan.backend) == (24, "mps")


def on_engine(monkeypatch, engine):
    """Ant of rayagi on an engine, whose package need not be installed."""
    spec = preset("rayagi/Ant-v0")
    warp = dataclasses.replace(spec, env=dataclasses.replace(spec.env, engine="mujoco_warp"))
    if engine != "mujoco_warp":
        factory = dataclasses.replace(warp.env.factory(), engine=engine)
        monkeypatch.setattr(type(warp.env), "factory", lambda env: factory)
    return warp


def test_mujoco_warp_takes_one_process_per_gpu_and_says_who_measured_it(tmp_path, monkeypatch):
    """On an H200, 2 and 4 processes of as many environments in all made 0.4 to 0.67 times the steps of one."""
    warp = on_engine(monkeypatch, "mujoco_warp")
    gmis, num_envs, text = layout(warp, DGX, tmp_path)
    assert (gmis, num_envs) == (1, 4096)
    assert "not measured on this machine (with MuJoCo Warp one process was faster" in text
    assert plan_of(with_gmi(warp, gmis_per_gpu=gmis, num_envs=num_envs), DGX).backend == "direct"
    # A search here may find more.
    record(warp, DGX, tmp_path, gmis=2, num_envs=2048)
    assert layout(warp, DGX, tmp_path)[:2] == (2, 2048)


def test_physics_on_the_gpu_takes_the_papers_environments_as_far_as_memory_holds_them(tmp_path, monkeypatch):
    """4,096 of a GPU among three GMIs, as the papers had with Isaac Gym: 1,365, as a power of two."""
    isaac = on_engine(monkeypatch, "isaacgym")
    assert layout(isaac, DGX, tmp_path)[:2] == (3, 1024)
    # Shares of 528 MiB: a context of 512, and 16 MiB for rollouts. 64 steps of 60 observations, 16 outputs and 8 actions in
    # float32 are 21.5 kB an environment: 11 MB for 512, and 22 MB for 1,024.
    assert layout(isaac, small(V100, memory_bytes=3 * 528 * 2**20), tmp_path)[:2] == (3, 512)


def test_a_small_machine_gets_fewer_gmis(tmp_path):
    assert layout(ANT, small(V100, cores=2), tmp_path)[:2] == (2, 32)
    assert layout(ANT, small(V100, cores=1), tmp_path)[:2] == (1, 32)
    assert layout(ANT, small(DGX, cores=16), tmp_path)[:2] == (2, 32)


def test_without_mps_a_gpu_has_one_gmi_unless_a_search_here_found_more(tmp_path):
    (node,) = DGX.nodes
    without = dataclasses.replace(DGX, nodes=(dataclasses.replace(node, mps_control=False),))
    assert plan_of(with_gmi(gmis_per_gpu=3), without).backend == "direct"
    assert layout(ANT, without, tmp_path)[0] == 1
    record(ANT, without, tmp_path, gmis=2, num_envs=64)
    assert layout(ANT, without, tmp_path)[:2] == (2, 64)


@pytest.mark.parametrize(
    "given",
    [
        {"num_gmis": 8},
        {"gmis_per_gpu": 1},
        {"slices": (0.5, 0.5)},
        {"backend": "direct"},
        {"backend": "cpu"},
        {"template": "ea_t"},
        {"threads_per_gmi": 1},
    ],
)
def test_what_is_given_stays(tmp_path, given):
    spec = with_gmi(**given)
    assert with_default_layout(spec, DGX, log=print) is spec


def test_given_environments_stay_and_cores_have_no_such_default(tmp_path):
    assert layout(with_gmi(num_envs=48), DGX, tmp_path)[:2] == (3, 48)
    assert layout(ANT, DGX, tmp_path, keep_envs=True)[:2] == (3, 32)
    cores = load_machine(f"{MACHINES}/cpu16.json")
    assert with_default_layout(ANT, cores, log=print) is ANT


def record(spec, machine, folder, *, gmis, num_envs, complete=True):
    note = {"gmis": gmis, "num_envs": num_envs, "complete": complete}
    SearchStore(spec, machine, folder).save_note(SearchSettings().name(), note)


def test_a_recorded_search_on_the_same_gpu_comes_before_the_papers(tmp_path):
    another_host = small(DGX, cores=64)
    record(ANT, another_host, tmp_path, gmis=4, num_envs=256)
    gmis, num_envs, text = layout(ANT, DGX, tmp_path)
    assert (gmis, num_envs) == (4, 256)
    assert "not measured on this machine (a recorded search on NVIDIA A100" in text
    # One that ran here comes first.
    record(ANT, DGX, tmp_path, gmis=2, num_envs=512)
    gmis, num_envs, text = layout(ANT, DGX, tmp_path)
    assert (gmis, num_envs) == (2, 512)
    assert text == "Default layout: 2 GMIs per GPU of 512 environments, by a search on this machine."


def test_recorded_searches_that_do_not_fit_are_passed_over(tmp_path):
    record(ANT, small(DGX, cores=64), tmp_path, gmis=4, num_envs=256, complete=False)
    record(preset("Hopper-v5"), small(DGX, cores=64), tmp_path, gmis=4, num_envs=256)
    record(ANT, small(V100, cores=4), tmp_path, gmis=4, num_envs=256)
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / "old.json").write_text("[]")
    assert layout(ANT, DGX, tmp_path)[:2] == (3, 160)
    # Ten GMIs per GPU need a core each: 80 cores, of which a host with 16 has too few.
    record(ANT, small(DGX, cores=96), tmp_path, gmis=10, num_envs=256)
    assert layout(ANT, DGX, tmp_path)[:2] == (10, 256)
    assert layout(ANT, small(DGX, cores=16), tmp_path)[:2] == (2, 32)


def test_the_command_line_plans_it_and_keeps_what_options_give(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = ["--machine", f"{MACHINES}/a100_80x8.json"]
    assert main(["plan", "Ant-v5", *machine]) == 0
    printed = capsys.readouterr().out
    assert "not measured on this machine" in printed
    assert "dp_only on mps: 24 GMIs, 3,840 environments." in printed
    for given in (["--num-envs", "32"], ["--set", "gmi.num_envs=32"]):
        assert main(["plan", "Ant-v5", *machine, *given]) == 0
        assert "dp_only on mps: 24 GMIs, 768 environments." in capsys.readouterr().out
    given = tmp_path / "given.yaml"
    for text, num_envs in (("gmi: {num_envs: 32}", 768), ("seed: 3", 3840)):
        given.write_text(text)
        assert main(["plan", "Ant-v5", *machine, "--config", str(given)]) == 0
        assert f"24 GMIs, {num_envs:,} environments." in capsys.readouterr().out
    assert main(["plan", "Ant-v5", *machine, "--gmis", "8"]) == 0
    assert "Default layout" not in capsys.readouterr().out


def test_a_training_run_takes_it_and_its_folder_keeps_the_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(train, "machine_of_run", lambda: DGX)
    arguments = build_parser().parse_args(["train", "Ant-v5", "--out", str(tmp_path / "runs")])
    folder, spec, *_ = train._created(arguments)
    folder.unlock()
    assert (spec.gmi.gmis_per_gpu, spec.gmi.num_envs) == (3, 160)
    assert "not measured on this machine" in capsys.readouterr().out


@pytest.mark.parametrize(
    "note", [{"gmis": float("inf"), "num_envs": 64}, {"gmis": 100_000, "num_envs": 64}, {}]
)
def test_damaged_numbers_of_a_recorded_search_are_passed_over(tmp_path, note):
    """Of this machine and of another one; a share of 1/100,000 is no fraction of a GPU."""
    for machine in (DGX, small(DGX, cores=64)):
        store = SearchStore(ANT, machine, tmp_path)
        store.save_note(SearchSettings().name(), note | {"complete": True})
    assert layout(ANT, DGX, tmp_path)[:2] == (3, 160)
