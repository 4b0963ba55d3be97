import os

import placement.inventory.limits
from rayagi.run.versions import usable_cores


def test_a_containers_quota_counts_as_the_plan_counts_it(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(placement.inventory.limits, "cpu_quota_cores", lambda root: 2.5)
    assert usable_cores() == 2
    monkeypatch.setattr(placement.inventory.limits, "cpu_quota_cores", lambda root: None)
    assert usable_cores() == 16
