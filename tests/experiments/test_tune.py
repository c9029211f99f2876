"""A search tries what its seed says, shares its trials among workers, and loses and repeats none of them."""

import json
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO

import numpy as np
import psutil
import pytest
import yaml
from rich.console import Console

from rmt.cli import main
from rmt.config import ModelConfig, TrainConfig
from rmt.data import TokenDataset
from rmt.errors import InputError, RunFailed
from rmt.experiments import trials
from rmt.experiments.progress import Board
from rmt.experiments.transfer import Transfer, transfer, widen
from rmt.experiments.tune import SPACE, Search, parse_space, plan, rows, write_results
from rmt.model import build
from rmt.report.tuning import transfer_figure
from rmt.theory.mup import lr_scale, roles_of
from rmt.train.interrupt import Interrupt
from rmt.train.loop import train
from rmt.train.run import RunConfig, read_log

FLAGS = "--model.layers 1 --model.heads 2 --model.head_dim 4 --model.key_dim 4 --model.ff_dim 16 --model.context 16"
FLAGS += " --train.steps 5 --train.batch_size 4 --train.eval_tokens 64"


@pytest.fixture
def base(dataset):
    vocabulary = TokenDataset.open(dataset).vocab_size
    return ModelConfig(
        layers=1, heads=2, head_dim=4, key_dim=4, ff_dim=16, context=16, vocab_size=vocabulary, init="mup"
    )


@pytest.fixture
def wanted(base, dataset, tmp_path):
    return Search(base, TrainConfig(steps=5, batch_size=4, eval_tokens=64), dataset, tmp_path / "out", trials=6)


def work(search):
    """A worker in this process."""
    problems = queue.SimpleQueue()
    trials.work(search, 1, os.getppid(), problems)
    assert problems.empty()


def test_what_is_tried_is_a_function_of_the_seed_and_the_number(wanted):
    drawn = [wanted.draw(number) for number in range(300)]
    assert drawn == [replace(wanted, trials=300).draw(number) for number in range(300)]
    assert drawn[:6] != [replace(wanted, seed=1).draw(number) for number in range(6)]
    assert len({tuple(one.values()) for one in drawn}) == 300
    for name, (low, high) in SPACE.items():
        values = np.array([one[name] for one in drawn])
        assert low <= values.min() < low * 1.2
        assert high / 1.2 < values.max() <= high
        middle = np.sqrt(low * high)
        assert 0.4 < (values < middle).mean() < 0.6, "not log-uniform"


def test_a_search_gives_the_losses_of_ordinary_runs_whoever_does_them(wanted, tmp_path):
    plan(wanted)
    work(wanted)
    found = rows(plan(wanted))
    assert [row["number"] for row in found] == list(range(6))
    assert {row["state"] for row in found} == {"finished"}
    assert [{name: row[name] for name in SPACE} for row in found] == [wanted.draw(number) for number in range(6)]
    config = RunConfig.load(wanted.out / "trials" / "0003" / "config.yaml")
    alone = train(config.model, config.train, wanted.data, tmp_path / "alone")
    assert alone.dev_ce == found[3]["loss"]
    assert read_log(tmp_path / "alone") == read_log(wanted.out / "trials" / "0003")
    before = {path: path.stat().st_mtime_ns for path in wanted.out.rglob("trials/*/*")}
    more = replace(wanted, trials=7)
    plan(more)
    work(more)
    assert [row["loss"] for row in rows(plan(more))][:6] == [row["loss"] for row in found]
    assert {path: path.stat().st_mtime_ns for path in before} == before, "a finished trial was touched"


