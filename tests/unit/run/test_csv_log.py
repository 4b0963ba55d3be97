import math
import os
import re

import pytest

from rayagi.run.csv_log import CsvLog, read_rows
from rayagi.run.errors import DiskError, RunFolderError

COLUMNS = ("iteration", "env_steps_total", "train_s", "return")


def row(i, value=1.5):
    return {"iteration": float(i), "env_steps_total": 2400.0 * i, "train_s": 0.5 * i, "return": value}


def test_rows_come_back_as_they_went_in(tmp_path):
    log = CsvLog(tmp_path / "p.csv", COLUMNS)
    log.append([row(1), row(2, value=-0.125)])
    log.append([row(3)])
    log.close()
    assert read_rows(tmp_path / "p.csv") == [row(1), row(2, value=-0.125), row(3)]


def test_missing_and_non_finite_values_are_empty_cells(tmp_path):
    log = CsvLog(tmp_path / "p.csv", COLUMNS)
    log.append([row(1, value=None), row(2, value=math.nan)])
    assert (tmp_path / "p.csv").read_text().splitlines()[1:] == ["1,2400,0.5,", "2,4800,1,"]
    assert [row.get("return", "empty") for row in read_rows(tmp_path / "p.csv")] == ["empty", "empty"]


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
    # Four cells, so only the missing line end shows that 1.2 was 1.25.
    with (tmp_path / "p.csv").open("a") as file:
        file.write("3,7200,1.5,1.2")
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


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("2,48OO,1,3", "line 3, column env_steps_total: '48OO' is not a finite number"),
        ("2,4800,1,nan", "line 3, column return: 'nan' is not a finite number"),
        (",4800,1,3", "line 3, column iteration: '' is not a finite number"),
        ("2,4800,1", "line 3: got 3 cells; expected 4; correct the line, or delete it"),
        ("", "line 3: got 1 cell; expected 4"),
    ],
)
def test_a_bad_cell_is_named_with_file_line_and_column(tmp_path, line, complaint):
    path = tmp_path / "p.csv"
    path.write_text(f"{','.join(COLUMNS)}\n1,2400,0.5,\n{line}\n3,7200,1.5,2\n")
    with pytest.raises(RunFolderError, match=re.escape(f"{path}, {complaint}")):
        read_rows(path)


def test_a_file_that_is_no_table_of_a_run_is_refused(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(RunFolderError, match="line 1: the header has no column iteration, env_steps_total"):
        read_rows(path)
    path.write_bytes(b"iteration\n\xff\xfe\n")
    with pytest.raises(RunFolderError, match="is not text: invalid start byte at byte 10"):
        read_rows(path)
