"""Ray connection: to a cluster by address, or to a local one that is started for this run; time limits of calls."""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import services, worker
from ray._private.grpc_utils import init_grpc_channel
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET
from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

from placement.inventory import local_machine
from placement.plan import PlacementPlan
from placement.types import Machine
from rayagi.coordinator.lost_ray import HeadWatch, LocalRayWatch, RayletSilentError, RayLostError, tell_lost
from rayagi.coordinator.unfit_host import why_unfit

OBJECT_STORE_BYTES = 200 * 2**20
"""Only checkpoints and small results pass through the object store."""

_SYSTEM_CONFIG = {
    # GMIs need processes with their own environment, so prestarted workers would only delay them.
    "prestart_worker_first_driver": False,
    # Ray's default of 15 would give every other process of the machine priority over the training.
    "worker_niceness": 0,
    # Who connects to a socket that is not there yet tries again after this time, for ten seconds altogether. By default it
    # is a second, which a raylet often waits for its own object store.
    "raylet_client_connect_timeout_milliseconds": 20,
    "raylet_client_num_connect_attempts": 500,
}
"""Of a local Ray."""
_PROBE_TIMEOUT_S = 5.0
SHUT_DOWN_LIMIT_S = 10.0
"""For a local Ray to shut down; then its processes are killed."""


class ClusterUnreachableError(ConnectionError):
    """No Ray cluster responds at the given address."""

    def __init__(self, address: str, source: str, problem: str) -> None:
        super().__init__(address, source, problem)
        self.address, self.source, self.problem = address, source, problem

    def __str__(self) -> str:
        return (
            f"no Ray cluster answers at {self.address} (from {self.source}): {self.problem}. "
            "Check that the cluster runs and that this machine reaches it, "
            "or unset RAY_ADDRESS to run on this machine alone"
        )


class ClusterTokenError(ClusterUnreachableError):
    """A Ray cluster requires a token, and got none or another one."""

    def __str__(self) -> str:
        return (
            f"the Ray cluster at {self.address} (from {self.source}) requires its token: set RAY_AUTH_MODE=token, and "
            "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token to what `ray get-auth-token` prints on its head"
        )


class ClusterVersionError(ClusterUnreachableError):
    """A Ray cluster has another version of Ray or Python than this process."""

    def __str__(self) -> str:
        return (
            f"the Ray cluster at {self.address} (from {self.source}) cannot be joined: {self.problem}. Use the same "
            "versions of both here and there"
        )


class RayStartError(RuntimeError):
    """The local Ray of a run did not start."""

    def __init__(self, problem: str, logs: str) -> None:
        super().__init__(problem, logs)
        self.problem, self.logs = problem, logs

    def __str__(self) -> str:
        return (
            f"Ray did not start on this machine: {self.problem.rstrip('.')}. Try again when the machine is less busy; "
            f"if it fails again, free memory and space in /dev/shm and {Path(self.logs).parents[1]}, "
            f"or see Ray's logs in {self.logs}"
        )


class RayUnfitHostError(RayStartError):
    """Something of this machine keeps a local Ray from starting."""

    def __str__(self) -> str:
        return f"Ray does not start on this machine: {self.problem}"


class RayTokenUnsavedError(RayStartError):
    """The local Ray of a run cannot save its token below the home folder."""

    def __str__(self) -> str:
        return (
            f"Ray did not start on this machine: it saves its token in the home folder, which is not possible "
            f"({self.problem}). Set HOME to a folder that can be written to, or RAY_AUTH_TOKEN to a secret text"
        )


class RaySocketPathError(RayStartError):
    """The sockets of the local Ray would have longer paths than Linux allows: TMPDIR is long."""

    def __str__(self) -> str:
        return (
            f"Ray did not start on this machine: its sockets below {Path(self.logs).parents[2]} would have paths of more "
            "than 107 bytes. Set RAY_TMPDIR to a folder with a shorter path, such as /tmp"
        )


