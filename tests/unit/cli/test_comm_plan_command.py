import json

import pytest

from collectives.profile import CostProfile, ProfilePoint, StepShape
from rayagi.cli import main


def run_cli(*arguments):
    """The exit code; argparse leaves by SystemExit."""
    try:
        return main(["comm", *arguments])
    except SystemExit as left:
        return left.code


def planned(capsys, *arguments):
    assert run_cli("plan", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_it_explains_the_choice_and_shows_the_steps(capsys):
    assert run_cli("plan", "--layout", "4x3") == 0
    output = capsys.readouterr().out
    assert "4x3, 440000 bytes; costs in ms" in output
    assert "nothing was measured" in output
    chosen = next(line for line in output.splitlines() if line.startswith("chosen: "))
    name = chosen.removeprefix("chosen: ").split(".")[0]
    assert f"{name} on 4x3\n  0  " in output


@pytest.mark.parametrize(
    ("arguments", "nbytes"),
    [
        ((), 440_000),
        (("--size", "6MB"), 6_000_000),
        (("--params", "290k"), 1_160_000),
        # CartPole: 4 observations, 2 actions, two networks of 64 x 64: 4*64+64 + 64*64+64 = 4480 each, then 64*2+2 and
        # 64+1: 9155 parameters, padded to 18 rows of 512.
        (("--task", "CartPole-v1"), 4 * 18 * 512),
    ],
)
def test_the_size_is_given_in_bytes_parameters_or_as_a_task(arguments, nbytes, capsys):
    assert planned(capsys, "--layout", "2x2", *arguments)["nbytes"] == nbytes


def test_json_has_the_steps_to_carry_out(capsys):
    plan = planned(capsys, "--layout", "2x1x1")
    assert plan["steps"] == [{"op": "all_reduce", "primitive": "net", "groups": [[0, 1]]}]


def test_a_measured_profile_replaces_the_nominal_rates(capsys, tmp_path):
    points = tuple(
        ProfilePoint(StepShape("ip", "all_reduce", 4, 1), nbytes, 1e-9 * nbytes)
        for nbytes in (1_000, 1_000_000)
    )
    CostProfile(machine="a bench", points=points).save(tmp_path / "p.json")
    plan = planned(capsys, "--layout", "2x2", "--profile", str(tmp_path / "p.json"), "--size", "1kB")
    assert [candidate["composition"] for candidate in plan["candidates"]] == ["ip_only"]
    assert plan["candidates"][0]["alpha_beta_s"] == pytest.approx(1e-6)
    assert plan["origin"].startswith("measured on a bench")
    assert plan["rejected"]["rp_only"] == "it needs rp, which is not available"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "COMMAND"),
        (("plan",), "--layout"),
        (("plan", "--layout", "4y3"), "layout '4y3': '4y3' is not a number of GMIs; write 4x3"),
        (("plan", "--layout", "9999x9999"), "more than 1024 GMIs"),
        (
            ("plan", "--layout", "2x2", "--size", "0"),
            "argument --size: '0' is not a positive number of bytes",
        ),
        (("plan", "--layout", "2x2", "--size", "1MB", "--params", "3"), "not allowed with"),
        (("plan", "--layout", "2x2", "--task", "Antt-v5"), "did you mean Ant-v5"),
        (("plan", "--layout", "2x2", "--profile", "none.json"), "profile none.json: No such file"),
    ],
)
def test_bad_input_gets_one_message_and_exit_code_2(arguments, said, capsys):
    assert run_cli(*arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
