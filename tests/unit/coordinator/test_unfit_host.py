"""What keeps a local Ray from starting is said before it is tried."""

import os
import resource
import socket

import pytest
import ray

from rayagi.coordinator import unfit_host
from rayagi.coordinator.cluster import RayStartError, connected
from rayagi.coordinator.unfit_host import why_unfit


def test_this_machine_is_fit():
    assert why_unfit(1000) == ""


@pytest.fixture
def refused(monkeypatch):
    """Gives the text of the error with which a connection ends before Ray is started."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray was started"))

    def text():
        with pytest.raises(RayStartError) as caught, connected():
            pass
        return str(caught.value)

    return text


def test_a_folder_that_is_not_ascii_is_named(refused, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/t\u00fc")
    assert refused() == (
        "Ray does not start on this machine: its folder for temporary files, /tmp/t\u00fc/ray, is not ASCII: set RAY_TMPDIR "
        "to one that is, such as /tmp"
    )


def test_a_limit_of_files_is_named(refused):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_960, hard))
    try:
        assert "files may have 40960 bytes at most, and its object store has 209715200" in refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_host_name_that_is_none_is_named(refused, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "a" * 64)
    assert "this machine's name 'aaaa" in refused()


def test_shared_memory_that_is_read_only_is_named(refused, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "its object store is in /dev/shm, which cannot be written to" in refused()


def test_a_loopback_interface_that_is_down_is_named(refused, monkeypatch):
    def unreachable(*arguments, **options):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(unfit_host.socket, "create_connection", unreachable)
    text = refused()
    assert "which does not answer ([Errno 101] Network is unreachable)" in text
    assert text.endswith("bring up the loopback interface, as by `ip link set lo up`")
