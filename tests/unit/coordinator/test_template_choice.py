"""The choice of a template: the fastest where the model is validated, the default with the reason elsewhere."""

from __future__ import annotations

import dataclasses

import pytest

from placement.errors import PlanError
from placement.inventory import load_machine
from rayagi.cli.main import main
from rayagi.config.errors import ConfigError
from rayagi.config.presets import preset
from rayagi.config.rules import checked
from rayagi.coordinator import model_validation, profiling, template_choice
from rayagi.coordinator.auto import resolve_auto
from rayagi.coordinator.model_validation import Validation
from rayagi.coordinator.throughput_model import RoleCost, UnitCosts
from rayagi.planning import plan_of

CPU2 = load_machine("tests/data/machines/cpu2.json")
GOOD = Validation(
    date="2026-11-25", cpu="A", cores=2, cases=20, pairs=100, right=95, median_error=0.06, p90_error=0.15
)


def on_cores(fixed_s: float, per_env_s: float) -> RoleCost:
    """Divided by cores: on two cores half of ``per_env_s``."""
    return RoleCost(
        device="cores", fixed_s=fixed_s, per_env_s=per_env_s,
        wide_fixed_s=fixed_s, wide_per_env_s=per_env_s / 2, wide_cores=2,
    )  # fmt: skip


COSTS = UnitCosts(
    rollout=on_cores(0.0, 1e-4), simulate=on_cores(0.0, 1e-4), act=on_cores(1e-4, 0.0), update=on_cores(0.1, 1e-4),
    complete=on_cores(0.0, 0.0),
    message_s=1e-4, bandwidth=1e9, reduce_s=1e-4, step_spread=0.1,
    state_bytes=100.0, action_bytes=20.0, reward_bytes=6.0, model_bytes=1e6, gmi_bytes=1e9, env_bytes=1e6,
    num_steps=32, num_updates=16, num_envs=(32, 128),
)  # fmt: skip


@pytest.fixture
def measured(monkeypatch):
    """Sets the unit costs, and the validation, of this machine."""

    def set_both(costs, validation):
        def cached(spec, machine, **options):
            assert costs is not None, "nothing is to be measured here"
            return costs

        monkeypatch.setattr(profiling, "cached_unit_costs", cached)
        monkeypatch.setattr(template_choice, "load", lambda: validation)
        monkeypatch.setattr(model_validation, "load", lambda: validation)

    return set_both


def chosen(spec, machine=CPU2, **options):
    lines = []
    return template_choice.chosen(spec, machine, log=lines.append, **options), lines


def test_the_fastest_template_is_chosen_with_reason_and_error(measured):
    measured(COSTS, GOOD)
    name, (text,) = chosen(preset("Ant-v5"))
    assert name == "dp_only"
    assert "Template dp_only: predicted" in text
    assert "Error of the model: 6% in the median" in text
    # Reductions between two GMIs of a second each: one trainer of both collectors is faster.
    measured(dataclasses.replace(COSTS, reduce_s=1.0), GOOD)
    name, _ = chosen(preset("Ant-v5"))
    assert name in ("ea_t", "e_at")


def test_serving_and_asynchronous_algorithms_choose_among_their_own(measured):
    # Acting costs 100 times a step of physics, whatever the batch: one agent for both simulators saves half of it.
    measured(dataclasses.replace(COSTS, act=on_cores(0.1, 0.0)), GOOD)
    assert chosen(preset("Ant-v5"), serving=True)[0] == "dp_only"  # agents on two cores act at the same time
    measured(dataclasses.replace(COSTS, update=on_cores(0.5, 0.0), reduce_s=0.1), GOOD)
    assert chosen(preset("Ant-v5", "appo"))[0] in ("decoupled", "dp_only")


