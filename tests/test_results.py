"""The pages say what the kept results say: rebuilt, docs/results.md and the tables of docs/performance.md are the same,
byte for byte."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_page_of_results_is_rebuilt_byte_for_byte(tmp_path):
    command = [sys.executable, str(ROOT / "results" / "build.py"), "--docs", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert (tmp_path / "results.md").read_bytes() == (ROOT / "docs" / "results.md").read_bytes()
    drawn = {path.name for path in (tmp_path / "images").iterdir()}
    assert drawn == {path.name for path in (ROOT / "docs" / "images").glob("results_*")}


def test_the_tables_of_the_page_of_speeds_are_those_of_the_kept_results():
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"]
    subprocess.run(command, check=True, timeout=120)
