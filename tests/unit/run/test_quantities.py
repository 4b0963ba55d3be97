import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayagi.run.quantities import (
    QuantityError,
    bytes_text,
    count_text,
    duration_text,
    parse_bytes,
    parse_count,
    parse_duration_s,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("5m", 300),
        ("1h", 3600),
        ("1.5h", 5400),
        ("1h30m", 5400),
        ("45", 45),
        ("2 min", 120),
        ("1d", 86400),
    ],
)
def test_durations_are_read_as_people_write_them(text, seconds):
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-5m", "5x", "m", "5m3", "1e3s", "five", "inf", "nan"])
def test_what_is_no_duration_is_refused_with_examples(text):
    with pytest.raises(QuantityError, match=r"write e\.g\. 90s, 5m"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("500", 500),
        ("500k", 500_000),
        ("2M", 2_000_000),
        ("1.5M", 1_500_000),
        ("1e6", 10**6),
        ("1_000", 1000),
        ("3B", 3 * 10**9),
        ("99999999999999999999", 99_999_999_999_999_999_999),
        ("12345678901234567.891k", 12_345_678_901_234_567_891),
    ],
)
def test_counts_are_read_as_people_write_them(text, count):
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "1.5", "2X", "M", "k5", "nan", "1e-3", "0.0001k", "1.0000001", "9" * 400]
)
def test_what_is_no_count_is_refused_with_examples(text):
    with pytest.raises(QuantityError, match=r"write e\.g\. 500, 500k"):
        parse_count(text)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("440000", 440_000),
        ("0.44MB", 440_000),
        ("1.16 mb", 1_160_000),
        ("1MiB", 2**20),
        ("4KiB", 4096),
        ("64B", 64),
    ],
)
def test_bytes_are_read_as_people_write_them(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "0.5", "1TB", "MB", "1i", "1ib", "nan", "9" * 400])
def test_what_is_no_number_of_bytes_is_refused_with_examples(text):
    with pytest.raises(QuantityError, match=r"write e\.g\. 440000, 0\.44MB"):
        parse_bytes(text)


@given(st.integers(1, 10**12))
def test_plain_whole_numbers_are_themselves(number):
    assert parse_count(str(number)) == number


def test_quantities_are_written_as_people_read_them():
    assert [duration_text(s) for s in (0.25, 45, 300, 330, 7500)] == [
        "0.25 s",
        "45 s",
        "5 min",
        "5 min 30 s",
        "2 h 05 min",
    ]
    assert [count_text(n) for n in (850, 12_500, 2_000_000, 1.5e9)] == ["850", "12.5k", "2M", "1.5B"]
    assert [bytes_text(n) for n in (12, 2**20 * 512, 2**30 * 1.5)] == ["12 B", "512 MiB", "1.50 GiB"]
