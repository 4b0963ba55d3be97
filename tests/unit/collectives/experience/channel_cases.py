"""Schemas and rows that tests of channels share."""

import hashlib

import torch

from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.errors import ChannelTimeoutError
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field

LIMIT_S = 30.0
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
SCHEMA = ExperienceSchema(
    "trajectory",
    (
        Field(name="obs", shape=(3, 5)),
        Field(name="done", dtype=torch.bool, shape=(3,)),
        Field(name="env", dtype=torch.int64),
    ),
)


def random_rows(schema, count, seed):
    """Rows by field name, with random bits."""
    generator = torch.Generator().manual_seed(seed)
    rows = {}
    for field in schema.fields:
        shape = (count, *field.shape)
        most = 2 if field.dtype == torch.bool else 256
        size = (count * field.row_numel, field.dtype.itemsize)
        raw = torch.randint(0, most, size, dtype=torch.uint8, generator=generator)
        rows[field.name] = raw.view(field.dtype).reshape(shape)
    return rows


def bits(tensor):
    """The bytes of a tensor, whatever its type."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def digest(rows, order):
    """Hash of the bits of all rows of a batch."""
    hasher = hashlib.blake2b(digest_size=7)
    for name in order:
        hasher.update(bits(rows[name]))
    return int.from_bytes(hasher.digest(), "little")


def same(found, rows):
    """Whether a batch holds these rows, to the last bit."""
    return all(bits(found[name]) == bits(tensor) for name, tensor in rows.items())


def pair(schema=SCHEMA, rows=4, **numbers):
    """A connected producer ring and consumer endpoint in this process."""
    ring, consumer_endpoint = ProducerRing(schema, rows=rows, **numbers), ConsumerEndpoint(schema)
    ring.attach(consumer_endpoint.endpoint)
    assert consumer_endpoint.producers == (ring.producer,)
    return ring, consumer_endpoint


def take_all(consumer_endpoint):
    """All batches that are queued now."""
    taken = []
    while True:
        try:
            taken.append(consumer_endpoint.take(timeout_s=0.0))
        except ChannelTimeoutError:
            return taken