@pytest.mark.parametrize(
    ("machine", "validation", "why"),
    [
        ("cpu2", None, "not validated on this version"),
        ("cpu16", GOOD, "not validated on 16 cores"),
        ("a100_80x8", GOOD, "not validated on any GPU"),
        ("cpu2", dataclasses.replace(GOOD, right=80), "does not rank"),
    ],
)
def test_what_is_not_validated_is_not_ranked_nor_measured(measured, machine, validation, why):
    measured(None, validation)
    name, (text,) = chosen(preset("Ant-v5"), load_machine(f"tests/data/machines/{machine}.json"))
    assert name == "dp_only"
    assert why in text


def test_the_reason_says_why_the_first_one_is_taken(measured):
    measured(None, None)
    assert chosen(preset("Ant-v5"))[1][0].startswith("Template dp_only is the default. The model is not")
    alone = dataclasses.replace(preset("Ant-v5"), gmi=dataclasses.replace(preset("Ant-v5").gmi, num_gmis=1))
    assert chosen(alone)[1][0].startswith("Template dp_only is the only template that fits. ")
    assert chosen(preset("Ant-v5", "a3c"))[1][0].startswith(
        "Template dp_only is the only template of the algorithm. "
    )
    # The default of appo, decoupled, needs two GMIs; and where several others fit, they are not the default either.
    appo = preset("Ant-v5", "appo")
    one = dataclasses.replace(appo, gmi=dataclasses.replace(appo.gmi, num_gmis=1))
    assert chosen(one)[1][0].startswith("Template dp_only is the only template that fits. ")
    assert template_choice._without_ranking(["e_at", "ea_t"], ["dp_only", "e_at", "ea_t"]) == (
        "e_at is the first that fits, which the default, dp_only, does not"
    )


def test_of_equally_fast_templates_the_default_is_taken(measured):
    same = dataclasses.replace(
        COSTS, step_spread=0.0, message_s=1e-9, bandwidth=1e15, act=on_cores(1e-9, 0.0)
    )
    measured(same, GOOD)
    assert chosen(preset("Ant-v5"), serving=True)[0] == "dp_only"


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


def auto_spec(**gmi):
    spec = preset("Ant-v5")
    return dataclasses.replace(spec, gmi=dataclasses.replace(spec.gmi, template="auto", **gmi))


def test_a_run_s_template_is_resolved_with_the_reason(measured):
    measured(dataclasses.replace(COSTS, reduce_s=1.0), GOOD)
    lines = []
    found = resolve_auto(auto_spec(num_learners=1), CPU2, log=lines.append)
    assert found.gmi.template in ("ea_t", "e_at")
    assert found.gmi.num_learners == 1
    assert "Error of the model" in lines[0]
    measured(None, None)
    default = resolve_auto(auto_spec(num_learners=1), CPU2)
    assert (default.gmi.template, default.gmi.num_learners) == ("dp_only", None)
    assert plan_of(default, CPU2).template == "dp_only"
    with pytest.raises(PlanError, match="resolve_auto"):
        plan_of(auto_spec(), CPU2)


def test_a_searched_number_and_a_chosen_template_exclude_each_other():
    assert checked(auto_spec()).gmi.template == "auto"
    for gmi in ({"num_envs": "auto"}, {"replan": True}, {"left_out": (0,)}):
        with pytest.raises(ConfigError, match=r"gmi\.template|gmi\.replan|gmi\.left_out"):
            checked(auto_spec(**gmi))


def test_unit_costs_that_a_plan_may_not_measure_are_asked_for(tmp_path):
    with pytest.raises(PlanError, match="Run `rayagi plan Ant-v5 --explain` first"):
        profiling.cached_unit_costs(preset("Ant-v5"), CPU2, log=print, may_measure=False, folder=tmp_path)


def test_the_command_line_takes_auto(measured, capsys, monkeypatch):
    measured(COSTS, GOOD)
    monkeypatch.setattr("rayagi.cli.plan.machine_of_run", lambda: CPU2)
    assert main(["plan", "Ant-v5", "--template", "auto"]) == 0
    assert "dp_only on cpu" in capsys.readouterr().out
    assert main(["plan", "Ant-v5", "--set", "gmi.slices=auto"]) == 0
    assert "dp_only on cpu: 2 GMIs" in capsys.readouterr().out
