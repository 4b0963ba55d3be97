"""Pages of the documentation whose commands start Ray, from the first command to the last."""

import pytest

from tests.documents import PAGES, ROOT, run_page, starts_ray

OWN_TEST = "docs/tutorials/own-task.md"
"""Has a test that looks at what it leaves: test_tutorial_own_task.py."""
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES if starts_ray(page)]


SHORT = "README.md"


@pytest.mark.cluster
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == SHORT else pytest.mark.slow)
        for name in NAMES
        if name != OWN_TEST
    ],
)
def test_a_pages_commands_run_in_order(name, tmp_path):
    run_page(ROOT / name, tmp_path)
