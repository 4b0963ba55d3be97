"""A transport of a user's own: threads of one process, for the tests of the registry. Its second member may refuse."""

from tests.unit.collectives.thread_transport import InProcessGroup, InProcessTransport

GROUPS: dict[str, InProcessGroup] = {}
"""By key."""


def connect(group):
    if group.rank == 1:
        group.publish(f"{group.key} taken", "no" if group.timeout_s == 9.0 else "yes")
    if group.published(group.members[1], f"{group.key} taken") == "no":
        return "rank 1 does not want to"
    found = GROUPS.setdefault(group.key, InProcessGroup(len(group.members), group.timeout_s))
    return InProcessTransport(found, group.rank)
