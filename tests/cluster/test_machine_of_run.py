"""The machine of a run, from the command line and RLlib: the cluster, or this host; without what killed runs left."""

import os
from dataclasses import replace

import pytest
import ray

from placement.ledger import Ledger, Owner, all_ledgers
from rayagi.algorithm import _recovered_machine
from rayagi.cli.settings import machine_of_run

pytestmark = pytest.mark.cluster

CPUS = len(os.sched_getaffinity(0)) + 3
"""More than this host has."""


@pytest.fixture(autouse=True)
def left_behind(tmp_path, monkeypatch):
    """A run that was killed before this host was restarted has left a ledger of a MIG instance, which is gone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    owner = replace(Owner.current(), boot_id="before")
    path = Ledger.open("killed").path
    Ledger(path, "killed", owner).record("mig", "GPU-1", "gpu_instance")
    assert [ledger.run for ledger in all_ledgers()[0]] == ["killed"]
    assert not ray.is_initialized()
    yield
    ray.shutdown()


@pytest.fixture
def cluster(left_behind):
    """A cluster of one node; returns its address."""
    context = ray.init(address="local", num_cpus=CPUS, include_dashboard=False, log_to_driver=False)
    return context.address_info["gcs_address"]


def test_rllib_reads_the_cluster_that_this_process_uses(cluster):
    machine = _recovered_machine()
    assert (machine.origin, [node.ray_cpus for node in machine.nodes]) == ("ray", [CPUS])
    assert [node.ray_node_id for node in machine.nodes] == [ray.nodes()[0]["NodeID"]]
    assert all_ledgers() == ([], [])


def test_the_command_line_reads_the_cluster_at_ray_address(cluster, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    machine = machine_of_run()
    assert (machine.origin, [node.ray_cpus for node in machine.nodes]) == ("ray", [CPUS])
    assert all_ledgers() == ([], [])
    assert ray.is_initialized()  # this process's own connection stays


@pytest.mark.parametrize("read", [_recovered_machine, machine_of_run])
@pytest.mark.parametrize("address", [None, "", "local"])
def test_without_a_cluster_this_host_is_read_and_ray_does_not_start(read, address, monkeypatch):
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    (node,) = read().nodes
    assert node.ray_cpus is None
    assert set(node.cores) == os.sched_getaffinity(0)
    assert all_ledgers() == ([], [])
    assert not ray.is_initialized()
