"""The choice of a template: predicted by the model, decided by short runs, the default where neither is possible."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest

from actors.errors import GmiLostError
from placement.errors import PlanError
from placement.inventory import load_machine
from rayagi.cli.main import main
from rayagi.config.errors import ConfigError
from rayagi.config.presets import preset
from rayagi.config.rules import checked
from rayagi.coordinator import model_validation, profiling, search_store, template_choice, template_probe
from rayagi.coordinator.auto import resolve_auto
from rayagi.coordinator.model_validation import ModelValidation
from rayagi.coordinator.template_probe import BUDGET_S, Comparison, by_turns, steps_per_s_of
from rayagi.coordinator.throughput_model import ModelledPlan, PlanThroughput, UnitCosts
from rayagi.planning import plan_of
from tests.unit.coordinator.test_throughput_model import on_cores

CPU2 = load_machine("tests/data/machines/cpu2.json")
GOOD = ModelValidation(
    date="2026-11-25",
    cpu="A",
    cores=2,
    kinds=("ppo", "appo", "serving"),
    cases=20,
    pairs=100,
    right=95,
    median_error=0.06,
    p90_error=0.15,
)


COARSE = dataclasses.replace(GOOD, p90_error=1.0)
"""Its error rules out no prediction where it may not rank."""


COSTS = UnitCosts(
    rollout=on_cores(0.0, 1e-4), simulate=on_cores(0.0, 1e-4), act=on_cores(1e-4, 0.0), update=on_cores(0.1, 1e-4),
    complete=on_cores(0.0, 0.0),
    message_s=1e-4, bandwidth=1e9, reduce_s=1e-4, step_spread=0.1, rollout_spread=0.02,
    state_bytes=100.0, action_bytes=20.0, reward_bytes=6.0, model_bytes=1e6, gmi_bytes=1e9, env_bytes=1e6,
    num_steps=32, num_updates=16, num_envs=(32, 128),
)  # fmt: skip


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Begins another process: sets the unit costs, the validation and the steps per second of turns; records which templates
    were measured."""
    turns: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(template_probe, "connected", nullcontext)
    monkeypatch.setattr(model_validation, "cpu_model", lambda: "A")

    def set_all(costs, validation, **speeds):
        left = {name: list(values) for name, values in speeds.items()}

        def cached(spec, machine, **options):
            assert costs is not None, "nothing is to be measured here"
            return costs

        def turn(spec, template):
            turns.append(template)
            found = left[template].pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(search_store, "_measured_here", set())
        monkeypatch.setattr(profiling, "cached_unit_costs", cached)
        monkeypatch.setattr(template_choice, "load", lambda: validation)
        monkeypatch.setattr(model_validation, "load", lambda: validation)
        monkeypatch.setattr(template_probe, "trained_steps_per_s", turn)
        return turns

    return set_all


SLOW_REDUCTIONS = dataclasses.replace(COSTS, reduce_s=1.0)
"""A second for each reduction between two GMIs: one trainer of both collectors is faster, as in ea_t and e_at."""
LOST = GmiLostError(1, "GMI 1", "an iteration", "its process has ended")


def chosen(spec, machine=CPU2, **options):
    lines = []
    return template_choice.chosen(spec, machine, log=lines.append, **options), "\n".join(lines)


def test_a_default_that_is_faster_than_the_model_s_error_is_not_measured(measured):
    exact = dataclasses.replace(GOOD, median_error=0.0)
    turns = measured(COSTS, exact)
    name, text = chosen(preset("Ant-v5"))
    assert name == "dp_only"
    assert "Template dp_only: predicted" in text
    assert "Error of the model: 0% in the median" in text
    assert turns == []


def test_the_measurement_decides_against_the_model(measured):
    turns = measured(SLOW_REDUCTIONS, GOOD, dp_only=[90, 95], ea_t=[100, 110], e_at=[130, 120])
    name, text = chosen(preset("Ant-v5"))
    assert turns == ["dp_only", "ea_t", "e_at", "e_at", "ea_t", "dp_only"]
    assert name == "e_at"
    assert "Template e_at: measured by turns: dp_only 90 and 95 steps/s (predicted " in text
    # The model has ea_t first: it does not exchange steps.
    assert text.index("\nea_t ") < text.index("\ne_at ") < text.index("\ndp_only ")


