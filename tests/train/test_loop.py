"""Whole runs: what a run directory holds, and bad input. Resuming and faults have files of their own."""

import json

import pytest
import yaml
from small_runs import small_model, small_train, write_corpus

from rmt.cli import main
from rmt.data import TokenDataset, prepare
from rmt.errors import InputError
from rmt.train import checkpoint
from rmt.train.distributed import World
from rmt.train.loop import check_fit, train
from rmt.train.run import RunConfig, read_log


def test_a_run_directory_holds_what_the_documentation_says(dataset, tmp_path, monkeypatch):
    monkeypatch.undo()
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


def test_batches_that_cannot_be_divided_and_a_lost_configuration_are_refused(dataset, tmp_path):
    with pytest.raises(InputError, match="cannot be divided among 3 processes"):
        check_fit(small_model(), small_train(), TokenDataset.open(dataset), World(0, 3))
    train(small_model(), small_train(stop_at=4, sample_every=0), dataset, tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(InputError, match=r"has checkpoints but no config\.yaml"):
        train(small_model(), small_train(), dataset, tmp_path / "run", resume=True)


def test_a_dry_run_says_what_it_costs_and_writes_nothing(dataset, tmp_path, capsys):
    flags = ["--preset", "rmt-tiny", "--data", str(dataset), "--train.steps", "10", "--dry-run", "--json"]
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["params"] == 667_584
    assert found["steps"] == 10
    assert found["seconds"] > 0
    assert sorted(tmp_path.rglob("*")) == before
