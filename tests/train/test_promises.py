"""The documentation of scaling and reliability says what the code does and names tests that exist."""

import re
from pathlib import Path

import pytest

from rmt.config import PAPER_PRESETS
from rmt.train.gpus import GPUS, hours, largest_micro_batch, tables, training_bytes

ROOT = Path(__file__).resolve().parents[2]


def test_every_promise_names_a_test_that_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/reliability.md").read_text()))
    written = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert len(named) > 25
    assert [name for name in sorted(named) if f"def {name}(" not in written] == []


def test_the_tables_of_the_documentation_are_what_the_code_computes():
    text = (ROOT / "docs/scaling.md").read_text()
    for table in tables().split("\n\n"):
        assert table in text, "write the output of `python -m rmt.train.gpus` to docs/scaling.md"


@pytest.mark.parametrize("name", PAPER_PRESETS)
def test_more_or_faster_gpus_take_less_time_and_memory(name):
    assert hours(name, GPUS[0], 0.4, gpus=8) == pytest.approx(hours(name, GPUS[0], 0.4) / 8)
    assert [hours(name, gpu, 0.4) for gpu in GPUS] == sorted((hours(name, gpu, 0.4) for gpu in GPUS), reverse=True)
    assert training_bytes(name, 4, processes=8) < training_bytes(name, 4)
    assert largest_micro_batch(name, 1e6) == 0
    assert training_bytes(name, largest_micro_batch(name, 24e9)) <= 24e9