@pytest.mark.parametrize("other", [[104, 120], [100, 130]])
def test_the_default_is_kept_unless_another_is_faster_in_each_turn(measured, other):
    measured(SLOW_REDUCTIONS, GOOD, dp_only=[90, 104], ea_t=other, e_at=[80, 80])
    assert chosen(preset("Ant-v5"))[0] == "dp_only"


TOO_LARGE = PlanError("32 environments", "they need 9 GiB", "Use fewer")
KINDS = {GmiLostError: "crashed", MemoryError: "out of memory", PlanError: "cannot be planned"}


@pytest.mark.parametrize("failure", [LOST, MemoryError("no"), TOO_LARGE])
def test_a_candidate_that_fails_is_left_out_with_a_sentence(measured, failure):
    turns = measured(SLOW_REDUCTIONS, GOOD, dp_only=[90, 95], ea_t=[failure], e_at=[100, 110])
    name, text = chosen(preset("Ant-v5"))
    assert name == "e_at"
    assert turns == ["dp_only", "ea_t", "e_at", "e_at", "dp_only"]
    assert f"ea_t does not run here: {KINDS[type(failure)]} ({type(failure).__name__}: {failure})" in text


def test_a_default_that_fails_gives_way(measured):
    measured(SLOW_REDUCTIONS, GOOD, dp_only=[LOST], ea_t=[70, 71], e_at=[60, 61])
    assert chosen(preset("Ant-v5"))[0] == "ea_t"


def test_where_all_candidates_fail_the_model_decides_and_the_run_reports(measured):
    measured(SLOW_REDUCTIONS, GOOD, dp_only=[LOST], ea_t=[LOST], e_at=[LOST])
    name, text = chosen(preset("Ant-v5"))
    assert name in ("ea_t", "e_at")
    assert "by the model alone: nothing could be measured." in text


def test_after_the_time_budget_the_model_takes_none_that_is_known_to_fail(measured, monkeypatch):
    measured(SLOW_REDUCTIONS, GOOD, dp_only=[90], ea_t=[LOST], e_at=[80])
    # Read at the begin, and before each turn: it is spent after the first round.
    now = iter([0.0, 0.0, 0.0, 0.0, BUDGET_S])
    monkeypatch.setattr(template_probe.by_turns, "__defaults__", (lambda: next(now),))
    name, text = chosen(preset("Ant-v5"))
    assert name == "e_at"  # predicted behind ea_t, and before dp_only
    assert "Template e_at by the model alone: measured by turns: dp_only 90 steps/s" in text


def test_a_cache_that_cannot_be_written_does_not_end_the_run(measured, tmp_path):
    (tmp_path / "rayagi").write_text("a file where the cache's folder would be")
    turns = measured(SLOW_REDUCTIONS, GOOD, dp_only=[90, 95], ea_t=[70, 71], e_at=[130, 120])
    name, text = chosen(preset("Ant-v5"))
    assert name == "e_at"
    assert "The measurement is not cached, and the next run repeats it: cannot write " in text
    assert len(turns) == 6


def test_an_error_of_every_candidate_ends_the_run(measured):
    measured(SLOW_REDUCTIONS, GOOD, dp_only=[ConnectionError("no Ray")])
    with pytest.raises(ConnectionError, match="no Ray"):
        chosen(preset("Ant-v5"))


@pytest.mark.parametrize(("failure", "turns_again"), [(LOST, 6), (MemoryError("no"), 0)])
def test_a_comparison_is_cached_unless_a_failure_may_not_recur(measured, failure, turns_again):
    turns = measured(SLOW_REDUCTIONS, GOOD, dp_only=[90, 95], ea_t=[failure], e_at=[100, 110])
    assert chosen(preset("Ant-v5"))[0] == "e_at"
    turns.clear()
    measured(SLOW_REDUCTIONS, GOOD, dp_only=[90, 95], ea_t=[200, 200], e_at=[100, 110])
    again, text = chosen(preset("Ant-v5"))
    assert len(turns) == turns_again
    assert again == ("ea_t" if turns_again else "e_at")
    assert "e_at 100 and 110 steps/s" in text
    assert chosen(preset("Ant-v5"), measuring="nothing")[0] == again
    # Another number of environments is another comparison.
    more = dataclasses.replace(preset("Ant-v5"), gmi=dataclasses.replace(preset("Ant-v5").gmi, num_envs=17))
    with pytest.raises(PlanError, match="were not compared on this machine with this version"):
        chosen(more, measuring="nothing")


