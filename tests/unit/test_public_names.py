"""Names that users and files know stay; new ones are written down on purpose."""

import json

import pytest

from tests.public_names import FILE, public_names

KEPT = json.loads(FILE.read_text())
ADVICE = "a name went, or a new one is not written down: python -m tests.public_names, and look at the change"


@pytest.mark.parametrize("kind", KEPT)
def test_names_are_those_that_were_written_down(kind):
    assert json.loads(json.dumps(public_names()[kind])) == KEPT[kind], ADVICE
