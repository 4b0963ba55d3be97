"""Validation of the throughput model: pairs and errors by hand, and where it may rank."""

from __future__ import annotations

import dataclasses
import json

import pytest

from experiments.mapping.summary import Row, validate
from placement.types import Machine, Node
from rayagi.coordinator import model_validation
from rayagi.coordinator.model_validation import (
    ModelValidation,
    load,
    may_compare,
    ranks,
    validation_text,
)


def on(cores: int, nodes: int = 1) -> Machine:
    """A machine with so many cores, on equal nodes."""
    own = tuple(range(cores // nodes))
    return Machine(
        nodes=tuple(Node(name=str(i), cores=own, memory_total_bytes=1) for i in range(nodes)), origin="here"
    )


def case(group: str, predicted: float, measured: float) -> Row:
    return Row(
        group=group, name="", num_gmis=1, steps_per_s=(measured,), predicted=predicted, resident_bytes=0.0
    )


@pytest.fixture(autouse=True)
def _processor(monkeypatch):
    monkeypatch.setattr(model_validation, "cpu_model", lambda: "A")


CASES = [
    case("training", 100, 100),
    case("training", 110, 104),  # 4 % over the first: not compared
    case("training", 90, 120),  # 20 and 15 % over them, and predicted below: two wrong
    case("serving", 10, 10),
    case("serving", 30, 20),  # right
]


def test_pairs_of_a_group_that_differ_by_more_than_5_percent_are_compared():
    found = validate(CASES, date="2026-11-25", cpu="A", cores=2, kinds=["ppo"])
    assert (found.cases, found.pairs, found.right) == (5, 3, 1)
    # Errors 0, 0.058, 0.25, 0, 0.5
    assert found.median_error == pytest.approx(110 / 104 - 1)
    assert found.p90_error == pytest.approx(0.5)
    assert not found.may_rank


NINE = ModelValidation(
    date="d", cpu="A", cores=2, kinds=("ppo",), cases=5, pairs=10, right=9, median_error=0.1, p90_error=0.2
)


def test_nine_of_ten_pairs_are_needed_to_rank():
    assert NINE.may_rank
    assert not dataclasses.replace(NINE, right=8).may_rank
    assert not dataclasses.replace(NINE, pairs=0, right=0).may_rank


def test_it_ranks_where_it_was_validated(monkeypatch):
    assert ranks(NINE, on(2), "ppo", on_gpu=False)
    assert not ranks(NINE, on(2), "sac", on_gpu=False)
    assert not ranks(NINE, on(4), "ppo", on_gpu=False)
    assert not ranks(NINE, on(1), "ppo", on_gpu=False)
    assert not ranks(NINE, on(2), "ppo", on_gpu=True)
    assert not ranks(None, on(2), "ppo", on_gpu=False)
    assert not ranks(NINE, on(2, nodes=2), "ppo", on_gpu=False)
    monkeypatch.setattr(model_validation, "cpu_model", lambda: "B")
    assert not ranks(NINE, on(2), "ppo", on_gpu=False)


def test_candidates_can_be_measured_on_the_cores_of_one_host():
    assert may_compare(on(2), on_gpu=False)
    assert may_compare(on(64), on_gpu=False)
    assert not may_compare(on(1), on_gpu=False)
    assert not may_compare(on(4, nodes=2), on_gpu=False)
    assert not may_compare(on(4), on_gpu=True)


def test_the_error_stands_with_every_forecast(monkeypatch):
    def text(validation, machine, kind="ppo", *, on_gpu=False):
        return validation_text(validation, machine, kind, on_gpu=on_gpu)

    error = (
        "Error of the model: 10% in the median, 20% at most in 9 of 10 of 5 measured layouts; 9 of 10 pairs ordered "
        "right (2 cores of A, d)."
    )
    assert text(NINE, on(2)) == error
    assert "not validated on any GPU" in text(NINE, on(2), on_gpu=True)
    assert "not validated on several hosts" in text(NINE, on(2, nodes=2))
    assert "not validated on 4 cores" in text(NINE, on(4))
    assert "not validated on this version" in text(None, on(2))
    assert "not validated for sac" in text(NINE, on(2), "sac")
    assert text(dataclasses.replace(NINE, right=8), on(2)).endswith("That is too few: it does not rank.")
    monkeypatch.setattr(model_validation, "cpu_model", lambda: "B")
    assert text(NINE, on(2)) == (
        f"The model is not validated on B: this is a forecast, and no ranking. {error}"
    )


def test_the_record_is_read(tmp_path):
    found = validate(CASES, date="2026-11-25", cpu="A", cores=2, kinds=["ppo"])
    (tmp_path / "record.json").write_text(json.dumps(dataclasses.asdict(found)))
    assert load(tmp_path / "record.json") == found
    assert load(tmp_path / "none.json") is None


def test_the_record_of_this_version_can_be_read():
    found = load()
    assert found is None or found.cases >= found.cores > 0
