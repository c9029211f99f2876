"""A comparison is a folder of ordinary runs that can be interrupted, resumed and read back."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from rich.console import Console

from rmt.cli import main
from rmt.errors import InputError, RunFailed
from rmt.experiments.compare import Comparison, compare, loss_at, results
from rmt.experiments.pool import Job, run_pool
from rmt.report.runs import Curve
from rmt.train.run import RunConfig, read_log

QUIET = Console(quiet=True)


@pytest.fixture
def comparison(model, train, dataset, tmp_path):
    return Comparison(["matrix", "vector"], model, train, dataset, tmp_path / "out", seeds=2)


@pytest.mark.slow
def test_a_comparison_runs_once_and_finished_runs_are_not_repeated(comparison):
    runs = compare(comparison, QUIET, workers=2, quiet=True)
    assert len(runs) == 4
    before = {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*") if path.is_file()}
    assert compare(comparison, QUIET, workers=2, quiet=True) == runs
    assert {path: path.stat().st_mtime_ns for run in runs for path in run.rglob("*") if path.is_file()} == before
    rows = results(runs)
    assert {row["stream"] for row in rows} == {"matrix", "vector"}
    for row in rows:
        losses = [read_log(run)[-1]["dev_ce"] for run in runs if run.parent.name == row["stream"]]
        assert row["loss_at_equal_tokens"] == pytest.approx(np.mean(losses))
        assert row["spread_at_equal_tokens"] == pytest.approx(np.std(losses, ddof=1))
        assert row["paper_loss"] in (3.4298, 3.3598)


@pytest.mark.slow
def test_every_stream_tries_all_learning_rates_and_keeps_its_best(comparison):
    from dataclasses import replace

    comparison = replace(comparison, seeds=1, learning_rates=(1e-2, 1e-6))
    runs = compare(comparison, QUIET, workers=2, quiet=True)
    assert [run.name for run in runs] == ["lr-0.01-seed-0"] * 2
    assert (comparison.out / "matrix" / "lr-1e-06-seed-0" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_killed_comparison_goes_on_where_it_stopped(model, train, dataset, tmp_path):
    job = tmp_path / "job.yaml"
    RunConfig(model, train.replace(steps=120, checkpoint_every=10), {"path": "", "fingerprint": ""}).save(job)
    command = [sys.executable, "-m", "rmt.cli", "compare", "--config", str(job), "--data", str(dataset)]
    command += ["--out", str(tmp_path / "out"), "--seeds", "1", "--json", "--workers", "1"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    run = tmp_path / "out" / "matrix" / "lr-0.01-seed-0"
    deadline = time.monotonic() + 300
    while len(read_log(run)) < 40:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert len(json.loads(answer.stdout)["results"]) == 2
    steps = [record["step"] for record in read_log(run) if "ce" in record]
    assert steps == list(range(1, 121))
    assert (tmp_path / "out" / "report.html").exists()


def test_a_run_that_fails_ends_the_pool_with_its_line(model, train, tmp_path):
    missing = {"path": str(tmp_path / "nowhere"), "fingerprint": ""}
    with pytest.raises(RunFailed, match="is not a token dataset"):
        run_pool([Job(tmp_path / "run", RunConfig(model, train, missing))], workers=1, threads=1, console=QUIET)


def test_another_comparison_in_the_same_folder_is_refused(comparison, model):
    from dataclasses import replace

    from rmt.experiments.compare import plan

    plan(comparison)
    with pytest.raises(InputError, match="holds another comparison"):
        plan(replace(comparison, base=model.replace(key_dim=4)))


def test_losses_are_read_off_between_evaluations_and_never_beyond():
    curve = Curve(*(np.array([1.0, 2.0, 3.0]) for _ in range(4)), np.array([4.0, 3.0, 2.5]), None)
    assert loss_at(curve, "tokens", 1.5) == 3.5
    assert loss_at(curve, "seconds", 3.0) == 2.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--streams matrix,vectr --preset rmt-tiny --data D --out O", "Did you mean 'vector'"),
        ("--streams matrix,matrix --preset rmt-tiny --data D --out O", "name each stream once"),
        ("--preset rmt-tiny --data D", "give --out"),
        ("--preset rmt-tiny --out O", "give --data"),
        ("--data D --out O", "which dimensions"),
        ("--preset rmt-tiny --data D --out O --seeds 0", "at least one"),
        ("--preset rmt-tiny --data D --out O --lr fast", "write numbers with commas"),
        ("--preset rmt-tiny --data D --out O", "D is not a token dataset"),
    ],
)
def test_bad_input_is_one_clear_line(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
