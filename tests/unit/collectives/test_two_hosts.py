"""Members in two network namespaces, joined by a virtual ethernet pair: the closest to two hosts on one machine."""

import ctypes
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from members import run_group

from collectives.errors import CommunicatorError, MemberLostError
from collectives.rendezvous import poll, this_member

NAMES = [f"rayagi-{os.getpid()}-{side}" for side in "ab"]
ADDRESSES = ["10.231.77.1", "10.231.77.2"]
CABLE = ["cable-a", "cable-b"]
CLONE_NEWNET = 0x40000000


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture(scope="module")
def hosts():
    if shutil.which("ip") is None:
        pytest.skip("two hosts: there is no `ip` command to make network namespaces with")
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", CABLE[0], "netns", NAMES[0], "type", "veth", "peer", CABLE[1], "netns", NAMES[1])
        for name, address, end in zip(NAMES, ADDRESSES, CABLE, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    except subprocess.CalledProcessError as error:
        pytest.skip(f"two hosts: network namespaces are not allowed here: {error.stderr.strip()}")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30, check=False)


def enter(rank, host, name):
    """Move this process, which has one thread so far, to a host's namespace; returns its ``Member`` there."""
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    return this_member(rank, ADDRESSES[host])


def on_two_hosts(task, timeout_s=30.0):
    """Two members on each."""
    who = [partial(enter, host=host, name=NAMES[host]) for host in (0, 0, 1, 1)]
    return run_group("auto", 4, task, timeout_s, who=who)


def values(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, (50_001,), generator=generator)
    return torch.randn(50_001, generator=generator, dtype=dtype)


def reduce(communicator, done):
    found = {}
    for dtype in (torch.float32, torch.float64, torch.int64):
        found[dtype] = values(communicator.rank, dtype)
        communicator.all_reduce(found[dtype])
    found["most"] = values(communicator.rank, torch.float32)
    communicator.all_reduce(found["most"], "max")
    rows = communicator.all_gather(values(communicator.rank, torch.float32)[:5])
    return repr(communicator), found, rows


def test_two_hosts_reduce_to_what_one_host_does(hosts):
    apart, together = on_two_hosts(reduce), run_group("shm", 4, reduce)
    assert "ip_only on 2x1x2" in apart[0][0]
    assert apart[0][0].endswith("; ip by SharedMemoryTransport, net by TcpTransport")
    assert "ip_only on 1x4" in together[0][0]
    for _, found, rows in apart:
        assert torch.equal(rows, together[0][2])
        for name in (torch.int64, "most"):
            assert torch.equal(found[name], together[0][1][name])
        for dtype, accuracy in ((torch.float32, 1e-6), (torch.float64, 1e-15)):
            # (r0 + r1) + (r2 + r3) on two hosts, ((r0 + r1) + r2) + r3 on one
            pairs = [values(rank, dtype) + values(rank + 1, dtype) for rank in (0, 2)]
            assert torch.equal(found[dtype], pairs[0] + pairs[1])
            torch.testing.assert_close(found[dtype], together[0][1][dtype], rtol=accuracy, atol=4 * accuracy)


def lose_a_member_of_the_other_host(communicator, done):
    communicator.barrier()
    if communicator.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        communicator.all_reduce(torch.ones(1000))


def test_a_member_that_is_killed_on_one_host_is_named_on_both(hosts):
    answers = on_two_hosts(lose_a_member_of_the_other_host, timeout_s=60.0)
    assert answers[3] is None
    for answer in answers[:3]:
        assert isinstance(answer.error, MemberLostError), answer.error
        assert [member.rank for member in answer.error.lost] == [3]


@dataclass(frozen=True)
class CutTheCable:
    """Rank 2 is killed; each returns its error. No member ends before all have one: that would be a loss, too."""

    folder: Path

    def __call__(self, communicator, done):
        communicator.barrier()
        self._meet("left the barrier", communicator.rank)  # whose answers may still be on their way to some
        if communicator.rank == 2:
            ip("link", "set", CABLE[1], "down")
        try:
            for _ in range(1000):
                communicator.all_reduce(torch.ones(1000))
        except CommunicatorError as error:
            self._meet("has its error", communicator.rank)
            return error

    def _meet(self, where, rank):
        (self.folder / f"{rank} {where}").touch()
        assert poll(lambda: len(list(self.folder.glob(f"* {where}"))) == 4 or None, 30.0)


def test_a_silent_host_is_lost_long_before_the_time_limit(hosts, tmp_path):
    for rank, error in enumerate(on_two_hosts(CutTheCable(tmp_path), timeout_s=60.0)):
        assert isinstance(error, MemberLostError), error
        assert error.waited_s < 30
        assert {member.rank for member in error.lost} <= ({2, 3} if rank < 2 else {0, 1})
        assert error.step.startswith("step ")