def test_a_comparison_that_may_end_otherwise_counts_in_its_process_and_in_trials(measured):
    turns = measured(SLOW_REDUCTIONS, GOOD, dp_only=[90, 95], ea_t=[LOST], e_at=[100, 110])
    assert chosen(auto_spec())[0] == "e_at"
    turns.clear()
    assert chosen(auto_spec())[0] == "e_at"  # the next trial of a Tune experiment is created
    measured(SLOW_REDUCTIONS, GOOD)
    # A trial in its own process: its resources are those of e_at.
    assert resolve_auto(auto_spec(), CPU2, measuring="missing").gmi.template == "e_at"
    assert turns == []
    with pytest.raises(PlanError, match="were not compared"):
        chosen(auto_spec(), measuring="nothing")


def test_the_time_budget_ends_the_turns():
    now = [0.0]

    def turn(template):
        now[0] += BUDGET_S / 2
        return {"a": 10.0, "b": 20.0, "c": 30.0}[template]

    found, _ = by_turns(["a", "b"], turn, lambda: now[0])
    assert found == Comparison(turns={"a": [10.0], "b": [20.0]}, complete=False)
    assert found.fastest("a") is None  # one turn each: drift of the machine's speed may be the difference
    now[0] = 0.0
    found, _ = by_turns(["a", "b", "c"], turn, lambda: now[0])
    assert found.turns == {"a": [10.0], "b": [20.0], "c": []}
    assert found.fastest("a") is None


def test_long_iterations_are_not_measured(measured):
    turns = measured(dataclasses.replace(SLOW_REDUCTIONS, rollout=on_cores(2.0, 0.0)), GOOD)
    name, text = chosen(preset("Ant-v5"))
    assert name in ("ea_t", "e_at")
    # dp_only: 32 steps of 2 s, and 16 reductions of 1 s, waits and the update.
    assert "Not measured: an iteration would last up to 81 s." in text
    assert turns == []


def prediction(template: str, steps_per_s: float) -> PlanThroughput:
    return PlanThroughput(
        layout=ModelledPlan(template=template, workers=(), cores=2),
        steps_per_s=steps_per_s,
        parts_s={"a": 1.0},
    )


def test_the_default_and_what_the_model_cannot_tell_from_the_fastest_are_candidates():
    found = [
        prediction("a", 50),
        prediction("b", 100),
        prediction("c", 83),
        prediction("d", 81),
        prediction("e", 60),
    ]
    assert template_choice.candidates(found, 0.0) == ["a", "b"]
    # 83 x 1.1 = 91.3 and 81 x 1.1 = 89.1, against 100 x 0.9
    assert template_choice.candidates(found, 0.1) == ["a", "b", "c"]
    assert template_choice.candidates(found[1:], 0.1) == ["b", "c"]
    assert template_choice.candidates(found[1:], None) == ["b", "c", "d"]
    assert template_choice.candidates(found, None) == ["a", "b", "c"]
    assert template_choice.candidates(found, 1.5) == ["a", "b", "c"]


def test_throughput_is_that_of_the_iterations_after_the_warm_up():
    now, sizes = [0.0], []

    def iterate(count):
        sizes.append(count)
        now[0] += 1.0 if len(sizes) == 1 else count * 0.05  # the first compiles
        return count * 100.0

    assert steps_per_s_of(iterate, lambda: now[0]) == pytest.approx(2000.0)
    # Half a second each: of at least five, the first is dropped, and four are two seconds.
    assert sizes[:7] == [1, 1, 10, 10, 10, 10, 10]
    assert len(sizes) < 10


