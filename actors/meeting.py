"""How the GMIs of a step-wise template find each other: every GMI tells all where it takes messages."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import torch

from collectives.communicator import Communicator
from collectives.experience.errors import ChannelError
from collectives.experience.memory import endpoint_in, pid_and_file
from collectives.rendezvous import host_identity


def endpoints_of(
    partners: Mapping[int, str], *, own: str | None, communicator: Communicator, channel: str
) -> list[str]:
    """Endpoints of the GMIs that this one exchanges messages with; all GMIs call it together.

    Args:
        partners: names of those GMIs, by their index
        own: where this GMI takes messages; None: nowhere
        communicator: of all GMIs
        channel: name of what is exchanged, for the error

    Raises:
        ChannelError: a partner is on another host, with which this one shares no memory.
        CommunicatorError: a GMI is lost.
    """
    host = int.from_bytes(blake2b(host_identity().encode(), digest_size=7).digest(), "little")
    told = communicator.all_gather(torch.tensor([host, 0 if own is None else pid_and_file(own)]))
    for index, name in partners.items():
        if int(told[index, 0]) != host:
            raise ChannelError(
                channel,
                f"{name} is on another host than GMI {communicator.rank}, and steps are exchanged in shared memory; "
                "give the template no more GMIs than one node holds, or take one whose simulator and agent are together",
            )
    return [endpoint_in(int(told[index, 1])) for index in partners]
