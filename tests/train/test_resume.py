"""2N steps == N steps, stop, resume, N steps: byte for byte in weights, moments and metrics."""

import json

import pytest
from small_runs import assert_same_run, command, small_model, small_train

from rmt.train import checkpoint
from rmt.train.loop import train
from rmt.train.run import read_log

STEPS = 8
SAVE_POINTS = {"first step": 1, "middle": 4, "after evaluation": 5, "last": STEPS}
ACCUMULATION = (1, 4)
RECOMPUTE = ("none", "full")


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("accumulation", ACCUMULATION)
def test_one_process_resumes_exactly_from_every_save_point(model_config, dataset, tmp_path, accumulation, recompute):
    settings = small_train(steps=STEPS, micro_batch=4 // accumulation, recompute=recompute, sample_every=0)
    train(model_config, settings, dataset, tmp_path / "whole")
    for name, stop in SAVE_POINTS.items():
        result = train(model_config, settings.replace(stop_at=stop), dataset, tmp_path / name)
        assert (result.step, result.finished) == (stop, stop == STEPS)
        assert train(model_config, settings, dataset, tmp_path / name, resume=True).finished
        assert_same_run(tmp_path / "whole", tmp_path / name)


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_two_processes_resume_exactly_from_every_save_point(processes, dataset, tmp_path, recompute, parallel):
    commands, pairs = [], []
    stream = "matrix" if parallel == "fsdp" else "vector"
    for accumulation in ACCUMULATION:
        settings = small_train(steps=STEPS, batch_size=8, micro_batch=4 // accumulation, sample_every=0)
        settings = settings.replace(recompute=recompute, parallel=parallel)
        whole = tmp_path / f"whole-{accumulation}"
        commands.append(command(whole, dataset, settings, stream))
        for name, stop in SAVE_POINTS.items():
            parts = tmp_path / f"{name}-{accumulation}"
            commands.append(command(parts, dataset, settings.replace(stop_at=stop), stream))
            commands.append(command(parts, dataset, settings, stream, "--resume"))
            pairs.append((whole, parts))
    jobs = processes.run_two(tmp_path, *commands)
    assert [job.status for job in jobs] == [0, 0], jobs[0].text() + jobs[1].text()
    for whole, parts in pairs:
        assert_same_run(whole, parts)


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
@pytest.mark.parametrize("stream", ["matrix", "vector"])
def test_one_and_two_processes_see_the_same_tokens_and_losses(processes, stream, dataset, tmp_path, parallel):
    """From the start, and from a checkpoint that the other number of processes wrote."""
    settings = small_train(batch_size=8, micro_batch=2, parallel=parallel)
    one, two, from_one, from_two = (tmp_path / name for name in ("one", "two", "from_one", "from_two"))
    half = settings.replace(stop_at=6)

    def alone(folder, *commands):
        job = processes.run(tmp_path, *commands, record=str(tmp_path / f"tokens-{folder}"))
        assert job.status == 0, job.text()

    def together(folder, *commands):
        jobs = processes.run_two(tmp_path, *commands, record=str(tmp_path / f"tokens-{folder}"))
        assert [job.status for job in jobs] == [0, 0], jobs[0].text() + jobs[1].text()

    alone("one", command(one, dataset, settings, stream))
    alone("half", command(from_one, dataset, half, stream))
    together("two", command(two, dataset, settings, stream))
    together("from_one", command(from_one, dataset, settings, stream, "--resume"))
    together("half", command(from_two, dataset, half, stream))
    alone("from_two", command(from_two, dataset, settings, stream, "--resume"))

    def tokens(name, rank):
        return [json.loads(line) for line in (tmp_path / f"tokens-{name}-{rank}").read_text().splitlines()]

    ordered = tokens("one", 0)
    assert [
        [i, rows + more] for (i, rows), (_, more) in zip(tokens("two", 0), tokens("two", 1), strict=True)
    ] == ordered
    assert tokens("from_two", 0) == ordered[6:]
    for run in (two, from_one, from_two):
        for ours, theirs in zip(read_log(run), read_log(one), strict=True):
            assert ours.keys() == theirs.keys()
            for key in ("ce", "loss", "dev_ce"):
                assert key not in ours or ours[key] == pytest.approx(theirs[key], abs=1e-5)


def test_a_signal_during_an_evaluation_postpones_it_to_the_resumed_run(processes, dataset, tmp_path):
    settings = small_train(sample_every=0)
    whole, run = tmp_path / "whole", tmp_path / "run"
    signals = [{"where": "rmt.train.loop:split_loss", "call": 2}]
    assert processes.run(tmp_path, command(whole, dataset, settings)).status == 0
    assert processes.run(tmp_path, command(run, dataset, settings), signals=signals).status == 143
    assert checkpoint.newest(run / "checkpoints")[0].state["evaluation_due"]
    assert read_log(run)[-1]["step"] == 10
    assert "dev_ce" not in read_log(run)[-1]
    assert processes.run(tmp_path, command(run, dataset, settings, "matrix", "--resume")).status == 0
    assert_same_run(whole, run)


def test_samples_and_metrics_of_repeated_steps_appear_once(dataset, tmp_path):
    settings = small_train(checkpoint_every=4, sample_every=2)
    train(small_model(), settings, dataset, tmp_path / "whole")
    train(small_model(), settings.replace(stop_at=11), dataset, tmp_path / "run")
    checkpoint.remove(checkpoint.listing(tmp_path / "run" / "checkpoints")[-1])
    train(small_model(), settings, dataset, tmp_path / "run", resume=True)
    for name in ("samples.txt", "metrics.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
