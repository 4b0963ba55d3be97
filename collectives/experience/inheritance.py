"""Batches that a killed producer left: committed, and released by no consumer.

Consumers read them from the ring's memory, which each of them maps from its connection on. A batch in the queue of a live
consumer is that consumer's. The others are *abandoned*: one consumer, which holds the lock of the ring's file, takes them.
The kernel releases the lock when that consumer ends; what it had not released is then abandoned again.
"""

from __future__ import annotations

from contextlib import suppress

from collectives.experience import file_layout
from collectives.experience.errors import ChannelError
from collectives.experience.file_layout import RingLayout, SharedFile
from collectives.experience.spsc_queue import untaken_entries
from collectives.process_watcher import has_ended
from collectives.shared_words import SharedWords


def unreleased_batches(words: SharedWords, shape: RingLayout) -> dict[int, int]:
    """Tickets of the committed batches of a ring that no consumer has released, oldest first; and their slots."""
    # A dead producer stores nothing more; consumers only store releases, so that the answer can only shrink.
    committed = words[file_layout.COMMITTED]
    queues = [shape.queue_word(number) + shape.released_at for number in range(file_layout.MAX_CONSUMERS)]
    found = {}
    for slot in range(shape.slots):
        header = shape.slot_word(slot)
        ticket = words[header + file_layout.SLOT_TICKET]
        is_free = words[header + file_layout.SLOT_STATE] == file_layout.STATE_FREE
        if (
            0 < ticket >> file_layout.GENERATION_BITS <= committed
            and not is_free
            and all(words[at + slot] != ticket for at in queues)
        ):
            found[ticket] = slot
    return dict(sorted(found.items()))


def abandoned_slots(channel: str, words: SharedWords, shape: RingLayout, own_queue: int) -> list[int]:
    """Slots of a dead producer's unreleased batches that are in the queue of no live consumer, oldest first.

    Batches in ``own_queue``, of the calling consumer, are not abandoned.
    """
    found = []
    for ticket, slot in unreleased_batches(words, shape).items():
        queue = words[shape.slot_word(slot) + file_layout.SLOT_STATE] - file_layout.STATE_POSTED
        entry = file_layout.entry_of(slot, ticket)
        begin = shape.queue_word(queue)
        if (
            queue < 0
            or words[begin + file_layout.QUEUE_AT + words[begin + file_layout.TAIL] % shape.places]
            == entry  # killed before the tail that publishes it
            or words[begin + shape.voided_at + slot] == ticket  # killed while it revoked the batch
            or (queue != own_queue and not _will_release(channel, words, shape, queue, entry))
        ):
            found.append(slot)
    return found


def _will_release(channel: str, words: SharedWords, shape: RingLayout, queue: int, entry: int) -> bool:
    """Whether the consumer of this queue has a posted batch, or can still take it."""
    endpoint = file_layout.endpoint_in(words[shape.queue_word(queue) + file_layout.QUEUE_OWNER])
    if has_ended(file_layout.pid_of(endpoint)):
        return False
    with suppress(ChannelError):  # it is closed: its file is gone
        consumer_file = SharedFile.open(channel, endpoint, file_layout.CONSUMER_MAGIC)
        if not consumer_file.words[file_layout.CONSUMER_CLOSED]:
            return True
    # A closed consumer takes nothing more. Loaded after ``CONSUMER_CLOSED``, so that its last take is seen.
    return entry not in untaken_entries(words, shape, queue)
