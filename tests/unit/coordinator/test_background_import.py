"""A module is imported in the background and is complete at the end of the block."""

import sys
import threading
from types import SimpleNamespace

import pytest

from rayagi.coordinator.cluster import import_in_background

LIMIT_S = 20.0


@pytest.fixture
def slow_module(tmp_path, monkeypatch):
    """A module whose import waits for ``go`` and says which thread imports it."""
    (tmp_path / "slow_one.py").write_text(
        "import threading, gate\ngate.began.set()\nassert gate.go.wait(20)\nTHREAD = threading.current_thread()\n"
    )
    gate = SimpleNamespace(began=threading.Event(), go=threading.Event(), name="slow_one")
    monkeypatch.setitem(sys.modules, "gate", gate)
    monkeypatch.syspath_prepend(tmp_path)
    yield gate
    sys.modules.pop("slow_one", None)


def test_the_block_runs_meanwhile_and_its_end_waits(slow_module):
    with import_in_background(slow_module.name):
        assert slow_module.began.wait(LIMIT_S)
        assert not hasattr(sys.modules["slow_one"], "THREAD")
        slow_module.go.set()
    assert sys.modules["slow_one"].THREAD is not threading.current_thread()


def test_what_the_block_raises_leaves_no_thread(slow_module):
    slow_module.go.set()
    with pytest.raises(ValueError, match="of the block"), import_in_background(slow_module.name):
        raise ValueError("of the block")
    assert not [thread for thread in threading.enumerate() if thread.name == "import slow_one"]


def test_what_cannot_be_imported_is_said_where_it_is_needed():
    with import_in_background("no_such_module_anywhere"):
        pass
    with pytest.raises(ModuleNotFoundError):
        import no_such_module_anywhere  # noqa: F401
