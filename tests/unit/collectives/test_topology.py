import pytest

from collectives.topology import Topology


def test_gmis_of_one_device_have_neighbouring_ranks():
    layout = Topology.regular(num_nodes=2, devices_per_node=2, gmis_per_device=3)
    assert layout.world_size == 12
    assert layout.ranks_on_device(0, 0) == (0, 1, 2)
    assert layout.ranks_on_device(0, 1) == (3, 4, 5)
    assert layout.ranks_on_device(1, 1) == (9, 10, 11)
    assert layout.ranks_on_node(1) == (6, 7, 8, 9, 10, 11)


def test_every_rank_is_on_exactly_one_device():
    layout = Topology.regular(num_nodes=3, devices_per_node=4, gmis_per_device=2)
    found = [
        rank for node in range(3) for device in range(4) for rank in layout.ranks_on_device(node, device)
    ]
    assert found == list(range(24))


def test_uneven_layouts_are_allowed():
    layout = Topology(nodes=(0, 0, 1), devices=(0, 1, 0))
    assert layout.ranks_on_node(0) == (0, 1)
    assert layout.ranks_on_device(1, 0) == (2,)
    assert layout.ranks_on_node(7) == ()


def test_a_count_below_one_is_named():
    with pytest.raises(ValueError, match="gmis_per_device=0"):
        Topology.regular(num_nodes=1, devices_per_node=1, gmis_per_device=0)


def test_every_rank_needs_a_node_and_a_device():
    with pytest.raises(ValueError, match="2 ranks have a node and 1 a device"):
        Topology(nodes=(0, 0), devices=(0,))
