"""What keeps a local Ray from starting, found out before: Ray itself says so after half a minute or more, or never."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

from ray._common.utils import get_default_ray_temp_dir

_CONNECT_LIMIT_S = 5.0
_SHARED_MEMORY = Path("/dev/shm")


def why_unfit(store_bytes: int) -> str:
    """Why Ray would not start on this machine, and what to do; empty if nothing is known against it.

    ``store_bytes``: of its object store, a file.
    """
    folder = get_default_ray_temp_dir()
    if not folder.isascii():
        return f"its folder for temporary files, {folder}, is not ASCII: set RAY_TMPDIR to one that is, such as /tmp"
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < store_bytes:
        return (
            f"files may have {limit} bytes at most, and its object store has {store_bytes}: raise `ulimit -f`"
        )
    if _SHARED_MEMORY.is_dir() and not os.access(_SHARED_MEMORY, os.W_OK):
        return f"its object store is in {_SHARED_MEMORY}, which cannot be written to: mount it so that it can"
    return _of_network()


def _of_network() -> str:
    name = socket.gethostname()
    try:
        name.encode("idna")
    except UnicodeError as error:
        return f"this machine's name {name!r} is no host name ({error}): give it one whose parts have 63 characters at most"
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=_CONNECT_LIMIT_S),
        ):
            return ""
    except OSError as error:
        problem = f"its processes talk over 127.0.0.1, which does not answer ({error})"
        return f"{problem}: bring up the loopback interface, as by `ip link set lo up`"
