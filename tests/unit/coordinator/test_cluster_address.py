"""Addresses without a Ray cluster: an error within seconds, and no connection left open."""

import errno
import pickle
import platform
import signal
import socket
from pathlib import Path

import pytest
import ray
from ray._private.utils import check_version_info

from placement.inventory import load_machine
from placement.plan import make_plan
from rayagi.cli.failures import explain
from rayagi.coordinator import cluster
from rayagi.coordinator.cluster import (
    ClusterUnreachableError,
    RayStartError,
    connected,
    environment_in_common,
    starts_local,
)

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def silent_port():
    """Something that accepts connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def closed_port():
    with socket.socket() as once:
        once.bind(("127.0.0.1", 0))
        return once.getsockname()[1]


def refusal(address):
    with pytest.raises(ClusterUnreachableError) as caught, connected(address):
        pass
    assert not ray.is_initialized()
    return str(caught.value)


def test_a_port_where_nobody_listens_is_named(closed_port):
    text = refusal(f"127.0.0.1:{closed_port}")
    assert f"127.0.0.1:{closed_port} (from ray_address)" in text
    assert "unset RAY_ADDRESS" in text


def test_a_port_that_does_not_speak_ray_s_protocol_does_not_hang(silent_port, monkeypatch):
    monkeypatch.setattr(cluster, "_PROBE_TIMEOUT_S", 0.5)
    assert "does not speak Ray's protocol" in refusal(f"127.0.0.1:{silent_port}")


def test_the_environment_s_address_is_named_as_such(monkeypatch, closed_port):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port}")
    assert "(from RAY_ADDRESS)" in refusal(None)


@pytest.mark.parametrize("address", ["nonsense", "host:", "host:port", "host:0", "host:70000", ":6379"])
def test_a_malformed_address_says_what_form_it_has(address):
    assert "host:port" in refusal(address)


def test_ray_client_addresses_are_refused_with_a_hint():
    assert "ray job submit" in refusal("ray://127.0.0.1:10001")


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "https://head.example"])
def test_addresses_of_a_dashboard_are_refused_with_the_one_to_give(address):
    assert "an address of Ray's dashboard, for `ray job`; give host:port of the cluster's head" in refusal(
        address
    )


def test_a_cluster_of_other_versions_is_said_with_both(monkeypatch):
    def init(**options):
        check_version_info({"ray_version": "2.9.0", "python_version": "3.10.1"}, "node 10.0.0.1")

    monkeypatch.setattr(cluster, "_probe", lambda *where: None)
    monkeypatch.setattr(ray, "init", init)
    assert refusal("10.0.0.1:6379") == (
        "the Ray cluster at 10.0.0.1:6379 (from ray_address) cannot be joined: it has Ray 2.9.0 and Python 3.10.1, this "
        f"process Ray {ray.__version__} and Python {platform.python_version()}. Use the same versions of both here and there"
    )


def test_sigterm_while_it_connects_is_not_the_cluster_s_fault(monkeypatch):
    def init(**options):
        raise SystemExit(signal.SIGTERM)  # as Ray's handler does

    monkeypatch.setattr(cluster, "_probe", lambda *where: None)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(SystemExit), connected("10.0.0.1:6379"):
        pass


def test_without_an_address_a_local_ray_would_start(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert starts_local()
    assert not starts_local("127.0.0.1:6379")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert not starts_local()
    assert starts_local("local")


def test_workers_of_a_local_ray_inherit_what_all_gmis_have_and_nothing_where_there_are_gpus():
    cores, gpu = (load_machine(DATA / f"machines/{name}.json") for name in ("cpu16", "a100x1"))
    equal = make_plan(cores, num_envs=8, num_gmis=2)
    assert environment_in_common(equal) == equal.slices[0].environment
    unequal = make_plan(cores, num_envs=8, sizes=(3.0, 2.0))
    waiting = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
    assert environment_in_common(unequal) == waiting | {"CUDA_VISIBLE_DEVICES": ""}
    assert environment_in_common(make_plan(gpu, num_envs=8, backend="cpu", num_gmis=2)) == {}


def test_the_error_survives_pickling():
    error = ClusterUnreachableError("a:1", "RAY_ADDRESS", "refused")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_local_ray_that_does_not_start_is_said_with_what_to_do(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def silent(*arguments, **options):
        raise Exception("The current node timed out during startup. This could happen\nfor many reasons.")

    monkeypatch.setattr(ray, "init", silent)
    with pytest.raises(RayStartError) as caught, connected():
        pass
    text = str(caught.value)
    assert text.startswith(
        "Ray did not start on this machine: The current node timed out during startup. This could happen. Try"
    )
    assert "again when the machine is less busy; if it fails again, free memory" in text
    assert (known := explain(caught.value)) is not None
    assert (known.exit_code, str(known.error)) == (1, text)
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


@pytest.mark.parametrize("missing", ["", ".ray", ".ray/auth_token"])
def test_a_home_folder_that_cannot_be_written_to_is_named(monkeypatch, tmp_path, missing):
    """Where Ray saves the token that its processes need."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    path = str(tmp_path / missing)

    def refused(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(ray, "init", refused)
    with pytest.raises(RayStartError) as caught, connected():
        pass
    text = str(caught.value)
    assert (
        f"saves its token in the home folder, which is not possible ([Errno 13] Permission denied: '{path}')"
        in text
    )
    assert text.endswith("Set HOME to a folder that can be written to, or RAY_AUTH_TOKEN to a secret text")
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_a_long_temporary_folder_is_named(monkeypatch, tmp_path):
    """Ray's own check, which is before it starts a process."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    folder = tmp_path / ("long " * 12)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    with pytest.raises(RayStartError) as caught, connected():
        pass
    assert str(caught.value) == (
        f"Ray did not start on this machine: its sockets below {folder} would have paths of more than 107 bytes. "
        "Set RAY_TMPDIR to a folder with a shorter path, such as /tmp"
    )
