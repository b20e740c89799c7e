"""Every example that fuzzing begins with, and whatever it once found, behaves."""

import pytest

from tests.fuzz.targets import CORPUS, TARGETS

EXAMPLES = sorted(path for path in CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_example_is_taken_or_refused_in_words(path):
    TARGETS[path.parent.name](path.read_bytes())


def test_every_target_has_examples():
    assert {path.parent.name for path in EXAMPLES} == set(TARGETS)
