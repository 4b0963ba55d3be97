"""Schemas are equivalent in torch and Arrow; mismatches are refused before anything is sent."""

import pyarrow as pa
import pytest
import torch
from channel_cases import DTYPES, LIMIT_S, SCHEMA, bits, pair, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.errors import ChannelError, SchemaError
from collectives.experience.messages import MessageLayouts
from collectives.experience.producer_ring import ProducerRing
from collectives.experience.schema import ExperienceSchema, Field
from collectives.transports.shm.memory import CACHE_LINE_BYTES

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
fields = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=6)


def made(columns, name="any"):
    return ExperienceSchema(
        name,
        tuple(
            Field(name=f"f{place}", dtype=dtype, shape=shape) for place, (dtype, shape) in enumerate(columns)
        ),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(fields)
def test_arrow_gives_a_schema_back_as_it_was(columns):
    schema = made(columns)
    assert ExperienceSchema.from_arrow(pa.ipc.read_schema(schema.arrow().serialize())) == schema


@settings(max_examples=60, deadline=None, derandomize=True)
@given(fields, st.integers(0, 9), st.integers(0, 2**31))
def test_tensors_lie_where_arrow_reads_them_and_do_not_overlap(columns, rows, seed):
    layouts = MessageLayouts(made(columns))
    layout = layouts.for_rows(rows)
    memory = memoryview(bytearray(layout.size))
    memory[: len(layout.metadata)] = layout.metadata
    tensors = layout.tensors(memory, 0)
    values = random_rows(layouts.schema, rows, seed)
    for name, tensor in values.items():
        tensors[name].copy_(tensor)
    assert bytes(memory[: len(layout.metadata)]) == layout.metadata
    batch = layouts.read(memory)
    assert batch.num_rows == rows
    for name, tensor in values.items():
        assert bits(tensors[name]) == bits(tensor)
        assert arrow_bits(batch.column(name), rows) == bits(tensor)
    # A message that begins this far behind a cache line has its body at the begin of one.
    assert 0 <= layout.lead < CACHE_LINE_BYTES
    assert (layout.lead + len(layout.metadata)) % CACHE_LINE_BYTES == 0


def arrow_bits(column, rows):
    storage = column.storage if isinstance(column, pa.ExtensionArray) else column
    return storage.buffers()[-1].to_pybytes() if rows else b""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pyarrow_opens_schema_and_slot_as_a_stream_with_the_values_that_were_written(dtype):
    schema = ExperienceSchema(
        "values", (Field(name="flat", dtype=dtype), Field(name="grid", dtype=dtype, shape=(2, 2)))
    )
    flat = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    grid = torch.arange(20).reshape(5, 2, 2).remainder(2).to(dtype)
    ring, consumer_endpoint = pair(schema, rows=5)
    ring.put({"flat": flat, "grid": grid}, version=0)
    with consumer_endpoint.take(LIMIT_S) as batch:
        encoded_batch = bytes(MessageLayouts(schema).schema_message()) + bytes(batch._base)
    table = pa.ipc.open_stream(encoded_batch).read_all()
    assert table.schema.metadata[b"rayagi.channel"] == b"values"
    one = 0x3F80 if dtype == torch.bfloat16 else 1  # bfloat16 is sent as the bits of its numbers
    assert table["flat"].to_pylist() == [one * int(value) for value in flat.tolist()]
    numbers = table["grid"].combine_chunks().to_numpy_ndarray()
    assert numbers.shape == (5, 2, 2)
    assert numbers.tolist() == [
        [[one * int(value) for value in row] for row in rows] for rows in grid.tolist()
    ]


@pytest.mark.parametrize(
    ("name", "columns", "why"),
    [
        ("empty", (), "at least one is needed"),
        ("twice", (Field(name="a"), Field(name="a")), "each with a name of its own"),
        ("complex", (Field(name="a", dtype=torch.complex64),), "do not support"),
        ("hollow", (Field(name="a", shape=(3, 0)),), "empty dimension"),
        ("", (Field(name="a"),), "printable and of 1 to 200 bytes"),
        ("line\nbreak", (Field(name="a"),), "printable"),
        ("é" * 101, (Field(name="a"),), "200 bytes"),
    ],
)
def test_invalid_schemas_are_refused(name, columns, why):
    with pytest.raises(SchemaError, match=why):
        ExperienceSchema(name, columns)


def test_a_column_that_rayagi_did_not_create_is_refused():
    with pytest.raises(SchemaError, match="does not say which torch type"):
        ExperienceSchema.from_arrow(pa.schema([pa.field("a", pa.int8())]))


OTHERS = (
    ((("obs", torch.float32, (3, 6)),), r"has obs: float32\[3, 6\] where obs: float32\[3, 5\] is expected"),
    ((("obs", torch.float64, (3, 5)),), r"has obs: float64"),
    (
        (("obs", torch.float32, (3, 5)),),
        "has 1 field; expected 3:|has 3 fields; expected 1:",
    ),
)


@pytest.mark.parametrize(("columns", "why"), OTHERS)
def test_different_schemas_do_not_connect(columns, why):
    other = ExperienceSchema(
        "trajectory", tuple(Field(name=name, dtype=dtype, shape=shape) for name, dtype, shape in columns)
    )
    ring, consumer_endpoint = ProducerRing(SCHEMA, rows=1), ConsumerEndpoint(other)
    with pytest.raises(SchemaError, match=why) as caught:
        ring.attach(consumer_endpoint.endpoint)
    assert "use one version of the code on both sides" in str(caught.value) or "fields" in why
    assert ring.consumers() == ()


def test_different_channels_do_not_connect():
    consumer_endpoint = ConsumerEndpoint(ExperienceSchema("finals", SCHEMA.fields))
    with pytest.raises(SchemaError, match="belongs to channel 'finals'"):
        ProducerRing(SCHEMA, rows=1).attach(consumer_endpoint.endpoint)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"obs": torch.zeros(2, 3)}, r"obs is float32\[2, 3\] where 2 rows of obs: float32\[3, 5\] are"),
        ({"obs": torch.tensor(1.0)}, r"obs is float32\[\] where rows of"),
        ({"env": torch.zeros(3, dtype=torch.int64)}, r"env is int64\[3\] where 2 rows"),
        ({"done": torch.zeros(2, 3)}, r"done is float32\[2, 3\]"),
        ({"more": torch.zeros(2)}, "fields .*'more'.* were given where"),
    ],
)
def test_rows_of_other_shapes_or_types_are_refused(changed, why):
    ring, _ = pair()
    with pytest.raises(SchemaError, match=why):
        ring.put({**random_rows(SCHEMA, 2, 0), **changed}, version=0)


