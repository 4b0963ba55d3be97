"""How tests with Ray are shared by several workers (``-n 2 --dist loadfile``), and what Ray starts for them."""

import logging
from pathlib import Path

import pytest
import ray
from xdist.scheduler import LoadFileScheduling

from rayagi.coordinator.cluster import connected, without_unused_processes

EACH_ON_ITS_OWN = {
    "test_cli.py",
    "test_documented_pages.py",
    "test_killed_raylet.py",
    "test_learning.py",
    "test_saved_runs.py",
    "test_user_network.py",
}
"""Files whose tests share no Ray: any worker may run each of them. The tests of other files stay with one worker."""


class FilesOrTests(LoadFileScheduling):
    """Gives workers large files first and single tests last, so that they end at about the same time."""

    def _split_scope(self, nodeid):
        file = super()._split_scope(nodeid)
        return nodeid if Path(file).name in EACH_ON_ITS_OWN else file


@pytest.hookimpl(optionalhook=True)  # without xdist nobody asks
def pytest_xdist_make_scheduler(config, log):
    return FilesOrTests(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def _only_what_tests_use():
    """No process per CPU with the first driver: GMIs need processes of their own, with their slice's environment.

    And of normal priority: at Ray's niceness of 15 GMIs stand still on a busy machine.
    """
    with pytest.MonkeyPatch.context() as patch, without_unused_processes():
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.setenv("RAY_worker_niceness", "0")
        yield


@pytest.fixture(scope="module")
def ray_of_this_machine():
    """One for all sessions of a file."""
    with connected():
        yield


@pytest.fixture(scope="module")
def cluster(pytestconfig):
    """A Ray of two CPUs, whose workers can import the fakes and this folder's modules; what ``ray.init`` returned."""
    path = f"{pytestconfig.rootpath}:{pytestconfig.rootpath}/tests/cluster"
    yield ray.init(
        address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR,
        object_store_memory=100 * 2**20, runtime_env={"env_vars": {"PYTHONPATH": path}},
    )  # fmt: skip
    ray.shutdown()