def test_serving_and_asynchronous_algorithms_choose_among_their_own(measured):
    # Acting costs 100 times a step of physics, whatever the batch: one agent for both simulators saves half of it.
    exact = dataclasses.replace(GOOD, median_error=0.0)
    measured(dataclasses.replace(COSTS, act=on_cores(0.1, 0.0)), exact)
    assert chosen(preset("Ant-v5"), serving=True)[0] == "dp_only"  # agents on two cores act at the same time
    measured(
        dataclasses.replace(COSTS, update=on_cores(0.5, 0.0), reduce_s=0.1),
        None,
        decoupled=[9, 9],
        dp_only=[10, 10],
    )
    assert chosen(preset("Ant-v5", "appo"))[0] == "dp_only"
    served = {"dp_only": 1.0, "dp_mp": 2.0, "mp_dp": 3.0}
    measured(COSTS, None)
    name, text = chosen(preset("Ant-v5"), serving=True, measure=lambda spec, template: served[template])
    assert name == "mp_dp"
    assert "mp_dp 3 and 3 steps/s" in text


@pytest.mark.parametrize(
    ("machine", "validation", "why"),
    [
        ("cpu2", None, "not validated on this version"),
        ("cpu16", COARSE, "not validated on 16 cores"),
        ("cpu2", dataclasses.replace(COARSE, cpu="B"), "not validated on A"),
        ("cpu2", dataclasses.replace(COARSE, right=80), "does not rank"),
    ],
)
def test_what_is_not_validated_is_measured_and_not_ranked(measured, machine, validation, why):
    turns = measured(COSTS, validation, dp_only=[10, 10], ea_t=[11, 11], e_at=[9, 9], dp_mp=[8, 8])
    name, text = chosen(preset("Ant-v5"), load_machine(f"tests/data/machines/{machine}.json"))
    assert name == "ea_t"
    assert why in text
    assert len(turns) == 6


def test_where_it_may_not_rank_what_is_slower_by_more_than_its_largest_error_is_not_measured(measured):
    turns = measured(COSTS, dataclasses.replace(GOOD, cpu="B", p90_error=0.0))
    name, text = chosen(preset("Ant-v5"))
    assert (name, turns) == ("dp_only", [])
    assert "Template dp_only is the default. The model is not validated on A" in text


def test_on_gpus_the_default_is_taken_and_nothing_is_measured(measured):
    measured(None, GOOD)
    name, text = chosen(preset("Ant-v5"), load_machine("tests/data/machines/a100_80x8.json"))
    assert name == "dp_only"
    assert "not validated on any GPU" in text


def test_the_reason_says_why_the_first_one_is_taken(measured):
    measured(None, None)
    one_core = dataclasses.replace(CPU2, nodes=(dataclasses.replace(CPU2.nodes[0], cores=(0,)),))
    assert chosen(preset("Ant-v5"), one_core)[1].startswith(
        "Template dp_only is the default. The model is not validated on one core"
    )
    gpus = load_machine("tests/data/machines/a100_80x8.json")
    assert chosen(preset("Ant-v5"), gpus)[1].startswith("Template dp_only is the default. The model is not")
    alone = dataclasses.replace(preset("Ant-v5"), gmi=dataclasses.replace(preset("Ant-v5").gmi, num_gmis=1))
    assert chosen(alone)[1].startswith("Template dp_only is the only template that fits. ")
    assert chosen(preset("Ant-v5", "a3c"))[1].startswith(
        "Template dp_only is the only template of the algorithm. "
    )
    # The default of appo, decoupled, needs two GMIs; and where several others fit, they are not the default either.
    appo = preset("Ant-v5", "appo")
    one = dataclasses.replace(appo, gmi=dataclasses.replace(appo.gmi, num_gmis=1))
    assert chosen(one)[1].startswith("Template dp_only is the only template that fits. ")
    assert template_choice._without_ranking(["e_at", "ea_t"], ["dp_only", "e_at", "ea_t"]) == (
        "e_at is the first that fits, which the default, dp_only, does not"
    )


def test_of_equally_fast_templates_the_model_takes_the_default():
    spec = preset("Ant-v5")
    found = [prediction("dp_only", 100), prediction("ea_t", 104), prediction("e_at", 90)]
    best, text = template_choice.choose(
        found, spec, CPU2, dataclasses.replace(GOOD, cpu=model_validation.cpu_model())
    )
    assert best.layout.template == "dp_only"
    assert text.startswith("dp_only: predicted 100 steps/s, 0.96 of the next. ")


