"""Page-locking with a stand-in for torch: what CUDA is asked, and that a refusal does not reach the caller's next launch."""

from types import SimpleNamespace

import pytest

from collectives import page_locking


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
