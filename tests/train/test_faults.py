"""Signals, full disks, locks, losses that are not finite, changed data: each with real processes."""

import json
import math
import os
import signal
import time
from pathlib import Path

import pytest
from small_runs import assert_same_run, command, small_model, small_train, write_corpus

from rmt.config import TrainConfig
from rmt.data import Order, TokenDataset, prepare
from rmt.errors import InputError, RunFailed
from rmt.model import build
from rmt.train import checkpoint
from rmt.train.faults import FEWEST, WINDOW, Guard
from rmt.train.loop import train
from rmt.train.run import RunDirectory, read_log
from rmt.train.step import Stepper
from strategies import tokens

RESUME = ("matrix", "--resume")
QUIET = {"sample_every": 0}

#: Phase: where the signal comes, and the step whose checkpoint must be there afterwards.
PHASES = {
    "start-up: the model is built": ({"where": "rmt.train.loop:build"}, 0),
    "start-up: a checkpoint is looked for": ({"where": "rmt.train.checkpoint:newest"}, 0),
    "start-up: the machine is measured": ({"where": "rmt.train.loop:matmul_peak"}, 0),
    "warm-up: the first step": ({"where": "rmt.train.step:Stepper.step"}, 1),
    "a step": ({"where": "rmt.train.step:Stepper.step", "call": 7}, 7),
    "the update": ({"where": "rmt.train.step:set_learning_rate", "call": 3}, 3),
    "an evaluation": ({"where": "rmt.train.loop:split_loss", "call": 1}, 5),
    "the copy for a checkpoint": ({"where": "rmt.train.checkpoint:take_snapshot", "call": 2}, 8),
    "the writing of a checkpoint": ({"where": "rmt.train.checkpoint:write_tensors", "call": 1}, None),
}


def last_step(run: Path) -> int:
    return checkpoint.newest(run / "checkpoints")[0].step


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_in_every_phase_saves_and_the_resumed_run_is_the_same(processes, dataset, tmp_path, phase):
    where, step = PHASES[phase]
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = small_train(**QUIET)
    job = processes.run(tmp_path, command(run, dataset, settings), signals=[where])
    assert job.status == 128 + signal.SIGTERM, job.text()
    assert last_step(run) == step if step is not None else last_step(run) >= 4
    job = processes.run(tmp_path, command(run, dataset, settings, *RESUME), command(whole, dataset, settings))
    assert job.status == 0, job.text()
    assert_same_run(whole, run)


@pytest.mark.slow
def test_sigterm_while_torch_compiles_saves_after_that_step(processes, dataset, tmp_path):
    where = {"where": "torch._inductor.compile_fx:compile_fx"}
    settings = small_train(steps=3, compile=True, deterministic=False, **QUIET)
    train = command(tmp_path / "run", dataset, settings, "vector", "--model.layers", "1")
    job = processes.start(tmp_path, train, signals=[where])
    assert job.wait(500) == 128 + signal.SIGTERM, job.text()
    assert last_step(tmp_path / "run") == 1


def test_sigint_has_its_own_exit_status_and_a_second_signal_ends_the_process_at_once(processes, dataset, tmp_path):
    once = {"where": "rmt.train.step:Stepper.step", "call": 2, "number": int(signal.SIGINT)}
    job = processes.run(tmp_path, command(tmp_path / "one", dataset, small_train()), signals=[once])
    assert job.status == 130, job.text()
    assert last_step(tmp_path / "one") == 2
    job = processes.run(tmp_path, command(tmp_path / "two", dataset, small_train()), signals=[once, once])
    assert job.status == 130
    assert not (tmp_path / "two" / "checkpoints").exists()


