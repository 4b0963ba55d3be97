"""``rayagi comm bench --ray``: members between two Ray nodes, simulated as two raylets on this host."""

import json

import pytest

from rayagi.cli import main
from tests.cluster.two_nodes import two_nodes

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def address():
    with two_nodes() as (cluster, _):
        yield cluster.address


def bench(address, folder, layout):
    arguments = ["comm", "bench", "--ray", address, "--layouts", layout, "--sizes", "4kB", "--time", "1s"]
    return main([*arguments, "--repeats", "2", "--out", str(folder)])


@pytest.mark.slow
def test_two_nodes_of_a_layout_are_two_of_the_cluster_and_reduce_by_net(address, tmp_path):
    assert bench(address, tmp_path, "2x1x2") == 0
    content = json.loads((tmp_path / "results.json").read_text())
    (row,) = (row for row in content["rows"] if row["composition"] == "ip_only")
    assert row["steps"] == 3  # inside each host, across, and back
    assert row["model_s"] > 0
    assert "net by TcpTransport" in content["layouts"][0]["transports"]["ip_only"]


@pytest.mark.slow
def test_too_few_nodes_are_said(address, tmp_path, capsys):
    assert bench(address, tmp_path / "out", "3x1x1") == 1
    assert not (tmp_path / "out").exists()
    assert "layout 3x1x1 has 3 nodes, and the cluster at" in capsys.readouterr().err