def test_templates_that_do_not_fit_are_left_out():
    spec = preset("Ant-v5")
    alone = dataclasses.replace(spec, gmi=dataclasses.replace(spec.gmi, num_gmis=1))
    assert [plan.template for plan in template_choice.training_plans(alone, CPU2)] == ["dp_only"]
    too_many = dataclasses.replace(spec, gmi=dataclasses.replace(spec.gmi, num_gmis=99))
    with pytest.raises(PlanError, match="num_gmis=99"):
        template_choice.training_plans(too_many, CPU2)


def test_plan_explains_templates_and_forecasts_a_cluster(measured, capsys, monkeypatch):
    measured(COSTS, GOOD)
    monkeypatch.setattr("rayagi.cli.plan.machine_of_run", lambda: CPU2)
    assert main(["plan", "Ant-v5", "--explain", "--nodes", "2", "--gpus-per-node", "8", "--gpu", "H100"]) == 0
    printed = capsys.readouterr().out
    assert "template  GMIs  steps/s" in printed
    assert "a message takes 100 us" in printed
    assert "The model is not validated on any GPU: this is a forecast, and no ranking." in printed
    assert main(["plan", "rayagi/Ant-v0", "--nodes", "2", "--set", "env.engine=mujoco_warp"]) == 2
    assert "its speed there is not known" in capsys.readouterr().err


@pytest.mark.parametrize("auto", [["--set", "gmi.slices=auto"], ["--gmis", "auto"], ["--num-envs", "auto"]])
def test_plan_explains_no_numbers_that_are_auto_and_measures_nothing_for_them(
    measured, capsys, monkeypatch, auto
):
    measured(None, GOOD)
    monkeypatch.setattr("rayagi.cli.plan.machine_of_run", lambda: CPU2)
    assert main(["plan", "Ant-v5", "--explain", *auto]) == 2
    assert "--explain compares templates: give numbers" in capsys.readouterr().err


def auto_spec(**gmi):
    spec = preset("Ant-v5")
    return dataclasses.replace(spec, gmi=dataclasses.replace(spec.gmi, template="auto", **gmi))


def test_a_run_s_template_is_resolved_with_the_reason(measured):
    measured(SLOW_REDUCTIONS, GOOD, dp_only=[1, 1], ea_t=[2, 2], e_at=[3, 3])
    lines = []
    found = resolve_auto(auto_spec(num_learners=1), CPU2, log=lines.append)
    assert found.gmi.template == "e_at"
    assert found.gmi.num_learners == 1
    assert any("Error of the model" in line for line in lines)
    one_gmi = resolve_auto(auto_spec(num_learners=1, num_gmis=1), CPU2)
    assert (one_gmi.gmi.template, one_gmi.gmi.num_learners) == ("dp_only", None)
    assert plan_of(one_gmi, CPU2).template == "dp_only"
    with pytest.raises(PlanError, match="resolve_auto"):
        plan_of(auto_spec(), CPU2)


def test_a_searched_number_and_a_chosen_template_exclude_each_other():
    assert checked(auto_spec()).gmi.template == "auto"
    for gmi in ({"num_envs": "auto"}, {"replan": True}, {"left_out": (0,)}):
        with pytest.raises(ConfigError, match=r"gmi\.template|gmi\.replan|gmi\.left_out"):
            checked(auto_spec(**gmi))


def test_unit_costs_that_a_plan_may_not_measure_are_asked_for(tmp_path):
    with pytest.raises(PlanError, match="Run `rayagi plan Ant-v5 --explain` first"):
        profiling.cached_unit_costs(preset("Ant-v5"), CPU2, log=print, may_measure=False)


def test_the_command_line_takes_auto(measured, capsys, monkeypatch):
    measured(COSTS, dataclasses.replace(GOOD, median_error=0.0))
    monkeypatch.setattr("rayagi.cli.plan.machine_of_run", lambda: CPU2)
    assert main(["plan", "Ant-v5", "--template", "auto"]) == 0
    assert "dp_only on cpu" in capsys.readouterr().out
    assert main(["plan", "Ant-v5", "--set", "gmi.slices=auto"]) == 0
    assert "dp_only on cpu: 2 GMIs" in capsys.readouterr().out
