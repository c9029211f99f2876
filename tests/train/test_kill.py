"""kill -9 at any moment, saves included, loses nothing but the steps since the last checkpoint."""

import json
import os
import random
import time
from pathlib import Path

import pytest
from small_runs import assert_same_run, command, small_train

from rmt.train import checkpoint
from rmt.train.run import complete_lines

RESUME = ("matrix", "--resume")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [20, 100])
def test_a_run_that_is_killed_again_and_again_ends_with_the_weights_of_an_undisturbed_one(
    processes, dataset, tmp_path, kills
):
    rng = random.Random(kills)
    steps = 12 * kills + 40  # more than all attempts do before they are killed
    settings = small_train(steps=steps, checkpoint_every=3, keep=2, eval_every=17, eval_tokens=32, sample_every=0)
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert processes.run(tmp_path, command(whole, dataset, settings)).status == 0
    while_training = 0
    for kill in range(kills):
        started = step_reached(run)
        job = processes.start(tmp_path, command(run, dataset, settings, *RESUME))
        if kill % 5 == 0:  # some time during the start-up
            time.sleep(rng.uniform(0, 0.3))
        else:
            wait_for_steps(run, started, rng.randint(1, 6), job)
            time.sleep(rng.uniform(0, 0.02))
            while_training += 1
        job.kill()
        assert job.wait() == -9, f"the run ended before it was killed: {job.text()}"
    job = processes.run(tmp_path, command(run, dataset, settings, *RESUME))
    assert job.status == 0, job.text()
    assert while_training == kills - (kills + 4) // 5
    assert_same_run(whole, run)
    assert [path.name for path in run.rglob(".*")] == [".lock"], "something half-written remains"


def step_reached(run: Path) -> tuple[int, int]:
    """Which file the metrics are (a resumed run writes a new one), and the step of their last line."""
    try:
        inode = os.stat(run / "metrics.jsonl").st_ino
        lines = complete_lines(run / "metrics.jsonl")
    except FileNotFoundError:
        return 0, 0
    return inode, json.loads(lines[-1])["step"] if lines else 0


def wait_for_steps(run: Path, before: tuple[int, int], steps: int, job) -> None:
    deadline = time.monotonic() + 240
    checkpoints = checkpoint.listing(run / "checkpoints")
    goal = steps + (int(checkpoints[-1].name.removeprefix("step-")) if checkpoints else 0)
    while True:
        inode, step = step_reached(run)
        if inode != before[0] and step >= goal:
            return
        assert job.poll() is None, job.text()
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


SPOTS = {
    "in the middle of a file": {"where": "rmt.train.checkpoint:write_tensors", "call": 4},
    "before the checksums": {"where": "rmt.train.checkpoint:render_sums", "call": 2},
    "before the pointer": {"where": "rmt.train.checkpoint:point", "call": 4},
    "before an old one is removed": {"where": "rmt.train.checkpoint:remove", "call": 1},
    "half-way through the removal": {"where": "rmt.train.checkpoint:shutil.rmtree", "call": 5},
    "before the log is rewritten": {"where": "rmt.train.run:write_text", "call": 2},
}


@pytest.mark.parametrize("spot", SPOTS)
def test_a_kill_at_the_worst_moments_of_a_save_is_survived(processes, dataset, tmp_path, spot):
    settings = small_train(steps=9, checkpoint_every=2, keep=1, eval_every=3, sample_every=0)
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert processes.run(tmp_path, command(whole, dataset, settings)).status == 0
    job = processes.run(tmp_path, command(run, dataset, settings), signals=[{**SPOTS[spot], "number": 9}])
    assert job.status == -9, job.text()
    job = processes.run(tmp_path, command(run, dataset, settings, *RESUME))
    assert job.status == 0, job.text()
    assert_same_run(whole, run)
    assert [path.name for path in run.rglob(".*")] == [".lock"]
    kept = {path.name for path in checkpoint.listing(run / "checkpoints")}
    assert kept == {path.name for path in checkpoint.listing(whole / "checkpoints")}
