"""Which stored calibration is used for a profile, and which is refused."""

import json
from dataclasses import replace

import pytest

from rayagi.profiler.calibration import Calibration
from rayagi.profiler.calibration_store import (
    Recorded,
    StoredCalibration,
    choose,
    find,
    load,
    recorded_in,
    refusal,
    save,
)
from rayagi.profiler.calibration_text import age, calibration_line, correction_text
from rayagi.profiler.errors import ProfilerError
from rayagi.profiler.overlap import Breakdown
from rayagi.profiler.program import program_of, script_of
from tests.unit.profiler.traces import process, profile

MACHINE = {"cpu": "Xeon", "cores": 2}
COSTS = Calibration({"call": 240.5}, {"cudaMalloc": 3.0}, 0.02, {"call": 12.0})
COMMAND = ("python", "train.py", "--steps", "100")
ONE = StoredCalibration(COSTS, COMMAND, 3, {"call": 10}, "3.11.7", MACHINE, 1000.0)
PROFILE = Recorded(COMMAND, MACHINE, frozenset({"3.11.7"}))


def test_what_is_saved_is_read_again(tmp_path):
    path = save(ONE, tmp_path / "new")
    assert load(path) == ONE
    assert save(replace(ONE, unix_s=2000.0), tmp_path / "new") == path  # the same key: in its place
    assert load(path).unix_s == 2000.0
    assert [each.name for each in (tmp_path / "new").iterdir()] == [f"{ONE.key}.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"command": ("python", "train.py")},
        {"python": "3.12.1"},
        {"machine": {"cpu": "Xeon", "cores": 4}},
        {"script": "/a/train.py"},
    ],
)
def test_each_machine_python_and_command_has_a_key_of_its_own(change):
    assert replace(ONE, **change).key != ONE.key
    assert replace(ONE, unix_s=5.0, rounds=9).key == ONE.key


def test_the_one_with_most_arguments_in_common_is_used_then_the_newest(tmp_path):
    other_steps = replace(ONE, command=("python3.11", "lib/train.py", "--steps", "200"), unix_s=3000.0)
    other_task = replace(ONE, command=("python", "train.py", "--task", "x"), unix_s=4000.0)
    other_program = replace(ONE, command=("python", "play.py", "--steps", "100"), unix_s=5000.0)
    for each in (other_task, other_program):
        save(each, tmp_path)
    assert find(PROFILE, tmp_path) == (other_task, "")
    save(other_steps, tmp_path)
    assert find(PROFILE, tmp_path) == (other_steps, "")
    save(ONE, tmp_path)
    assert find(PROFILE, tmp_path) == (ONE, "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"machine": {"cpu": "Xeon", "cores": 8}},
            "is of another machine (8-core Xeon) than the profile (2-core Xeon)",
        ),
        ({"python": "3.12.1"}, "is of another Python (3.12.1) than the profile (3.11.7)"),
    ],
)
def test_one_of_another_machine_or_python_is_refused_in_one_sentence(change, reason, tmp_path):
    path = save(replace(ONE, **change), tmp_path)
    found, said = choose(PROFILE, None, tmp_path)
    assert found is None
    assert reason in said
    assert said.endswith("Run: rayagi profile calibrate -- python train.py --steps 100")
    with pytest.raises(ProfilerError) as refused:
        choose(PROFILE, path, tmp_path / "empty")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_without_any_the_command_to_run_is_named(tmp_path):
    found, reason = choose(PROFILE, None, tmp_path / "none")
    assert found is None
    assert "no calibration of train is stored. Run: rayagi profile calibrate -- python train.py" in reason
    assert choose(PROFILE, save(ONE, tmp_path), tmp_path) == (ONE, "")


def test_one_of_another_file_of_the_same_name_is_not_used_unless_it_is_named(tmp_path):
    other = replace(ONE, script="/a/train.py", unix_s=9000.0)
    path = save(other, tmp_path)
    recorded = replace(PROFILE, script="/b/train.py")
    found, said = choose(recorded, None, tmp_path)
    assert found is None
    assert "is of another file (/a/train.py). Run: rayagi profile calibrate -- python train.py" in said
    assert choose(recorded, path, tmp_path) == (other, "")
    found = Breakdown((), (), (), {"": {frozenset({"python"}): 1_000_000}}, {})
    text = correction_text(found, other, recorded)
    assert text.endswith(
        "But the calibration of `python train.py --steps 100` is of another file (/a/train.py)."
    )
    # Of those of an earlier version the file is not known.
    save(ONE, tmp_path)
    assert find(recorded, tmp_path) == (ONE, "")
    assert find(PROFILE, tmp_path) == (other, "")


def test_calibrations_of_an_earlier_version_are_read(tmp_path):
    path = save(ONE, tmp_path)
    content = json.loads(path.read_text())
    del content["script"]
    path.write_text(json.dumps(content))
    assert load(path) == ONE