def test_a_full_disk_keeps_the_old_checkpoint_and_ends_with_one_line(processes, dataset, tmp_path):
    """A limit on the size of files has the effect of a full disk, and needs no rights: the write fails half-way."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = small_train(**QUIET)
    job = processes.run(tmp_path, command(run, dataset, settings.replace(stop_at=4)), command(whole, dataset, settings))
    assert job.status == 0, job.text()
    size = (run / "checkpoints/step-00000004/optimizer.safetensors").stat().st_size
    job = processes.run(tmp_path / "full", command(run, dataset, settings, *RESUME), file_limit=size // 2)
    assert job.status == 1
    assert job.text().count("\n") == 1, job.text()
    assert "a checkpoint could not be written" in job.text()
    assert "go on with --resume" in job.text()
    assert [path.name for path in (run / "checkpoints").glob("[.s]*")] == ["step-00000004"]
    assert processes.run(tmp_path, command(run, dataset, settings, *RESUME)).status == 0
    assert_same_run(whole, run)


def test_a_full_disk_under_the_log_also_ends_with_one_line(processes, dataset, tmp_path):
    settings = small_train(steps=60, checkpoint_every=60, eval_every=60, **QUIET)
    job = processes.run(tmp_path, command(tmp_path / "run", dataset, settings), file_limit=3000)
    assert job.status == 1
    assert job.text().count("\n") == 1, job.text()
    assert "cannot go on" in job.text()


def test_two_processes_cannot_write_one_run_and_a_dead_one_leaves_no_lock(processes, dataset, tmp_path):
    run = tmp_path / "run"
    settings = small_train(steps=100_000, checkpoint_every=10, keep=1, eval_every=10**6, **QUIET)
    first = processes.start(tmp_path / "first", command(run, dataset, settings))
    deadline = time.monotonic() + 120
    while not checkpoint.listing(run / "checkpoints"):
        assert first.poll() is None, first.text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    second = processes.run(tmp_path / "second", command(run, dataset, settings, *RESUME))
    assert second.status == 2
    assert f"is being written by process {first.pid} on " in second.text()
    assert first.poll() is None
    first.kill()
    first.wait()
    third = processes.run(tmp_path / "third", command(run, dataset, settings, *RESUME, "--train.stop_at", "1"))
    assert third.status == 0, third.text()


def test_the_holder_of_the_lock_is_named(dataset, tmp_path):
    with RunDirectory(tmp_path / "run"), pytest.raises(InputError, match=f"is being written by process {os.getpid()}"):
        train(small_model(), small_train(), dataset, tmp_path / "run")


def test_a_nan_stops_the_run_with_a_record_and_a_checkpoint_and_can_be_skipped(processes, dataset, tmp_path):
    run = tmp_path / "run"
    settings = small_train(**QUIET)
    job = processes.run(tmp_path / "stop", command(run, dataset, settings), poison=[6])
    assert job.status == 1
    assert job.text().count("\n") == 1, job.text()
    assert "step 7: the loss is nan" in job.text()
    assert "train.on_nan skip" in job.text()
    assert last_step(run) == 6
    record = json.loads((run / "faults" / "step-00000007.json").read_text())
    data = TokenDataset.open(dataset)
    order = Order(data.fingerprint, data.windows("train", 16), batch_size=4, seed=settings.seed)
    assert record["windows"] == order.window_ids(6).tolist()
    assert math.isnan(record["loss"])
    assert "unembedding.weight_WD" in record["not_finite"]["gradients"]
    assert record["not_finite"]["weights"] == []

    skip = ("--train.on_nan", "skip")
    job = processes.run(tmp_path, command(run, dataset, settings, *RESUME, *skip), poison=[6])
    assert job.status == 0, job.text()
    assert [record["step"] for record in read_log(run) if "refused" in record] == [7]
    weights = checkpoint.newest(run / "checkpoints")[0].tensors["model.safetensors"]
    assert all(bool(weight.isfinite().all()) for weight in weights.values())


def test_too_many_skipped_steps_in_a_row_stop_the_run(processes, dataset, tmp_path):
    settings = small_train(on_nan="skip", skip_limit=3, **QUIET)
    job = processes.run(tmp_path, command(tmp_path / "run", dataset, settings), poison=[2, 4, 5, 6])
    assert job.status == 1
    assert "step 7:" in job.text()
    assert "2 steps before" in job.text()
    assert last_step(tmp_path / "run") == 6


def test_a_loss_that_is_not_finite_never_reaches_the_weights(dataset, tmp_path):
    wild = small_train(lr=1e30, clip=1e30, warmup=0.0, **QUIET)
    with pytest.raises(RunFailed, match=r"the weights were not changed.*train\.on_nan skip"):
        train(small_model(), wild, dataset, tmp_path / "stop")
    result = train(small_model(), wild.replace(on_nan="skip", skip_limit=100), dataset, tmp_path / "skip")
    assert result.finished


def test_a_spike_is_skipped_if_asked_for_and_a_new_level_is_accepted():
    guard = Guard(spike=6.0)
    for step in range(FEWEST):
        assert guard.judge(3.0 + 0.01 * (step % 3), 1.0) is None
    assert guard.judge(9.0, 1.0) == "spike"
    assert guard.in_a_row == 1
    assert guard.judge(3.0, 1.0) is None
    assert guard.in_a_row == 0
    assert guard.judge(3.0, 50.0) == "spike"
    refused = [guard.judge(9.0, 1.0) for _ in range(WINDOW)]
    assert refused[-1] is None
    assert Guard().judge(1e9, 1e9) is None
    copy = Guard(spike=6.0)
    copy.restore(json.loads(json.dumps(guard.state())))
    assert copy == guard


def test_a_spike_changes_no_weight():
    model = build(small_model())
    stepper = Stepper(model, TrainConfig(spike=3.0), steps=100)
    stepper.guard.losses, stepper.guard.norms = [0.1] * FEWEST, [0.1] * FEWEST
    before = [parameter.detach().clone() for parameter in model.parameters()]
    ids = tokens(model.config, 2, 8)
    assert stepper.step(5, ids, ids).refused == "spike"
    assert all((old == new).all() for old, new in zip(before, model.parameters(), strict=True))


def test_resuming_on_changed_data_is_refused_with_the_difference(processes, dataset, tmp_path):
    run = tmp_path / "run"
    prepare([write_corpus(tmp_path / "text", seed=1)], "train:300", tmp_path / "other", dev=0.1, workers=1)
    assert processes.run(tmp_path, command(run, dataset, small_train(stop_at=4))).status == 0
    job = processes.run(tmp_path / "other-data", command(run, tmp_path / "other", small_train(), *RESUME))
    assert job.status == 2
    assert "(other tokens)" in job.text()
    job = processes.run(tmp_path / "other-lr", command(run, dataset, small_train(lr=2e-2), *RESUME))
    assert job.status == 2
    assert "train.lr: 0.01 -> 0.02" in job.text()
    assert last_step(run) == 4