def test_the_best_trains_as_it_is_and_wider(wanted, capsys):
    plan(wanted)
    work(wanted)
    result = write_results(wanted)
    losses = [row["loss"] for row in result["trials"]]
    assert result["best"]["loss"] == min(losses)
    assert sum(result["importances"].values()) == pytest.approx(1)
    assert all(os.path.getsize(path) > 500 for path in result["files"])
    assert json.loads((wanted.out / "trials.json").read_text())["trials"] == result["trials"]
    best = str(wanted.out / "best.yaml")
    out = str(wanted.out / "run")
    assert main(["train", "--config", best, "--data", str(wanted.data), "--out", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dev_ce"] == min(losses)
    wide = ["--model.heads", "4", "--model.key_dim", "8", "--model.ff_dim", "32", "--print-config"]
    with pytest.raises(SystemExit):
        main(["train", "--config", best, "--data", str(wanted.data), "--out", out, *wide])
    config = ModelConfig.from_dict(yaml.safe_load(capsys.readouterr().out)["model"])
    scales = {name: lr_scale(config, role) for name, role in roles_of(build(config)).items()}
    assert scales["feed_forward.0.into_FD"] == scales["stream.1.store.keys_KR"] == 0.5
    assert scales["stream.1.retrieve.keys_RK"] == scales["feed_forward.0.out_DF"] == 0.5
    assert scales["embedding.token_WD"] == 1


def test_a_trial_belongs_to_who_holds_its_lock_and_is_free_again_when_he_dies(wanted):
    study = plan(wanted)
    first, second = trials.claim(study, wanted.out), trials.claim(study, wanted.out)
    assert (first.trial.number, second.trial.number) == (0, 1)
    parameters = first.trial.params
    first.directory.__exit__()  # as the kernel does for a process that is killed
    again = trials.claim(study, wanted.out)
    assert again.trial.number == 0
    assert again.trial.params == parameters
    third = trials.claim(study, wanted.out)
    assert third.trial.number == 2
    with second.directory, third.directory, Interrupt() as interrupt:
        assert trials.perform(again, study, wanted, TokenDataset.open(wanted.data), interrupt)
    assert [row["state"] for row in rows(study)] == ["finished", "running", "running", "waiting", "waiting", "waiting"]


def test_an_interrupted_trial_is_not_finished(wanted):
    study = plan(wanted)
    mine = trials.claim(study, wanted.out)
    with Interrupt() as interrupt:
        interrupt.requested = signal.SIGTERM
        assert not trials.perform(mine, study, wanted, TokenDataset.open(wanted.data), interrupt)
    assert rows(study)[0]["state"] == "running"
    again = trials.claim(study, wanted.out)
    assert again.trial.number == 0
    again.directory.__exit__()


def test_a_trial_that_diverges_is_finished_without_a_loss_and_the_search_goes_on(wanted):
    some = replace(wanted, space=parse_space(["sigma=1:1e30"]))
    plan(some)
    work(some)
    found = rows(plan(some))
    assert {row["state"] for row in found} == {"finished", "diverged"}
    assert all(row["loss"] is None for row in found if row["state"] == "diverged")
    assert all(row["sigma"] > 1e5 for row in found if row["state"] == "diverged")
    assert write_results(some)["best"]["state"] == "finished"


def test_a_search_in_which_all_diverge_says_so(wanted):
    bad = replace(wanted, trials=2, space=parse_space(["sigma=1e30"]))
    plan(bad)
    work(bad)
    with pytest.raises(RunFailed, match=r"all trials .* diverged"):
        write_results(bad)


def test_the_median_pruner_gives_up_trials_that_lag(wanted):
    pruned = replace(wanted, trials=12, pruner="median", train=wanted.train.replace(steps=10))
    plan(pruned)
    work(pruned)
    found = rows(plan(pruned))
    states = [row["state"] for row in found]
    assert {*states} == {"finished", "pruned"}
    assert {*states[:5]} == {"finished"}, "it needs some trials to compare with"
    for row in found:
        steps = read_log(wanted.out / "trials" / f"{row['number']:04d}")[-1]["step"]
        assert (steps == 10) if row["state"] == "finished" else (steps < 10)


def test_progress_is_a_line_now_and_then_without_a_terminal():
    text = StringIO()
    with Board(Console(file=text, width=200), "tuned", quiet=False) as board:
        for done in range(101):
            board.show(done, 100, 4.5 - 0.001 * done)
            board.show(done, 100, 4.5 - 0.001 * done)
    lines = text.getvalue().splitlines()
    assert len(lines) == 20
    assert lines[-1].startswith("tuned: trial 100/100  best 4.4000")


def start(out, dataset, *flags, workers=1, trials=8):
    command = [sys.executable, "-m", "rmt.cli", "tune", "--data", str(dataset), "--out", str(out), "--json"]
    command += ["--trials", str(trials), "--workers", str(workers), *FLAGS.split(), *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finished(out):
    """Files of the trials that are over, by number, as they were written."""
    if not (out / "study.db").exists():
        return {}
    with sqlite3.connect(f"file:{out}/study.db?mode=ro", uri=True, timeout=60) as database:
        try:
            numbers = [row[0] for row in database.execute("SELECT number FROM trials WHERE state = 'COMPLETE'")]
        except sqlite3.OperationalError:  # the tables are not there yet
            return {}
    return {n: (out / "trials" / f"{n:04d}" / "metrics.jsonl").stat().st_mtime_ns for n in numbers}


def wait_until(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_search_that_is_killed_resumes_and_repeats_no_finished_trial(dataset, tmp_path):
    slow = ("--train.steps", "60")
    job = start(tmp_path / "out", dataset, *slow, workers=2)
    wait_until(lambda: len(finished(tmp_path / "out")) >= 2)
    workers = psutil.Process(job.pid).children(recursive=True)
    job.kill()
    job.communicate()
    psutil.wait_procs(workers, timeout=60)
    assert not any(worker.is_running() for worker in workers), "workers outlived the command"
    before = finished(tmp_path / "out")
    assert 2 <= len(before) < 8

    job = start(tmp_path / "out", dataset, *slow, workers=1)
    wait_until(lambda: len(finished(tmp_path / "out")) > len(before))
    job.send_signal(signal.SIGTERM)
    _, errors = job.communicate(timeout=120)
    assert job.returncode == 143, errors
    assert "the same command goes on" in errors

    output, errors = start(tmp_path / "out", dataset, *slow, workers=1).communicate(timeout=500)
    result = json.loads(output)
    assert [row["state"] for row in result["trials"]] == ["finished"] * 8
    assert [row["number"] for row in result["trials"]] == list(range(8))
    after = finished(tmp_path / "out")
    assert {number: after[number] for number in before} == before


@pytest.mark.slow
def test_two_commands_share_one_search(dataset, tmp_path):
    slow = ("--train.steps", "60")
    jobs = [start(tmp_path / "both", dataset, *slow) for _ in range(2)]
    answers = [job.communicate(timeout=500) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], answers
    first, second = (json.loads(output) for output, _ in answers)
    assert first["trials"] == second["trials"]
    assert [row["number"] for row in first["trials"]] == list(range(8))
    import optuna

    study = optuna.load_study(study_name="rmt", storage=f"sqlite:///{tmp_path}/both/study.db")
    assert len({trial.user_attrs["process"] for trial in study.trials}) == 2, "one of them did everything"
    losses = []
    for number in (0, 7):
        config = RunConfig.load(tmp_path / "both" / "trials" / f"{number:04d}" / "config.yaml")
        losses.append(train(config.model, config.train, dataset, tmp_path / f"alone-{number}").dev_ce)
    assert losses == [first["trials"][0]["loss"], first["trials"][7]["loss"]]


def test_wider_models_have_more_heads_keys_and_neurons_of_the_same_head_dimension(base):
    wide = widen(base, 4)
    assert (wide.heads, wide.head_dim, wide.key_dim, wide.ff_dim) == (8, 4, 16, 64)
    assert widen(base.replace(stream="vector", width=12, kv_heads=1), 2).width == 24
    assert wide.layers == base.layers


@pytest.mark.slow
def test_transfer_trains_every_width_at_every_rate_and_finds_the_best(wanted, tmp_path):
    recipe = wanted.train.replace(steps=3)
    both = Transfer(
        [wanted.model], [recipe], wanted.data, tmp_path / "transfer", widths=(1, 2), learning_rates=(1e-6, 3e-2)
    )
    summary = transfer(both, Console(quiet=True), workers=2, quiet=True)
    assert [(curve["width"], curve["best_lr"]) for curve in summary["curves"]] == [(1, 3e-2), (2, 3e-2)]
    wide = RunConfig.load(tmp_path / "transfer" / "matrix-mup" / "width-2" / "lr-0.03-seed-0" / "config.yaml")
    assert (wide.model.heads, wide.model.mup.base_heads) == (4, 2)
    assert summary["curves"][1]["losses"]["0.03"][0] < summary["curves"][1]["losses"]["1e-06"][0]
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "transfer").rglob("lr-*/*.jsonl")}
    assert transfer(both, Console(quiet=True), workers=2, quiet=True) == summary
    assert {path: path.stat().st_mtime_ns for path in written} == written, "finished runs were repeated"
    assert all(path.stat().st_size > 500 for path in transfer_figure(summary["curves"], tmp_path / "figure"))


def test_a_search_needs_optuna_and_names_the_extra(wanted, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    command = ["tune", "--data", str(wanted.data), "--out", str(wanted.out), *FLAGS.split()]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "residual-matrix-transformer[tune]" in error
    assert error.count("\n") == 1


def test_a_damaged_study_is_named(wanted):
    plan(wanted)
    (wanted.out / "study.db").write_bytes(b"not a database" * 1000)
    with pytest.raises(InputError, match=r"study.db cannot be read .*not a database"):
        plan(wanted)


def test_another_search_in_the_same_folder_is_refused(wanted):
    plan(wanted)
    with pytest.raises(InputError, match=r"another search \(train.steps: 5 -> 6\)"):
        plan(replace(wanted, train=wanted.train.replace(steps=6)))
    with pytest.raises(InputError, match="seed: 0 -> 1"):
        plan(replace(wanted, seed=1))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--out O", "tune: give --data DIR"),
        ("--data D", "tune: give --out DIR"),
        ("--data D --out O", "D is not a token dataset"),
        ("--data DATA --out O --trials 0", "at least one is needed"),
        ("--data DATA --out O --pruner medium", "Did you mean 'median'"),
        ("--data DATA --out O --model.init lecun", "model.init must be mup"),
        ("--data DATA --out O --stream vectr", "Did you mean 'vector'"),
        ("--data DATA --out O --space sigmo=1:2", "Did you mean 'sigma'"),
        ("--data DATA --out O --space lr=fast", "write an interval such as lr="),
        ("--data DATA --out O --space lr=1:2:3", "write an interval such as lr="),
        ("--data DATA --out O --space lr=1e-1:1e-3", "the lower end first"),
        ("--data DATA --out O --space sigma=0:1", "above zero"),
        ("--data DATA --out O --model.context 100000", "fewer than one window"),
        ("--tials 3", "Did you mean '--trials'"),
        ("transfr", "Did you mean 'transfer'"),
        ("transfer --lr 1,2 --data D --out O", "tune transfer: give --config"),
        ("transfer --config CONFIG --data D --out O --lr 1e-2", "at least two learning rates"),
        ("transfer --config CONFIG --data D --out O --lr 1e-2,1e-3 --widths wide", "whole numbers with commas"),
        ("transfer --config CONFIG --data D --out O --lr 1e-2,1e-3 --model.init lecun", "no base dimensions"),
        ("coord-check", "tune coord-check: give --out DIR"),
        ("coord-check --out O --streams matrx", "Did you mean 'matrix'"),
        ("coord-check --out O --widths 2", "at least two"),
    ],
)
def test_bad_input_is_one_clear_line(flags, message, capsys, tmp_path, monkeypatch, dataset, wanted):
    monkeypatch.chdir(tmp_path)
    RunConfig(wanted.model, wanted.train, {"path": "", "fingerprint": ""}).save(tmp_path / "config.yaml")
    words = {"DATA": str(dataset), "CONFIG": str(tmp_path / "config.yaml")}
    assert main(["tune", *(words.get(word, word) for word in flags.split())]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