@contextmanager
def connected(
    ray_address: str | None = None, *, dashboard: bool = False, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Connect to Ray for the duration of the block. The last block that uses a connection closes it.

    In this order: this process's existing connection; ``ray_address``; RAY_ADDRESS; else a local cluster with as many CPUs
    as this process may use cores. ``dashboard`` concerns only a local cluster, as does ``environment``: variables that its
    workers have from their start (``inherited_environment``).

    Ray prints nothing meanwhile: what its processes report is in the exceptions of calls, and in its logs.

    Raises:
        ClusterUnreachableError: no cluster responds at the address, or it requires another token.
        RayStartError: the local cluster did not start.
    """
    with _lock:
        if not ray.is_initialized():
            _stop_watching()  # of a connection that somebody has shut down
            try:
                _open(ray_address, dashboard=dashboard, environment=environment or {})
            except BaseException:
                _shut_down()
                raise
            _users.clear()
            _opened.clear()
            _opened.add(_this_connection())
        mine = _this_connection()
        if not _users[mine] and mine not in _opened:
            _stop_watching()
            _watch_processes(worker.global_worker)
        _users[mine] += 1
    try:
        yield
    finally:
        _leave(mine)


def keep_open() -> None:
    """Keep a Ray that was opened here until this process ends: its user may have actors and objects in it by now."""
    with _lock:
        mine = _this_connection()
        if mine in _opened and mine not in _kept:
            _kept.add(mine)
            _users[mine] += 1
            atexit.register(_leave, mine)


def _leave(connection: str) -> None:
    """One block, or this process, no longer uses a connection."""
    with _lock:
        if connection in _users:  # else somebody has shut Ray down, and it was opened anew
            _users[connection] -= 1
            if not _users[connection]:
                _close(connection)


def _close(connection: str) -> None:
    """Close a connection that nobody uses any more. One that somebody else has opened is no longer watched."""
    del _users[connection]
    is_current = ray.is_initialized() and _this_connection() == connection
    if is_current and connection in _opened:
        _shut_down()
    elif is_current or not ray.is_initialized():
        _stop_watching()


@contextmanager
def named_loss() -> Iterator[None]:
    """Raise RayLostError for an exception in the block if Ray was lost meanwhile.

    This process is disconnected from Ray first: otherwise Ray would end it.

    Raises:
        RayLostError: a process of Ray that this one needs has ended.
    """
    try:
        yield
    except Exception as error:
        if _OWNER_DIED in str(error):
            # This process is the owner, so Ray has given up its node, whose raylet is about to end.
            for watch in _watches:
                if isinstance(watch, LocalRayWatch):
                    watch.wait(_ENDING_S)
        lost = leave_if_lost()
        if lost is None or lost is error:
            raise
        raise lost from error


def leave_if_lost() -> RayLostError | None:
    """Disconnect from a Ray that was lost: whoever calls it waits in vain. Returns why; None: it can be used."""
    with _lock:
        lost = _lost()
        if lost is not None:
            _shut_down()
    return lost


def raise_if_lost() -> None:
    """Raise RayLostError: a process of Ray that this one needs has ended."""
    if (lost := _lost()) is not None:
        raise lost


def _lost() -> RayLostError | None:
    return next((watch.lost for watch in _watches if watch.lost is not None), None)


_OWNER_DIED = "because its owner has died"
"""What Ray says of an actor whose owner is on a node that it has given up."""
_ENDING_S = 5.0
"""Longest wait for the end of such a node's raylet; it was below 0.1 s."""
_lock = threading.Lock()
_users: Counter[str] = Counter()
"""Blocks that use a connection, by its identifier."""
_opened: set[str] = set()
"""The connection that this process has opened here; empty: somebody else has."""
_kept: set[str] = set()
"""Connections that stay open until this process ends."""
_inherited: dict[str, str] = {}
"""Variables that the workers of the local Ray have from their start, if this process has started it here."""
_watches: list[LocalRayWatch | HeadWatch] = []
"""Of the Ray processes that the connection needs: those of this machine, and the server of a cluster."""


def _this_connection() -> str:
    """Identifier of the connection: differs between clusters and between connections to one."""
    context = ray.get_runtime_context()
    return f"{context.gcs_address} job {context.get_job_id()}"


def environment_in_common(plan: PlacementPlan) -> dict[str, str]:
    """Variables of all GMIs of a plan that all workers of its Ray may have. None with GPUs, of which each has its own."""
    if any(node.gpus for node in plan.machine.nodes):
        return {}
    return dict(set.intersection(*(set(gmi_slice.environment.items()) for gmi_slice in plan.slices)))


def inherited_environment() -> Mapping[str, str]:
    """Variables that workers of the connected Ray have from their start; empty if it was not started here.

    A worker whose variables differ starts later: Ray's agent prepares it, and a program that imports Ray, too, sets them.
    """
    return _inherited if ray.is_initialized() and _this_connection() in _opened else {}


def _open(ray_address: str | None, *, dashboard: bool, environment: Mapping[str, str]) -> None:
    # Ray's own switch, for its debugger. log_to_driver=False is about the output of workers: a thread would still print that
    # a worker died and the last lines of a raylet's log.
    worker._worker_logs_enabled = False
    address = ray_address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        _start_local(local_machine(), dashboard=dashboard, environment=environment)
    else:
        _connect(address, "ray_address" if ray_address else "RAY_ADDRESS")
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is threading.main_thread() and handler is not None:
        # Anew: Ray has put a handler of its own before it, which prints the stack.
        signal.signal(signal.SIGTERM, handler)


def _watch_processes(driver: Any) -> None:
    """Watch the processes of Ray that a driver needs. Workers end with their raylet; Ray Client has no node."""
    node = driver.node
    if node is None or driver.mode != worker.SCRIPT_MODE:
        return
    if node.head:
        _watches.append(_watched(node))
        return
    host, _, port = str(node.gcs_address).rpartition(":")
    _watches.extend([_watched_node(node), HeadWatch(host.strip("[]"), int(port))])


def _watched(node: Any) -> LocalRayWatch:
    """Watches the local Ray's server and raylet: without either of them nothing else of it can be used."""
    processes = {
        name: infos[0].process.pid
        for name in (PROCESS_TYPE_GCS_SERVER, PROCESS_TYPE_RAYLET)
        if (infos := node.all_processes.get(name))
    }

    def end_others() -> None:
        node.kill_all_processes(check_alive=False, allow_graceful=False)

    return LocalRayWatch(processes, node.get_logs_dir_path(), end_others)


def _watched_node(node: Any) -> LocalRayWatch:
    """Watches the raylet of this machine's node of a cluster, which others use too: without it Ray ends this process."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(node.raylet_socket_name)
        # struct ucred of who listens there: process, user and group.
        pid, _, _ = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        if pid > 0:  # 0: it is in a process namespace that this one does not see
            return LocalRayWatch({PROCESS_TYPE_RAYLET: pid}, node.get_logs_dir_path(), lambda: None)
    return LocalRayWatch({}, node.get_logs_dir_path(), lambda: None)


def _stop_watching() -> None:
    while _watches:
        _watches.pop().stop()


def _shut_down() -> None:
    _stop_watching()
    continue_stopped()
    node = worker.global_worker.node
    overdue = threading.Timer(SHUT_DOWN_LIMIT_S, _end_unresponsive, (node,))
    overdue.daemon = True  # the process does not wait for it
    if node is not None:
        overdue.start()
    children = _children_of_own(node)
    try:
        ray.shutdown()
    finally:
        overdue.cancel()
        for descriptor in children:
            with suppress(OSError):  # it has ended
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            os.close(descriptor)
    worker._worker_logs_enabled = True


def _children_of_own(node: Any) -> list[int]:
    """Descriptors of what a local Ray's processes have started: its agents outlive an interrupted shutdown by a minute."""
    found: list[int] = []
    for process in _own_processes(node):
        for listed in Path(f"/proc/{process.pid}/task").glob("*/children"):
            with suppress(OSError):  # they have ended, or the kernel has no such files
                found.extend(os.pidfd_open(int(pid)) for pid in listed.read_text().split())
    return found


def continue_stopped() -> None:
    """Let those processes of a local Ray go on that somebody has stopped: with them nothing could be saved or ended."""
    for process in _own_processes(worker.global_worker.node):
        process.send_signal(signal.SIGCONT)


def _end_unresponsive(node: Any) -> None:
    """For a shutdown that does not end, as Ray waits without limit for its raylet: kill a local one, or end the command."""
    processes = _own_processes(node)
    for process in processes:
        process.kill()
    if not processes:
        tell_lost(RayletSilentError(node.node_ip_address, SHUT_DOWN_LIMIT_S))


def kill_local_ray() -> None:
    """Kill the processes of a Ray that this process has started."""
    for process in _own_processes(worker.global_worker.node):
        process.kill()


def _own_processes(node: Any) -> list[subprocess.Popen[bytes]]:
    """Of the Ray that this process has started; empty without one."""
    if node is None or not node.head:
        return []
    return [info.process for info in chain.from_iterable(node.all_processes.values())]


def starts_local(ray_address: str | None = None) -> bool:
    """Whether ``connected`` would start a local cluster."""
    address = ray_address or os.environ.get("RAY_ADDRESS") or "local"
    return not ray.is_initialized() and address == "local"


@contextmanager
def without_unused_processes() -> Iterator[None]:
    """A Ray that starts within the block has no autoscaler, no log monitor and, without a dashboard, no API server.

    A local run uses none of them and Ray has no option against them; with them it takes twice as long to start.
    """
    start_api_server = Node.start_api_server

    def start_dashboard(node: Any, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        if include_dashboard:
            start_api_server(node, include_dashboard=include_dashboard, raise_on_failure=raise_on_failure)

    instead = {
        "start_monitor": lambda _node: None,
        "start_log_monitor": lambda _node: None,
        "start_api_server": start_dashboard,
    }
    with ExitStack() as stack:
        for name, function in instead.items():
            stack.callback(setattr, Node, name, getattr(Node, name))
            setattr(Node, name, function)
        yield


@contextmanager
def _in_groups_of_their_own(environment: Mapping[str, str]) -> Iterator[None]:
    """Processes that Ray starts within the block get no signal that is sent to this one's group, as `timeout` sends SIGTERM.

    This process then ends the run, and Ray after it. If this one is killed, Linux kills them all the same. They also have
    these environment variables.
    """
    started = services.ConsolePopen

    def start(command: list[str], *, env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = started(
            command, env={**env, **environment}, process_group=0, **options
        )
        return process

    services.ConsolePopen = start
    try:
        yield
    finally:
        services.ConsolePopen = started


def _start_local(machine: Machine, *, dashboard: bool, environment: Mapping[str, str]) -> None:
    if problem := why_unfit(OBJECT_STORE_BYTES):
        raise RayUnfitHostError(problem, _logs())
    _inherited.clear()
    _inherited.update(environment)
    try:
        with without_unused_processes(), _in_groups_of_their_own(environment):
            ray.init(
                address="local",
                num_cpus=machine.num_cores,
                num_gpus=machine.num_gpus,
                include_dashboard=dashboard,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _system_config=_SYSTEM_CONFIG,
            )
    except Exception as error:  # Ray raises plain Exceptions, too
        raise _start_failure(error)(_problem(error), _logs()) from error
    _watch_processes(worker.global_worker)


def _logs() -> str:
    return f"{get_default_ray_temp_dir()}/session_latest/logs"


def _start_failure(error: Exception) -> type[RayStartError]:
    if _is_of_home(error):
        return RayTokenUnsavedError
    return RaySocketPathError if "AF_UNIX path length" in str(error) else RayStartError


def _connect(address: str, source: str) -> None:
    if address.startswith("ray://"):
        raise ClusterUnreachableError(
            address,
            source,
            "Ray Client addresses are not supported; give host:port of the cluster's head, or submit with "
            "`ray job submit --working-dir . -- ...`",
        )
    if address.startswith(("http://", "https://")):
        raise ClusterUnreachableError(
            address,
            source,
            "this is an address of Ray's dashboard, for `ray job`; give host:port of the cluster's head, whose port is "
            "6379 by default",
        )
    try:
        # ``auto``: the cluster that was last started on this machine.
        target = str(services.canonicalize_bootstrap_address(address)) if address == "auto" else address
        _probe(target, address, source)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        _watch_processes(worker.global_worker)
    except ClusterUnreachableError:
        raise
    except (ConnectionError, RuntimeError, ValueError, SystemExit, ray.exceptions.RayError) as error:
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:  # from Ray's handler of the signal
            raise
        if differing := _differing_versions(error):
            raise ClusterVersionError(address, source, differing) from error
        # Ray calls sys.exit if the server is no Ray head.
        failure = ClusterTokenError if _is_of_token(error) else ClusterUnreachableError
        raise failure(address, source, _problem(error)) from error


def _differing_versions(error: BaseException) -> str:
    """The versions of an error about them; empty for other errors."""
    if "Version mismatch" not in str(error):
        return ""
    # Ray lists both of the cluster, then both of this process.
    found = [" ".join(each) for each in re.findall(r"(Ray|Python): (\S+)", str(error))]
    return f"it has {' and '.join(found[:2])}, this process {' and '.join(found[2:])}"


def _is_of_home(error: BaseException) -> bool:
    """Whether the folder of Ray's token, or one above it, cannot be made or written to."""
    if not isinstance(error, OSError) or error.filename is None:
        return False
    folder, found = Path("~/.ray").expanduser(), Path(error.filename)
    return found.is_relative_to(folder) or folder.is_relative_to(found)


def _is_of_token(error: BaseException | None) -> bool:
    """Whether a token is missing or wrong: Ray raises the authentication error itself, or quotes it in another exception."""
    if error is None:
        return False
    named = "AuthenticationError" in repr(error) or "authentication token" in str(error).lower()
    return named or _is_of_token(error.__cause__)


def _problem(error: BaseException) -> str:
    """Why Ray failed, in one line."""
    return next(iter(str(error).strip().splitlines()), repr(error))


def _probe(target: str, address: str, source: str) -> None:
    """Fail fast if no gRPC server listens, or it refuses the token: Ray itself retries with a log line per second, for
    20 s without a token and for two minutes without a server, after which it ends the process.
    """
    host, _, port = target.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ClusterUnreachableError(address, source, "an address has the form host:port")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterUnreachableError(address, source, str(error)) from error
    if os.environ.get("RAY_USE_TLS", "0") == "1":  # a plain channel would never become ready
        return
    with init_grpc_channel(target) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=_PROBE_TIMEOUT_S)
        except grpc.FutureTimeoutError as error:
            problem = (
                f"something listens there but does not speak Ray's protocol within {_PROBE_TIMEOUT_S:.0f} s"
            )
            raise ClusterUnreachableError(address, source, problem) from error
        try:
            gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel).CheckAlive(
                gcs_service_pb2.CheckAliveRequest(), timeout=_PROBE_TIMEOUT_S
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise ClusterTokenError(address, source, error.details()) from error
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                problem = "a gRPC server listens there that is not Ray's"
                raise ClusterUnreachableError(address, source, problem) from error


START_TIMEOUT_S = 120.0
"""For a GMI's process to start, and again for it to enter its slice."""
BUILD_TIMEOUT_S = 1000.0
"""For building its program: simulators on a GPU may compile for minutes the first time."""
ITERATION_TIMEOUT_S = 3600.0
"""For one iteration, one evaluation, one state. Generous: it only ends a run that hangs."""
CLOSE_TIMEOUT_S = 5.0
"""For the GMIs to close by themselves; then they are killed."""


@contextmanager
def import_in_background(module: str) -> Iterator[None]:
    """Import a module while the block runs, and wait for it at the end.

    Errors are suppressed; the regular import raises them later. Not for modules that the block imports too: with circular
    imports, a thread may see partially initialised modules.
    """
    thread = threading.Thread(target=_load, args=(module,), name=f"import {module}")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _load(module: str) -> None:
    with suppress(Exception):
        import_module(module)
