"""The histogram of policy lags when learners are restarted."""

from types import SimpleNamespace

from rayagi.coordinator import recovery as module
from rayagi.coordinator.recovery import Recovery

BOOKS = {"taken": 0, "dropped": 0, "received": {}}
HOSTING = {"simulator": (0,), "trainer": (1, 2)}


def test_restarted_learners_count_each_lag_once(monkeypatch):
    built = {}
    monkeypatch.setattr(module, "restart", lambda *whose: None)
    monkeypatch.setattr(Recovery, "_states", lambda self, indices: [])
    monkeypatch.setattr(Recovery, "_build", lambda self, index, state: built.update({index: state["local"]}))
    recovery = Recovery(
        spec=None,
        plan=SimpleNamespace(hosting=HOSTING.get),
        deployment=SimpleNamespace(group=None, reservation=None),
        pending_calls=SimpleNamespace(is_busy=lambda index, kind: False, discard=lambda index: None),
        factory=None,
        log=lambda message: None,
    )
    for index, lags in ((1, {0: 4, 1: 1}), (2, {1: 2})):
        local = {"lags": lags, "books": BOOKS}
        recovery.record_state(index, {"shared": {"iteration": 3}, "local": local})
    recovery.restart_lost(RuntimeError("lost"), 1)
    for index, local in built.items():
        recovery.record_state(index, {"local": {**local, "books": BOOKS}})
    assert recovery.lags() == {0: 4, 1: 3}
