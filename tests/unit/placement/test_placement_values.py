from __future__ import annotations

import pickle

import pytest

from placement.errors import (
    InventoryError,
    PlacementError,
    PlanError,
    ReservationError,
    SliceError,
    counted,
)
from placement.types import Machine, Node, Slice, core_ranges


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (InventoryError("file", "is bad", "Rewrite it"), "file: is bad. Rewrite it."),
        (PlanError("num_gmis=9", "there are 2 cores", "Set 2"), "num_gmis=9: there are 2 cores. Set 2."),
        (
            ReservationError("2 x {1 CPU}", "box: 1 CPU", "1 would fit", 2.04),
            "Asked: 2 x {1 CPU}. There is: box: 1 CPU. Waited 2.0 s. 1 would fit.",
        ),
        (SliceError("core 7", "cores 0-1", "Plan again"), "Wanted core 7; there is cores 0-1. Plan again."),
    ],
)
def test_errors_keep_their_fields_and_text_through_pickling(error: PlacementError, text: str):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error) == text


@pytest.mark.parametrize(
    ("cores", "text"), [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((7, 0, 2, 1, 5), "0-2,5,7")]
)
def test_runs_of_cores_are_joined(cores, text):
    assert core_ranges(cores) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "no cores"), (1, "1 core"), (2, "2 cores"), (3000, "3,000 cores")]
)
def test_counts_read_as_english(number, text):
    assert counted(number, "core") == text


def test_labels_name_backend_and_share():
    assert Slice(node="n", backend="cpu", cores=(2, 3)).label() == "cpu[2-3]"
    gpu = Slice(node="n", backend="direct", gpu_uuid="GPU-12ab34cd-5678", gpu_fraction=0.5)
    assert gpu.label() == "direct[GPU-12ab34cd x0.50]"


def test_a_node_is_found_by_name():
    node = Node(name="b", cores=(0,), memory_total_bytes=1)
    machine = Machine(nodes=(Node(name="a", cores=(0,), memory_total_bytes=1), node), origin="test")
    assert machine.node("b") is node
    with pytest.raises(KeyError):
        machine.node("c")
