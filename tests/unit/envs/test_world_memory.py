"""Worlds that do not fit into memory are rejected before allocation."""

import pytest
import torch

from rayagi.envs import make_env_factory
from rayagi.envs.errors import MemoryShortError
from rayagi.envs.tasks import provider
from rayagi.envs.tasks.provider import check_fits


def test_too_many_worlds_are_rejected_with_the_number_that_fits(monkeypatch):
    monkeypatch.setattr(provider, "free_bytes", lambda device: 10_000_000_000)
    check_fits("mujoco_warp", 5000, 2_000_000, torch.device("cpu"))
    with pytest.raises(MemoryShortError) as caught:
        check_fits("mujoco_warp", 8192, 2_000_000, torch.device("cpu"))
    assert str(caught.value) == (
        "mujoco_warp needs 16.4 GB for 8,192 worlds, and 10.0 GB are free on cpu: at most 5,000 fit; lower num_envs"
    )


def test_the_engine_checks_memory_before_it_allocates_worlds(monkeypatch):
    monkeypatch.setattr(provider, "free_bytes", lambda device: 1_000_000)
    factory = make_env_factory("rayagi/Ant-v0", engine="mujoco_cpu")
    with pytest.raises(MemoryShortError, match=r"mujoco_cpu needs .* GB for 10,000 worlds"):
        factory(num_envs=10_000, first_env_index=0, seed=0, num_threads=1)
    factory(num_envs=10, first_env_index=0, seed=0, num_threads=1).close()
