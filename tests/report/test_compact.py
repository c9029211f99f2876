"""Compact runs are run directories: the same report comes out of them, and nothing of the machine goes in."""

from pathlib import Path

import numpy as np
import pytest
from test_report import make_run

from rmt.cli import main
from rmt.errors import InputError
from rmt.report.compact import compact
from rmt.report.runs import load_run


def test_a_compact_run_says_the_same_in_less(tmp_path):
    original = make_run(tmp_path / "sweep" / "matrix" / "seed-0", done=500)
    config = original / "config.yaml"
    config.write_text(config.read_text().replace("path: data", f"path: {tmp_path}/tokens"))
    (copy,) = compact(tmp_path / "sweep", tmp_path / "kept")
    assert copy == tmp_path / "kept" / "matrix" / "seed-0"
    before, after = load_run(original), load_run(copy)
    assert after.config.model == before.config.model
    assert after.config.train == before.config.train
    np.testing.assert_allclose(after.evaluations["dev_ce"], before.evaluations["dev_ce"], rtol=1e-6)
    assert after.step == before.step
    assert len(after.steps["step"]) == 50
    assert np.mean(after.steps["ce"]) == pytest.approx(np.mean(before.steps["ce"]), rel=1e-6)
    assert str(tmp_path) not in "".join(path.read_text() for path in (tmp_path / "kept").rglob("*") if path.is_file())


def test_the_command_keeps_the_runs(tmp_path, capsys):
    make_run(tmp_path / "sweep" / "a")
    target = tmp_path / "kept"
    assert main(["report", str(tmp_path / "sweep"), "--out", str(tmp_path / "r.html"), "--compact", str(target)]) == 0
    assert (target / "a" / "metrics.jsonl").is_file()


def test_runs_are_not_copied_into_themselves(tmp_path):
    make_run(tmp_path / "sweep" / "a")
    with pytest.raises(InputError, match="outside"):
        compact(tmp_path / "sweep", Path(tmp_path / "sweep" / "kept"))
