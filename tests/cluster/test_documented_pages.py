"""Pages of the documentation whose commands start Ray, from the first command to the last."""

import pytest

from tests.documents import PAGES, ROOT, is_local, run_page, starts_ray

OWN_TEST = "docs/tutorials/own-task.md"
"""Has a test that looks at what it leaves: test_tutorial_own_task.py."""
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES if starts_ray(page)]

pytestmark = pytest.mark.cluster


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name in NAMES if name != OWN_TEST])
def test_a_pages_commands_run_in_order(name, tmp_path):
    run_page(ROOT / name, tmp_path)


def test_the_readmes_program_runs(tmp_path):
    run_page(ROOT / "README.md", tmp_path, lambda block: is_local(block) and not block.takes("slow"))
