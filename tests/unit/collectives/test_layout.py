import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.errors import LayoutError
from collectives.layout import MAX_RANKS, Layout

counts = st.lists(st.lists(st.integers(1, 10), min_size=1, max_size=8), min_size=1, max_size=4)


def test_four_devices_of_three():
    layout = Layout.parse("4x3")
    assert layout.nodes == (((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)),)
    assert (layout.n, layout.m, layout.world_size) == (4, 3, 12)
    assert layout.mpl == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_two_nodes_of_two_devices_of_one():
    layout = Layout.parse("2x2x1")
    assert layout.nodes == (((0,), (1,)), ((2,), (3,)))
    assert layout.hosts == ((0, 1), (2, 3))
    assert layout.places() == {0: (0, 0), 1: (0, 1), 2: (1, 2), 3: (1, 3)}


@pytest.mark.parametrize(
    ("text", "nodes", "n", "m"),
    [
        ("3+2", (((0, 1, 2), (3, 4)),), 2, None),
        ("3+2|4", (((0, 1, 2), (3, 4)), ((5, 6, 7, 8),)), 3, None),
        ("2x2|1+3", (((0, 1), (2, 3)), ((4,), (5, 6, 7))), 4, None),
        (" 2 + 2 ", (((0, 1), (2, 3)),), 2, 2),
        ("4", (((0, 1, 2, 3),),), 1, 4),
    ],
)
def test_unequal_devices_and_nodes(text, nodes, n, m):
    layout = Layout.parse(text)
    assert (layout.nodes, layout.n, layout.m) == (nodes, n, m)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [("3+3", "2x3"), ("2|2", "2x1x2"), ("1", "1x1"), ("4|3+2", "4|3+2"), ("2x3+1", "3+3+1")],
)
def test_text_is_canonical(text, canonical):
    assert str(Layout.parse(text)) == canonical


@given(counts)
def test_text_reads_back(nodes):
    layout = Layout.from_counts(nodes)
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    "text", ["", "4x", "x3", "4y3", "0x3", "3+0", "3|", "-1x2", "1x2x3x4", "2.5", "²x3", "4x3x"]
)
def test_a_layout_that_says_nothing_is_refused(text):
    with pytest.raises(LayoutError, match="layout '"):
        Layout.parse(text)


@pytest.mark.parametrize("text", ["99999x99999", "4000x4000x4000", "1025", "32x33"])
def test_a_layout_beyond_all_machines_is_refused_at_once(text):
    with pytest.raises(LayoutError, match=str(MAX_RANKS)):
        Layout.parse(text)


def test_members_are_numbered_as_they_came():
    layout = Layout.from_placement([("a", "G1"), ("b", "G1"), ("a", "G0"), ("a", "G1"), ("b", None)])
    assert layout.nodes == (((0, 3), (2,)), ((1,), (4,)))  # the same name on two nodes is two devices
    assert str(layout) == "2+1|2x1 with ranks [[0, 3], [2], [1], [4]]"


def test_members_without_gpus_share_their_node():
    assert Layout.from_placement([("a", None)] * 3) == Layout.parse("1x3")


@pytest.mark.parametrize("nodes", [(), ((),), (((0,), ()),), (((0, 0),),), (((1, 2),),)])
def test_ranks_are_all_there_and_once(nodes):
    with pytest.raises(LayoutError):
        Layout(nodes)
