"""The ablation: which cases apply, what is compared with what, and that each mechanism is off."""

from dataclasses import replace

import pytest

from actors.gmi import GmiContext
from experiments.ablation.mechanisms import CASES
from experiments.ablation.run import Setting, joined, parsed, ratios, table
from experiments.ablation.turns import NotOffError, Turns

ANT, CHEETAH = Setting("Ant-v5", "2x1", raw=False), Setting("HalfCheetah-v5", "1x2", raw=True)
ALONE = ("compiler", "torch.compile")


def rows(setting, *rounds):
    return [
        {"task": setting.task, "layout": setting.layout, "raw": setting.raw, "round": number, "off": off}
        | {"steps_per_s": speed, "other_cores": 0.1}
        for number, speeds in enumerate(rounds)
        for off, speed in speeds.items()
    ]


def test_mechanisms_are_measured_where_they_apply():
    assert "whole rollouts" in ANT.cases()
    assert "thread pool" not in ANT.cases()
    assert "whole rollouts" not in CHEETAH.cases()
    assert "thread pool" in CHEETAH.cases()
    assert {*ANT.cases("torch.compile"), *CHEETAH.cases(), *ANT.cases()} == set(CASES)


def test_one_mechanism_is_measured_with_its_baseline():
    assert ANT.cases("compiled acting") == ("on", "whole rollouts", "compiled acting")
    assert CHEETAH.cases("compiled acting") == ("on", "compiled acting")


def test_a_ratio_compares_turns_of_one_round():
    measured = rows(
        ANT,
        {"on": 300.0, "compiled gradient": 200.0, "whole rollouts": 150.0, "compiled acting": 100.0},
        {"on": 200.0, "compiled gradient": 250.0, "whole rollouts": 100.0, "compiled acting": 50.0},
    )
    assert ratios(measured) == {
        "compiled gradient": {ANT: [1.5, 0.8]},
        "whole rollouts": {ANT: [2.0, 2.0]},
        "compiled acting": {ANT: [1.5, 2.0]},
    }


def test_turns_beside_other_processes_do_not_count():
    measured = rows(ANT, {"on": 300.0, "one call": 200.0}, {"on": 300.0, "one call": 100.0})
    measured[-1]["other_cores"] = 0.9
    assert ratios(measured) == {"one call": {ANT: [1.5]}}


def test_rounds_of_several_results_are_not_mixed():
    first, second = rows(ANT, {"on": 300.0}), rows(ANT, {"one call": 100.0})
    assert ratios(joined([first, second])) == {}


def test_table():
    measured = rows(ANT, {"on": 300.0, "one call": 200.0}) + rows(CHEETAH, {"on": 110.0, "one call": 100.0})
    assert table(measured).splitlines() == [
        "| off | Ant 2x1 norm | HalfCheetah 1x2 raw |",
        "|---|---|---|",
        "| one call | 1.50 (1.50-1.50) | 1.10 (1.10-1.10) |",
        "",
        "| off | settings | median of their medians | smallest | largest |",
        "|---|---|---|---|---|",
        "| one call | 2 | 1.300 | 1.10 (HalfCheetah 1x2 raw) | 1.50 (Ant 2x1 norm) |",
    ]


def test_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        parsed(["--help"])
    assert "one mechanism off" in capsys.readouterr().out


@pytest.fixture
def context():
    return GmiContext.local("Ant-v5")


def small(setting):
    spec = setting.spec()
    return replace(
        spec,
        gmi=replace(spec.gmi, num_envs=4),
        learning=replace(spec.learning, rollout_length=8, num_minibatches=2, num_epochs=1),
    )


def test_every_case_takes_the_same_first_step(context):
    """With one mechanism off, the same gradient is computed in another way."""
    cases = tuple(name for name in CASES if name not in ALONE)
    turns = Turns(context, small(replace(ANT, layout="1x1")), cases)
    norms = [turns.gmi_run(case, 1)["first_grad_norm"] for case in cases]
    turns.close()
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-3)


def test_a_mechanism_that_is_on_is_noticed(context):
    with pytest.raises(NotOffError, match="compiler"):
        Turns(context, small(replace(CHEETAH, raw=False)), ("compiler",))
