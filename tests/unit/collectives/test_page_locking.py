"""Page-locking with a stand-in for torch: what CUDA is asked, and that a refusal does not reach the caller's next launch."""

from types import SimpleNamespace

import pytest

from collectives import page_locking
from collectives.transports.shm import staging


@pytest.fixture
def asked(monkeypatch):
    """Calls, and a CUDA whose last error the next launch reports."""
    calls, state = [], SimpleNamespace(status=0, error=False)

    def register(*given):
        calls.append(given)
        state.error = state.status != 0
        return state.status

    def zeros(*_, **__):
        if state.error:
            state.error = False  # torch clears it when it raises
            raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")
        return SimpleNamespace(add_=lambda _: None)

    cuda = SimpleNamespace(
        cudart=lambda: SimpleNamespace(cudaHostRegister=register), is_initialized=lambda: True
    )
    monkeypatch.setattr(page_locking, "torch", SimpleNamespace(cuda=cuda, zeros=zeros))
    return SimpleNamespace(calls=calls, state=state)


def test_memory_is_registered_with_its_flags(asked):
    flags = page_locking.PORTABLE | page_locking.MAPPED
    assert page_locking.page_lock(4096, 64, flags) == 0
    assert asked.calls == [(4096, 64, 3)]


def test_a_refusal_is_returned_and_leaves_no_error_for_the_next_launch(asked):
    asked.state.status = 712
    assert page_locking.page_lock(4096, 64) == 712
    assert not asked.state.error


@pytest.mark.parametrize("refused", [False, True])
def test_the_staging_memory_of_a_transport_is_locked_in_the_same_way_and_used_without_it(
    asked, monkeypatch, caplog, refused
):
    """As in WSL, which refuses it: copies are then not asynchronous."""
    unlocked = []
    monkeypatch.setattr(staging, "unlock", unlocked.append)
    piece = SimpleNamespace(data_ptr=lambda: 4096)
    own = staging.Staging([SimpleNamespace(pieces=[piece, piece])], rank=0)
    on_device = SimpleNamespace(is_cuda=True)
    asked.state.status = 801 if refused else 0
    own.pin(on_device)
    own.pin(on_device)  # once
    assert asked.calls == [(4096, 2 * staging.STAGING_BUFFER_BYTES, 0)]
    assert not asked.state.error
    assert ("not page-locked (error 801)" in caplog.text) is refused
    own.close()
    own.close()
    assert unlocked == ([] if refused else [4096])
