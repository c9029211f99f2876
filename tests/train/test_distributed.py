"""Several processes: every stream, no needless messages, faults of one that all survive, and torchrun itself."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from small_runs import assert_same_run, command, small_model, small_train

from rmt.streams import STREAMS
from rmt.train import checkpoint
from rmt.train.run import read_log

pytestmark = pytest.mark.distributed

SETTINGS = {"batch_size": 8, "sample_every": 0}


@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_every_stream_has_the_losses_of_one_process(processes, dataset, tmp_path, parallel):
    settings = small_train(steps=4, micro_batch=2, recompute="full", parallel=parallel, **SETTINGS)

    def commands(folder):
        return [command(tmp_path / folder / stream, dataset, settings, stream) for stream in STREAMS]

    alone = processes.run(tmp_path, *commands("one"))
    both = processes.run_two(tmp_path, *commands("two"))
    assert [job.status for job in (alone, *both)] == [0, 0, 0], alone.text() + both[0].text() + both[1].text()
    for stream in STREAMS:
        one, two = (read_log(tmp_path / folder / stream) for folder in ("one", "two"))
        for ours, theirs in zip(two, one, strict=True):
            for key in {"loss", "ce", "dev_ce"} & ours.keys():
                assert ours[key] == pytest.approx(theirs[key], abs=1e-5), (stream, ours["step"])


def test_accumulation_sends_gradients_and_gathers_weights_once_per_step(processes, dataset, tmp_path):
    for micro_batch in (4, 1):
        settings = small_train(steps=3, micro_batch=micro_batch, **SETTINGS)
        run = tmp_path / f"run-{micro_batch}"
        jobs = processes.run_two(
            tmp_path, command(run, dataset, settings), count=str(tmp_path / f"count-{micro_batch}")
        )
        assert [job.status for job in jobs] == [0, 0], jobs[0].text() + jobs[1].text()
    whole, parts = ((tmp_path / f"count-{size}-0").read_text() for size in (4, 1))
    assert whole == parts
    groups = small_model().layers + 2  # embedding, layers, unembedding
    counts = json.loads(whole.splitlines()[-1])
    assert sum(count for kind, count in counts.items() if kind.startswith("all_gather")) == groups
    assert sum(count for kind, count in counts.items() if kind.startswith("reduce_scatter")) == groups


def test_a_signal_to_one_process_stops_both_after_the_same_step(processes, dataset, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = small_train(**SETTINGS)
    where = [{"where": "rmt.train.step:Stepper.step", "call": 3}]
    jobs = start_two(processes, tmp_path, command(run, dataset, settings), second={"signals": where})
    assert [job.wait() for job in jobs] == [143, 143], jobs[0].text() + jobs[1].text()
    assert checkpoint.newest(run / "checkpoints")[0].step == 3
    jobs = processes.run_two(
        tmp_path, command(run, dataset, settings, "matrix", "--resume"), command(whole, dataset, settings)
    )
    assert [job.status for job in jobs] == [0, 0], jobs[0].text() + jobs[1].text()
    assert_same_run(whole, run)


def test_a_nan_in_one_process_is_refused_by_both(processes, dataset, tmp_path):
    settings = small_train(on_nan="skip", steps=6, **SETTINGS)
    run = tmp_path / "run"
    jobs = start_two(processes, tmp_path, command(run, dataset, settings), second={"poison": [2]})
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].text() + jobs[1].text()
    assert [record["step"] for record in read_log(run) if "refused" in record] == [3]
    record = json.loads((run / "faults" / "step-00000003.json").read_text())
    assert len(record["windows"]) == 8
    assert "unembedding.weight_WD" in record["not_finite"]["gradients"]
    weights = checkpoint.newest(run / "checkpoints")[0].tensors["model.safetensors"]
    assert all(bool(weight.isfinite().all()) for weight in weights.values())


def test_a_signal_during_an_evaluation_postpones_it_for_both(processes, dataset, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = small_train(**SETTINGS)
    where = [{"where": "rmt.train.loop:split_loss"}]
    jobs = start_two(processes, tmp_path, command(run, dataset, settings), second={"signals": where})
    assert [job.wait() for job in jobs] == [143, 143], jobs[0].text() + jobs[1].text()
    assert checkpoint.newest(run / "checkpoints")[0].state["evaluation_due"]
    jobs = processes.run_two(
        tmp_path, command(run, dataset, settings, "matrix", "--resume"), command(whole, dataset, settings)
    )
    assert [job.status for job in jobs] == [0, 0], jobs[0].text() + jobs[1].text()
    assert_same_run(whole, run)


def test_one_process_that_dies_ends_the_other_with_one_line(processes, dataset, tmp_path):
    settings = small_train(steps=100_000, eval_every=10**6, checkpoint_every=10**6, **SETTINGS)
    jobs = processes.start_two(tmp_path, command(tmp_path / "run", dataset, settings))
    wait_for(lambda: len(read_log(tmp_path / "run")) > 3)
    jobs[1].kill()
    assert jobs[0].wait() == 1
    assert jobs[0].text().count("\n") == 1, jobs[0].text()
    assert "another process of this run has ended" in jobs[0].text()


def test_bad_input_ends_both_and_is_said_once(processes, dataset, tmp_path):
    settings = small_train(steps=2, **SETTINGS)
    run = tmp_path / "run"
    processes.run(tmp_path / "first", command(run, dataset, settings))
    jobs = processes.run_two(tmp_path / "second", command(run, dataset, settings))
    assert [job.status for job in jobs] == [2, 2]
    assert "holds a run already" in jobs[0].text()
    assert jobs[1].text() == ""


def start_two(processes, folder, *commands, second):
    """Two processes, with a fault in the second."""
    from processes import free_port

    port = free_port()
    return [
        processes.start(folder, *commands, rank=rank, size=2, port=port, **(second if rank else {})) for rank in (0, 1)
    ]


@pytest.mark.slow
def test_torchrun_saves_on_sigterm_and_restarts_by_itself_when_a_process_is_killed(processes, dataset, tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = small_train(steps=200, eval_every=50, checkpoint_every=10, keep=3, **SETTINGS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

    def start(*more):
        arguments = [*torchrun, "--max-restarts", "2", "-m", "rmt.cli", *command(run, dataset, settings), *more]
        with open(tmp_path / "torchrun.txt", "a") as output:
            return subprocess.Popen(arguments, env=environment, stdout=output, stderr=output)

    def text():
        return (tmp_path / "torchrun.txt").read_text()

    first = start()
    wait_for(lambda: len(read_log(run)) > 5, first, text)
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=240) != 0
    reached = checkpoint.newest(run / "checkpoints")[0].step
    assert reached == [record["step"] for record in read_log(run) if "ce" in record][-1] < 200
    second = start("--resume")
    wait_for(lambda: read_log(run)[-1]["step"] > reached + 15, second, text)
    workers = psutil.Process(second.pid).children()
    assert len(workers) == 2
    workers[1].kill()
    assert second.wait(timeout=600) == 0, text()
    assert json.loads((run / "environment.json").read_text())["processes"] == 2
    jobs = processes.run_two(tmp_path, command(whole, dataset, settings))
    assert [job.status for job in jobs] == [0, 0], jobs[0].text() + jobs[1].text()
    assert_same_run(whole, run)


def wait_for(condition, process=None, text=lambda: "", seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, text()
        assert time.monotonic() < deadline, f"waited too long {text()}"
        time.sleep(0.02)
