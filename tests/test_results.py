"""docs/results.md says what the kept runs say: rebuilt from results/, the page is the same, byte for byte."""

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