def test_events_of_a_kind_that_was_not_measured_are_said_where_they_matter():
    """200 annotations of 5 us at most are 1 ms, which is 0.1 % of 1 s."""
    whole = {"": {frozenset({"python"}): 1_000_000_000}}
    for count, begin in (
        (199, "Without the profiler's own time: 0 ns (0.0 %) removed. Calibration of"),
        (
            200,
            "Times include a part of the profiler's own: 0 ns (0.0 %) removed, but not measured: annotation, 200 events.",
        ),
    ):
        found = Breakdown((), (), (), whole, {}, uncorrected={"annotation": count})
        assert correction_text(found, ONE).startswith(begin)


@pytest.mark.parametrize("option", [("--profile", "3", "--name", "ant"), ("--name=ant", "--profile=3")])
def test_a_training_run_is_not_calibrated_with_a_profile_or_a_name_of_its_own(option, tmp_path):
    command = ("python", "bin/rayagi", "train", "Ant-v5", *option, "--seed", "1")
    assert choose(replace(PROFILE, command=command), None, tmp_path)[1].endswith(
        "calibrate -- python bin/rayagi train Ant-v5 --seed 1"
    )


def test_profiles_that_do_not_say_their_machine_get_none():
    """They were recorded by a version that did not write it."""
    old = profile(process([[]], python="3.11.7"))
    assert "(2-core Xeon) than the profile (unknown)" in refusal(ONE, recorded_in(old))
    assert refusal(ONE, recorded_in(replace(old, machine=MACHINE))) == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no calibration of rayagi's profiler, or it is damaged"),
        ("[]", "is no calibration"),
        ('{"version": 7}', "is of version 7; this rayagi reads 1"),
        ('{"version": 1}', "is no calibration"),
    ],
)
def test_damaged_files_are_refused_and_passed_over(content, message, tmp_path):
    save(ONE, tmp_path)
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ProfilerError, match=message):
        load(tmp_path / "bad.json")
    assert find(PROFILE, tmp_path) == (ONE, "")
    with pytest.raises(ProfilerError, match=r"none\.json cannot be read"):
        load(tmp_path / "none.json")


@pytest.mark.parametrize("cost", [-1.0, float("nan"), 1e13, "much"])
def test_impossible_costs_are_refused(cost, tmp_path):
    path = save(ONE, tmp_path)
    content = json.loads(path.read_text())
    content["calibration"]["hooks"]["call"] = cost
    path.write_text(json.dumps(content))
    with pytest.raises(ProfilerError, match="is no calibration of rayagi's profiler, or it is damaged"):
        load(path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfilerError, match=r"file.*\.json cannot be written: .*; set XDG_CACHE_HOME"):
        save(ONE, tmp_path / "file")


@pytest.mark.parametrize(
    ("command", "name", "arguments"),
    [
        (["python", "a/train.py", "--x"], "train", ["--x"]),
        (["/usr/bin/python3.11", "-u", "-X", "dev", "train.py", "-m"], "train", ["-m"]),
        (["python", "-m", "rayagi", "train", "Ant-v5"], "rayagi", ["train", "Ant-v5"]),
        (["/venv/bin/python", "/venv/bin/rayagi", "train"], "rayagi", ["train"]),
        (["rayagi", "train"], "rayagi", ["train"]),
        (["./train.py"], "train", []),
        (["python", "-c", "print(1)", "2"], "-c print(1)", ["2"]),
        (["python"], "python", []),
        ([], "", []),
    ],
)
def test_a_program_is_known_however_it_is_started(command, name, arguments):
    assert program_of(command) == (name, arguments)


def test_a_script_is_known_by_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "tasks/walk.py", "tasks/__main__.py", "tool"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    for command, path in (
        (["python", "-u", "train.py", "x.py"], "train.py"),
        ([str(tmp_path / "train.py")], "train.py"),
        (["python", "-m", "tasks.walk"], "tasks/walk.py"),
        (["python", "-m", "tasks"], "tasks/__main__.py"),
    ):
        assert script_of(command) == str(tmp_path / path)
    for command in (
        ["python", "tool"],
        ["python", "-m", "json.tool"],
        ["python", "none.py"],
        ["python", "-c", "train.py"],
    ):
        assert script_of(command) == ""
    assert script_of([]) == script_of(["python"]) == ""


def test_the_note_says_which_how_old_and_what(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1000.0 + 2 * 3600 + 59)
    assert calibration_line(ONE) == (
        "Calibration of 1970-01-01 00:16 UTC (2 hours old), of `python train.py --steps 100`: "
        "call 240.5 ns \N{PLUS-MINUS SIGN} 12 ns."
    )
    assert [age(each) for each in (-5, 59, 60, 7200, 86400)] == [
        *2 * ["less than a minute"],
        *("1 minute", "2 hours", "1 day"),
    ]
