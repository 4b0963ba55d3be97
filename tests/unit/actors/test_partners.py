"""Endpoint exchange: partners attach to each other, or the missing or unreachable one is named."""

import threading

import pytest

from actors.partners import exchange_endpoints
from actors.rendezvous_actor import RendezvousActor
from collectives.experience.errors import ChannelError, ChannelTimeoutError
from collectives.rendezvous import host_identity

NAMES = {0: "GMI 0 (simulator)", 1: "GMI 1 (simulator)", 2: "GMI 2 (agent)"}


def partner(directory, index, partners, attached, limit_s=20.0):
    """A GMI that exchanges endpoints with its partners; the endpoints it attached to."""
    exchange_endpoints(
        directory,
        "steps",
        index=index,
        endpoint=f"/proc/{index}/fd/0",
        partners={other: NAMES[other] for other in partners},
        attach=lambda endpoints: attached.update({index: endpoints}),
        limit_s=limit_s,
    )


def test_each_attaches_to_its_partners_in_their_order():
    directory, attached = RendezvousActor(3), {}
    threads = [
        threading.Thread(target=partner, args=(directory, index, partners, attached))
        for index, partners in ((0, [2]), (1, [2]), (2, [1, 0]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
        assert not thread.is_alive()
    assert attached == {
        0: ["/proc/2/fd/0"],
        1: ["/proc/2/fd/0"],
        2: ["/proc/1/fd/0", "/proc/0/fd/0"],
    }


def test_a_missing_partner_is_named():
    directory = RendezvousActor(3)
    directory.announce("steps/0", f"{host_identity()} /proc/0/fd/0")
    with pytest.raises(
        ChannelTimeoutError,
        match=r"'steps': GMI 1 \(simulator\) has not announced its endpoint \(waited",
    ):
        partner(directory, 2, [0, 1], {}, limit_s=0.05)


def test_a_partner_that_does_not_attach_is_named():
    directory, attached = RendezvousActor(3), {}
    directory.announce("steps/0", f"{host_identity()} /proc/0/fd/0")
    with pytest.raises(ChannelTimeoutError, match=r"GMI 0 \(simulator\) has not attached"):
        partner(directory, 2, [0], attached, limit_s=0.05)
    assert attached == {2: ["/proc/0/fd/0"]}


def test_a_partner_on_another_host_is_refused():
    directory, attached = RendezvousActor(3), {}
    directory.announce("steps/2", "another-host /proc/0/fd/0")
    with pytest.raises(
        ChannelError, match=r"GMI 2 \(agent\) is on another host than GMI 0, and steps are exchanged in"
    ):
        partner(directory, 0, [2], attached)
    assert attached == {}