def test_a_batch_that_no_slot_holds_is_refused():
    ring, _ = pair(rows=4)
    for rows in (5, -1):
        with pytest.raises(SchemaError, match=f"a batch of {rows} rows: this ring's slots hold 4"):
            ring.reserve(rows)
    with pytest.raises(SchemaError, match="slots hold 4"):
        ring.put(random_rows(SCHEMA, 5, 0), version=0)


@pytest.mark.parametrize(
    "numbers", [{"rows": 0}, {"slots": 0}, {"credit": 0}, {"producer": -1}, {"producer": 256}]
)
def test_invalid_ring_sizes_are_refused(numbers):
    with pytest.raises(ValueError, match="must be at least 1"):
        ProducerRing(SCHEMA, **{"rows": 1, **numbers})


def test_a_ring_larger_than_memory_is_refused_in_terms_of_its_size():
    with pytest.raises(ChannelError, match=r"no \d+\.\d MiB for it .*: use fewer slots or smaller batches"):
        ProducerRing(SCHEMA, rows=2**20, slots=2**16)


def test_two_producers_of_one_number_are_refused():
    _, consumer_endpoint = pair(producer=3)
    twin = ProducerRing(SCHEMA, rows=1, producer=3)
    with pytest.raises(ChannelError, match="is its producer 3 already: give each a number of its own"):
        twin.attach(consumer_endpoint.endpoint)


def test_an_endpoint_that_is_no_consumer_is_refused(tmp_path):
    ring, consumer_endpoint = pair()
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("r+b") as file:
        other = f"/proc/self/fd/{file.fileno()}#1"
        for endpoint, why in (
            (ring.endpoint, "is not a channel of this version"),
            (other, "no longer exists"),
            ("/proc/self/fd/9999#1", "cannot open"),
            ("nonsense", "cannot open"),
            (consumer_endpoint.endpoint.split("#")[0], "cannot map"),
            (f"{consumer_endpoint.endpoint}1", "no longer exists"),
        ):
            with pytest.raises(ChannelError, match=why):
                ProducerRing(SCHEMA, rows=1, producer=9).attach(endpoint)


def test_at_most_sixteen_consumers_are_attached():
    ring = ProducerRing(SCHEMA, rows=1)
    consumer_endpoints = [ConsumerEndpoint(SCHEMA) for _ in range(17)]
    for consumer_endpoint in consumer_endpoints[:16]:
        ring.attach(consumer_endpoint.endpoint)
    with pytest.raises(ChannelError, match="16 consumers are attached already"):
        ring.attach(consumer_endpoints[16].endpoint)
    consumer_endpoints[5].close()
    assert ring.attach(consumer_endpoints[16].endpoint) == 5
