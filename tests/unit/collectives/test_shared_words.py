"""Shared words on processors that reorder accesses: both access methods, on this one, under all that uses them."""

import platform

import pytest
import torch
from experience.channel_cases import SCHEMA, random_rows
from test_shm_kernel import close, group

from collectives import kernels
from collectives import shared_words as module
from collectives.experience.consumer_endpoint import ConsumerEndpoint
from collectives.experience.errors import ChannelError
from collectives.experience.parameters import ParameterStore
from collectives.experience.producer_ring import ProducerRing
from collectives.shared_words import AtomicWords, FencedWords, atomic_words, fenced_words, unsupported_reason
from collectives.transports.shm import kernel
from tests.threads import in_threads

LIMIT_S = 30.0


@pytest.fixture(params=[AtomicWords, FencedWords])
def ordered(request, monkeypatch):
    """As on such a processor, with or without a compiler."""
    made = atomic_words() if request.param is AtomicWords else fenced_words()
    if made is None:
        pytest.skip("NOT TESTED: this system forbids membarrier")
    monkeypatch.setattr(module, "_select_access", lambda: made)
    return request.param


def test_words_hold_what_is_stored(ordered):
    memory = memoryview(bytearray(32)).cast("Q")
    words = module.shared_words(memory)
    assert isinstance(words, ordered)
    words[0], words[3] = 2**64 - 1, 5
    words[3] += 1
    assert [words[index] for index in range(len(words))] == list(memory) == [2**64 - 1, 0, 0, 6]


def test_channels_start_and_carry_batches(ordered):
    consumer_endpoint, ring = ConsumerEndpoint(SCHEMA), ProducerRing(SCHEMA, rows=8, slots=2)
    ring.attach(consumer_endpoint.endpoint)
    for version in range(5):
        rows = random_rows(SCHEMA, 8, version)
        ring.put(rows, version, timeout_s=LIMIT_S)
        with consumer_endpoint.take(LIMIT_S) as batch:
            assert batch.version == version
            for name, tensor in rows.items():
                torch.testing.assert_close(batch[name], tensor, rtol=0, atol=0, equal_nan=True)
    ring.close()
    consumer_endpoint.close()


def test_parameters_are_published_and_read(ordered):
    with (
        ParameterStore.host({"flat": torch.zeros(100)}) as parameter_store,
        ParameterStore.attach(parameter_store.endpoint) as reader,
    ):
        parameter_store.publish({"flat": torch.arange(100.0)}, version=3)
        found = {"flat": torch.zeros(100)}
        assert reader.wait(3, LIMIT_S) == reader.read_into(found) == 3
        assert torch.equal(found["flat"], torch.arange(100.0))


@pytest.mark.parametrize("compiled", [True, False])
def test_members_reduce(ordered, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(kernel, "announce_kernel", lambda *arguments: None)
        monkeypatch.setattr("collectives.transports.shm.transport.announce_kernel", lambda *arguments: None)
    transports = group(3)
    assert [transport._kernel is not None for transport in transports] == [compiled] * 3
    tensors = [torch.full((50_000,), float(rank)) for rank in range(3)]

    def reduce(rank):
        for _ in range(20):
            transports[rank].all_reduce(tensors[rank], "max")
            transports[rank].barrier()

    assert in_threads([lambda rank=rank: reduce(rank) for rank in range(3)]) == [None] * 3
    assert all(tensor.eq(2.0).all() for tensor in tensors)
    close(transports)


@pytest.fixture
def on_arm(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    module._select_access.cache_clear()
    kernels._log_once.cache_clear()
    yield
    module._select_access.cache_clear()


def words_here():
    return type(module.shared_words(memoryview(bytearray(8)).cast("Q")))


def test_arm_uses_compiled_atomics(on_arm):
    assert words_here() is AtomicWords
    assert not unsupported_reason()


def test_arm_without_a_compiler_uses_membarrier_and_logs_it(on_arm, monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert words_here() is FencedWords
    assert not unsupported_reason()
    (warning,) = caplog.messages
    assert "no C compiler (looked for no-such-compiler)" in warning


def test_with_neither_a_channel_says_what_to_install(on_arm, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(module, "SYSCALL_NUMBERS", None)
    assert "shared memory on aarch64 needs a C compiler" in unsupported_reason()
    with pytest.raises(ChannelError, match="install a compiler or set CC"):
        ProducerRing(SCHEMA, rows=8)
