"""A GPU is lent for minutes: a test that hangs is given up, and later tests name an error of CUDA that is not theirs."""

from pathlib import Path

import pytest
import torch

LIMIT_S = 240


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture(autouse=True)
def _usable_gpu():
    """CUDA reports some errors again in all calls that follow in a process."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            pytest.fail(f"an earlier test left the GPU unusable in this process: {reason}", pytrace=False)
