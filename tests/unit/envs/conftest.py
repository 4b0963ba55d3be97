"""Makes this folder's shared helpers importable, whatever pytest's import mode."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def one_torch_thread():
    """As a GMI of one core has it; more only wait for each other where the cores are busy."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(usual)
