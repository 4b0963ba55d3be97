import math
import os

import pytest

from rayagi.run.csv_log import CsvLog, read_rows
from rayagi.run.errors import DiskError

COLUMNS = ("iteration", "return", "speed")


def row(i, value=1.5):
    return {"iteration": float(i), "return": value, "speed": 2400.0}


def test_rows_come_back_as_they_went_in(tmp_path):
    log = CsvLog(tmp_path / "p.csv", COLUMNS)
    log.append([row(1), row(2, value=-0.125)])
    log.append([row(3)])
    log.close()
    assert read_rows(tmp_path / "p.csv") == [row(1), row(2, value=-0.125), row(3)]


def test_missing_and_non_finite_values_are_empty_cells(tmp_path):
    log = CsvLog(tmp_path / "p.csv", COLUMNS)
    log.append([{"iteration": 1, "return": None, "speed": math.nan}])
    assert (tmp_path / "p.csv").read_text() == "iteration,return,speed\n1,,\n"
    assert read_rows(tmp_path / "p.csv") == [{"iteration": 1.0}]


def test_a_resume_cuts_the_rows_after_the_restored_iteration(tmp_path):
    log = CsvLog(tmp_path / "p.csv", COLUMNS)
    log.append([row(i) for i in range(1, 11)])
    log.close()
    again = CsvLog(tmp_path / "p.csv", COLUMNS, keep_through=6)
    again.append([row(i, value=7.0) for i in range(7, 9)])
    rows = read_rows(tmp_path / "p.csv")
    assert [r["iteration"] for r in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [r["return"] for r in rows[5:]] == [1.5, 7.0, 7.0]


def test_a_line_that_a_crash_cut_short_is_dropped(tmp_path):
    log = CsvLog(tmp_path / "p.csv", COLUMNS)
    log.append([row(1), row(2)])
    log.close()
    # Three cells, so only the missing line end shows that 240 was 2400.
    with (tmp_path / "p.csv").open("a") as file:
        file.write("3,1.5,240")
    assert [r["iteration"] for r in read_rows(tmp_path / "p.csv")] == [1, 2]
    again = CsvLog(tmp_path / "p.csv", COLUMNS, keep_through=100)
    again.append([row(3)])
    assert [r["iteration"] for r in read_rows(tmp_path / "p.csv")] == [1, 2, 3]


def test_a_resume_may_add_columns(tmp_path):
    log = CsvLog(tmp_path / "p.csv", COLUMNS)
    log.append([row(1)])
    log.close()
    CsvLog(tmp_path / "p.csv", (*COLUMNS, "new"), keep_through=1).append([{**row(2), "new": 5.0}])
    assert read_rows(tmp_path / "p.csv") == [row(1), {**row(2), "new": 5.0}]


def test_a_full_disk_names_the_file(tmp_path):
    log = CsvLog(tmp_path / "p.csv", COLUMNS)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._descriptor)
    os.close(full)
    with pytest.raises(DiskError, match=r"cannot write .*p\.csv: No space left on device"):
        log.append([row(1)])
