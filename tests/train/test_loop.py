"""Whole runs: exact resume, what a run directory holds, bad input, signals, damaged checkpoints."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from conftest import small_model, small_train, write_corpus
from rmt.cli import main
from rmt.data import prepare
from rmt.errors import InputError, RunFailed
from rmt.train import checkpoint
from rmt.train.loop import train
from rmt.train.run import RunConfig, RunDirectory, read_log


def assert_same_run(first: Path, second: Path) -> None:
    """Metrics, weights, moments and random states, byte for byte."""
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()
    newest = [checkpoint.listing(run / "checkpoints")[-1] for run in (first, second)]
    assert newest[0].name == newest[1].name
    for name in checkpoint.FILES:
        assert (newest[0] / name).read_bytes() == (newest[1] / name).read_bytes(), name


@pytest.mark.parametrize("stop", [1, 5, 6, 11])
def test_a_run_stopped_and_resumed_equals_one_that_was_not(model_config, dataset, tmp_path, stop):
    train(model_config, small_train(), dataset, tmp_path / "whole")
    result = train(model_config, small_train(stop_at=stop), dataset, tmp_path / "parts")
    assert (result.step, result.finished) == (stop, False)
    result = train(model_config, small_train(), dataset, tmp_path / "parts", resume=True)
    assert result.finished
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    "changes",
    [{"micro_batch": 1}, {"recompute": "full"}, {"document_mask": True}, {"micro_batch": 2, "recompute": "full"}],
)
def test_resume_is_exact_with_accumulation_recomputation_and_document_masks(model_config, dataset, tmp_path, changes):
    train(model_config, small_train(**changes), dataset, tmp_path / "whole")
    train(model_config, small_train(**changes, stop_at=7), dataset, tmp_path / "parts")
    train(model_config, small_train(**changes), dataset, tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_run_directory_holds_what_the_documentation_says(dataset, tmp_path):
    run = tmp_path / "run"
    result = train(small_model(), small_train(tensorboard=True), dataset, run)
    assert RunConfig.load(run / "config.yaml").model == small_model()
    steps = [record for record in read_log(run) if "ce" in record]
    evaluations = [record for record in read_log(run) if "dev_ce" in record]
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert [record["step"] for record in evaluations] == [5, 10, 12]
    assert steps[-1]["tokens"] == 12 * 4 * 16 == result.tokens
    assert [path.name for path in checkpoint.listing(run / "checkpoints")] == [
        "step-00000004",
        "step-00000008",
        "step-00000012",
    ]
    environment = json.loads((run / "environment.json").read_text())
    assert environment["versions"]["torch"]
    assert "=== step 6" in (run / "samples.txt").read_text()
    assert (run / "loss.png").stat().st_size > 1000
    assert list(run.glob("events*"))
    assert len(read_log(run, "timing")) == 12


def test_only_the_last_few_and_the_best_checkpoint_are_kept(dataset, tmp_path):
    settings = small_train(steps=12, eval_every=2, checkpoint_every=2, keep=2, lr=0.5, sample_every=0)
    train(small_model(), settings, dataset, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    kept = checkpoint.listing(folder)
    best = checkpoint.pointed(folder, "best")
    assert checkpoint.pointed(folder, "latest") == kept[-1]
    assert best in kept
    assert len(kept) in (2, 3)
    dev = {record["step"]: record["dev_ce"] for record in read_log(tmp_path / "run") if "dev_ce" in record}
    assert int(best.name.removeprefix("step-")) == min(dev, key=dev.__getitem__)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_checkpoint_is_named_and_the_previous_one_used(dataset, tmp_path, name, damage):
    run = tmp_path / "run"
    train(small_model(), small_train(steps=12), dataset, tmp_path / "whole")
    train(small_model(), small_train(stop_at=9), dataset, run)
    newest = checkpoint.listing(run / "checkpoints")[-1]
    file = newest / name
    content = bytearray(file.read_bytes())
    if damage == "remove":
        file.unlink()
    elif damage == "truncate":
        file.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 3] ^= 0x10
        file.write_bytes(content)
    found, problems = checkpoint.newest(run / "checkpoints")
    if found.step == 9:  # a flipped bit inside a JSON number or text that still parses
        assert name == "state.json"
        return
    assert found.step == 8
    assert str(file) in problems[0]
    train(small_model(), small_train(), dataset, run, resume=True)
    assert_same_run(tmp_path / "whole", run)


def test_two_processes_cannot_write_one_run(dataset, tmp_path):
    with RunDirectory(tmp_path / "run"), pytest.raises(InputError, match=f"is being written by process {os.getpid()}"):
        train(small_model(), small_train(), dataset, tmp_path / "run")


def test_sigterm_saves_a_checkpoint_and_the_resumed_run_is_the_same(dataset, tmp_path):
    settings = small_train(steps=400, eval_every=100, checkpoint_every=150, sample_every=0)
    config = RunConfig(small_model(), settings, {"path": str(dataset), "fingerprint": ""})
    config.save(tmp_path / "job.yaml")
    command = [sys.executable, "-m", "rmt.cli", "train", "--config", str(tmp_path / "job.yaml")]
    command += ["--data", str(dataset), "--out", str(tmp_path / "run"), "--quiet"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    wait_for(lambda: len(read_log(tmp_path / "run")) > 10)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    reached = checkpoint.newest(tmp_path / "run" / "checkpoints")[0].step
    assert reached == [record["step"] for record in read_log(tmp_path / "run") if "ce" in record][-1]
    assert 10 < reached < 400
    subprocess.run([*command, "--resume"], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    subprocess.run(
        [*command[:-3], "--out", str(tmp_path / "whole"), "--quiet"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def test_a_loss_that_is_not_finite_stops_the_run_or_is_skipped(dataset, tmp_path):
    wild = small_train(lr=1e30, clip=1e30, warmup=0.0)
    with pytest.raises(RunFailed, match=r"the weights were not changed.*train\.on_nan skip"):
        train(small_model(), wild, dataset, tmp_path / "stop")
    result = train(small_model(), wild.replace(on_nan="skip"), dataset, tmp_path / "skip")
    assert result.finished


def test_resuming_with_other_settings_or_data_is_refused_with_the_difference(dataset, tmp_path):
    run = tmp_path / "run"
    train(small_model(), small_train(stop_at=4), dataset, run)
    with pytest.raises(InputError, match=r"train\.lr: 0\.01 -> 0\.02"):
        train(small_model(), small_train(lr=2e-2), dataset, run, resume=True)
    with pytest.raises(InputError, match=r"model\.key_dim: 8 -> 16"):
        train(small_model().replace(key_dim=16), small_train(), dataset, run, resume=True)
    prepare([write_corpus(tmp_path / "text", seed=1)], "train:300", tmp_path / "other", dev=0.1, workers=1)
    with pytest.raises(InputError, match="other tokens"):
        train(small_model(), small_train(), tmp_path / "other", run, resume=True)
    with pytest.raises(InputError, match="holds a run already: add --resume"):
        train(small_model(), small_train(), dataset, run)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--preset rmt-tiny --out RUN", "which data? Give --data"),
        ("--data DATA --out RUN", "which model? Give --preset"),
        ("--preset rmt-tiny --data DATA", "Give --out RUN"),
        ("--preset rmt-tinny --data DATA --out RUN", "Did you mean 'rmt-tiny'"),
        ("--preset rmt-tiny --data nowhere --out RUN", "nowhere is not a token dataset"),
        ("--preset rmt-tiny --data DATA --out RUN --train.steps 0", "steps = 0"),
        ("--preset rmt-tiny --data DATA --out RUN --train.lr -1", "lr = -1"),
        ("--preset rmt-tiny --data DATA --out RUN --train.lrr 1", "Did you mean '--train.lr'"),
        ("--preset rmt-tiny --data DATA --out RUN --model.vocab_size 8", "set model.vocab_size to"),
        ("--preset rmt-tiny --data DATA --out RUN --model.context 99999", "99999"),
        ("--preset rmt-tiny --data DATA --out RUN --config none.yaml", "cannot read none.yaml"),
        ("--preset rmt-tiny --data DATA --out RUN --train.stop_at 9999", "lies behind the last step"),
        ("--preset rmt-tiny --data DATA --out /dev/null/run", "cannot write the run"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_status_two(dataset, tmp_path, capsys, flags, message):
    arguments = [word.replace("DATA", str(dataset)).replace("RUN", str(tmp_path / "run")) for word in flags.split()]
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_an_unknown_key_in_a_file_is_met_with_the_nearest(dataset, tmp_path, capsys):
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"train": {"stepps": 3}}))
    flags = ["--config", str(tmp_path / "job.yaml"), "--data", str(dataset), "--out", str(tmp_path / "run")]
    assert main(["train", *flags]) == 2
    assert "Did you mean 'steps'" in capsys.readouterr().err


def test_a_dry_run_says_what_it_costs_and_writes_nothing(dataset, tmp_path, capsys):
    flags = ["--preset", "rmt-tiny", "--data", str(dataset), "--train.steps", "10", "--dry-run", "--json"]
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["params"] == 667_584
    assert found["steps"] == 10
    assert found["seconds"] > 0
    assert sorted(tmp_path.rglob("*")) == before
