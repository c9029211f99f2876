"""Several pools share the same jobs: each run is done once, by whoever claims it; a dead one's run is taken over."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from rich.console import Console

from rmt.errors import InputError
from rmt.experiments import pool
from rmt.experiments.pool import Claim, Job, Slot, run_pool, slots
from rmt.train.run import RunConfig, RunDirectory, read_log

QUIET = Console(quiet=True)
PATIENCE = 600.0  # seconds; a busy machine is no failure


@pytest.fixture
def config(model, train, dataset):
    return RunConfig(model, train, {"path": str(dataset), "fingerprint": ""})


def is_free(path):
    claim = Claim(path)
    answer = claim.take()
    claim.close()
    return answer


def test_a_claim_lasts_as_long_as_the_process_that_inherits_it(tmp_path):
    claim = Claim(tmp_path)
    assert claim.take()
    assert not is_free(tmp_path)
    process = subprocess.Popen(["sleep", "60"], pass_fds=[claim.file.fileno()])
    claim.close()  # the pool is gone, its run is not
    assert not is_free(tmp_path)
    process.kill()
    process.wait()
    assert is_free(tmp_path)


def test_a_run_that_is_being_written_by_hand_is_left_alone(tmp_path):
    with RunDirectory(tmp_path):
        assert not is_free(tmp_path)
    assert is_free(tmp_path)


def test_a_folder_with_another_run_is_refused_and_not_taken_for_a_result(config, tmp_path):
    config.save(tmp_path / "config.yaml")
    other = RunConfig(config.model, config.train.replace(steps=3), config.data)
    with pytest.raises(InputError, match=r"other settings \(train.steps: 6 -> 3\)"):
        run_pool([Job(tmp_path, other)], console=QUIET)


def test_every_worker_gets_gpus_of_its_own(monkeypatch):
    monkeypatch.setattr(pool, "visible_gpus", lambda: ["0", "1", "2", "3"])
    monkeypatch.setattr(pool, "cores", lambda: 16)
    assert slots(None) == [Slot(4, (name,)) for name in "0123"]
    assert slots(None, processes=2) == [Slot(4, ("0", "1"), 2), Slot(4, ("2", "3"), 2)]
    assert slots(None, processes=2)[1].environment()["CUDA_VISIBLE_DEVICES"] == "2,3"
    with pytest.raises(InputError, match="need as many GPUs: 4 can be seen"):
        slots(None, processes=8)


def test_without_gpus_the_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(pool, "visible_gpus", list)
    monkeypatch.setattr(pool, "cores", lambda: 8)
    assert slots(None) == [Slot(1)] * 8
    assert slots(2) == [Slot(4)] * 2
    assert "CUDA_VISIBLE_DEVICES" not in slots(2)[0].environment()


SWEEP = """sweep residual-size --workers 1 --key-dims 2,4 --model.layers 1 --model.heads 2 --model.head_dim 8
--model.ff_dim 16 --model.vocab_size 512 --model.context 16 --train.batch_size 2 --train.sample_every 0
--train.eval_tokens 64 --train.eval_every 1000 --train.tensorboard false --train.checkpoint_every 5"""


@pytest.fixture
def start(dataset):
    """Starts the sweep as a command of its own; at the end of the test none is left."""
    commands = []

    def begin(out, steps, log, *more):
        command = [sys.executable, "-m", "rmt.cli", *SWEEP.split(), "--data", str(dataset), "--out", str(out), *more]
        with open(log, "w") as file:
            commands.append(subprocess.Popen([*command, "--train.steps", str(steps)], stdout=file, stderr=file))
        return commands[-1]

    yield begin
    for command in commands:
        command.terminate()
        command.wait()


def wait_until(condition, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_two_commands_share_a_sweep_and_no_run_is_done_twice(start, tmp_path):
    out, logs = tmp_path / "out", [tmp_path / "first.log", tmp_path / "second.log"]
    commands = [start(out, 12, log, "--no-transformer") for log in logs]
    assert [command.wait(PATIENCE) for command in commands] == [0, 0], [log.read_text() for log in logs]
    lines = [line for log in logs for line in log.read_text().splitlines()]
    started = Counter(line.split(":")[0] for line in lines if line.endswith(": 12 steps"))
    assert started == {f"{name}/lr-0.02-seed-0": 1 for name in ("key_dim-2", "key_dim-4")}
    for run in started:
        assert [record["step"] for record in read_log(out / run) if "ce" in record] == list(range(1, 13))
    assert all("wrote" in log.read_text() for log in logs), "both know the result"


@pytest.mark.slow
def test_the_run_of_a_killed_command_is_taken_over_by_the_other(start, tmp_path):
    out, steps = tmp_path / "out", 100
    first = start(out, steps, tmp_path / "first.log", "--no-transformer")
    run = out / "key_dim-2" / "lr-0.02-seed-0"
    wait_until(lambda: len(read_log(run)) >= 12)
    holder = int((run / ".lock").read_text().split()[1])
    os.kill(holder, signal.SIGSTOP)  # so that it is not done before the other command has begun
    second = start(out, steps, tmp_path / "second.log", "--no-transformer")
    wait_until(lambda: (out / "key_dim-4" / "lr-0.02-seed-0" / "metrics.jsonl").exists())
    os.kill(first.pid, signal.SIGKILL)  # the pool first, or it would say that its run failed
    first.wait()
    os.kill(holder, signal.SIGKILL)
    assert second.wait(PATIENCE) == 0, (tmp_path / "second.log").read_text()
    assert "key_dim-2/lr-0.02-seed-0: 100 steps, resuming after step" in (tmp_path / "second.log").read_text()
    for other in (run, out / "key_dim-4" / run.name):
        assert [record["step"] for record in read_log(other) if "ce" in record] == list(range(1, steps + 1))


@pytest.mark.slow
def test_a_command_that_is_asked_to_end_lets_its_run_save(start, tmp_path):
    command = start(tmp_path / "out", 4000, tmp_path / "log")
    run = tmp_path / "out" / "key_dim-2" / "lr-0.02-seed-0"
    wait_until(lambda: len(read_log(run)) >= 7)
    command.send_signal(signal.SIGTERM)
    assert command.wait(PATIENCE) == 128 + signal.SIGTERM
    assert is_free(run), "no process was left behind"
    last = read_log(run)[-1]["step"]
    assert (run / "checkpoints" / f"step-{last:08d}").is_dir()


@pytest.mark.slow
def test_a_run_may_have_several_processes(config, tmp_path):
    run_pool([Job(tmp_path / "run", config)], console=QUIET, workers=1, processes=2, quiet=True)
    assert '"processes": 2' in (tmp_path / "run" / "environment.json").read_text()
    assert read_log(tmp_path / "run")[-1]["step"] == 6
