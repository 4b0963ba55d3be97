"""Fixtures of every test."""

import runpy
from pathlib import Path

import hypothesis
import pytest

from tests.signals import default_signals as default_signals_block

# A busy machine delays an example by any time: no test is about that.
hypothesis.settings.register_profile("rayagi", deadline=None)
hypothesis.settings.load_profile("rayagi")

# MuJoCo chooses how it draws when it is imported, which in some tests is before rayagi.envs is.
runpy.run_path(str(Path(__file__).parents[1] / "rayagi" / "envs" / "opengl.py"))


@pytest.fixture
def default_signals():
    """Ctrl-C and a hangup reach this test and what it starts, though the tests run in the background or under nohup."""
    with default_signals_block():
        yield


@pytest.fixture
def one_torch_thread():
    """As a GMI of one core has it; networks of tests are so small that more threads only wait for each other."""
    import torch  # which some tests must not import

    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)
