from __future__ import annotations

import json

import pytest

from rayagi.run import experience_record

STORED = {
    "rows": {"sent": 40, "taken": 32, "dropped": 4, "in_flight": 4, "lost": 0, "missing": 0},
    "lags": {"0": 8, "1": 16, "3": 8},
    "bound": 3,
    "restarts": 2,
}


def test_counts_and_lags_are_reported_as_stored(tmp_path):
    assert experience_record.load(tmp_path) is None
    experience_record.save(tmp_path, STORED)
    kept = experience_record.load(tmp_path)
    assert kept == STORED
    assert experience_record.facts(kept) == [
        ("rollout rows", "40 sent = 32 learned from + 4 too old + 4 in flight + 0 lost with learners"),
        ("policy lag", "1.25 updates on average, 3 at most (bound 3)"),  # (0 x 8 + 1 x 16 + 3 x 8) / 32
        ("GMIs replaced", "2"),
    ]
    lines = experience_record.histogram(kept).splitlines()
    assert [line.split() for line in lines] == [
        ["0", "#" * 20, "25.0", "%"],
        ["1", "#" * 40, "50.0", "%"],
        ["3", "#" * 20, "25.0", "%"],
    ]


def test_rows_that_do_not_add_up_are_reported_as_missing():
    broken = {**STORED, "rows": {**STORED["rows"], "missing": 3}, "lags": {}, "restarts": 0}
    assert experience_record.facts(broken)[0][1].endswith("; 3 are missing")
    assert experience_record.histogram(broken) == ""


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"\xff",
        b"[]",
        b"null",
        b"3",
        b"[" * 100_000,
        json.dumps({**STORED, "rows": 3}).encode(),
        json.dumps({**STORED, "lags": {"few": 8}}).encode(),
    ],
)
def test_a_damaged_file_is_ignored(tmp_path, content):
    (tmp_path / "experience.json").write_bytes(content)
    assert experience_record.load(tmp_path) is None


def test_a_folder_in_its_place_is_ignored(tmp_path):
    (tmp_path / "experience.json").mkdir()
    assert experience_record.load(tmp_path) is None
