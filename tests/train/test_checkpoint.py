"""Checkpoint files: what is kept, and what happens to one that is damaged, incomplete or not ours."""

import json
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import assert_same_run, small_model, small_train

from rmt.cli import main
from rmt.train import checkpoint
from rmt.train.loop import train
from rmt.train.run import read_log
from rmt.train.storage import digest, parse_sums, render_sums, write_tensors

NAMES = (*checkpoint.FILES, checkpoint.STATE, checkpoint.SUMS)


@pytest.fixture(scope="module")
def pristine(dataset, tmp_path_factory) -> Path:
    """A run with checkpoints of steps 4, 8 and 9."""
    run = tmp_path_factory.mktemp("pristine") / "run"
    train(small_model(), small_train(stop_at=9, sample_every=0), dataset, run)
    return run


@pytest.fixture
def run(pristine, tmp_path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "run"))


def test_tensors_are_written_as_the_safetensors_library_reads_them(tmp_path):
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
    tensors = {f"{kind}": (torch.randn(3, 5) * 9).to(kind) for kind in kinds}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "large": torch.randn(3_000_000)}
    assert write_tensors(tmp_path / "x.safetensors", tensors) == digest(tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


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


def assert_refused(run: Path, file: Path) -> None:
    """The newest checkpoint is not used, its bad file is named, the one before is taken."""
    found, problems = checkpoint.newest(run / "checkpoints")
    assert found is not None
    assert found.step == 8
    assert len(problems) == 1
    assert file.name in problems[0]
    assert file.parent.name in problems[0]


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_bit_is_noticed(run, name):
    rng = random.Random(name)
    file = run / "checkpoints" / "step-00000009" / name
    content = file.read_bytes()
    for _ in range(75):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        assert_refused(run, file)
    file.write_bytes(content)
    assert checkpoint.newest(run / "checkpoints")[0].step == 9


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_cut_short_empty_missing_or_a_folder_is_noticed(run, name):
    rng = random.Random(name)
    file = run / "checkpoints" / "step-00000009" / name
    content = file.read_bytes()
    for length in (0, 1, len(content) - 1, *(rng.randrange(len(content)) for _ in range(10))):
        file.write_bytes(content[:length])
        assert_refused(run, file)
    file.write_bytes(content + b"\n")
    assert_refused(run, file)
    file.unlink()
    assert_refused(run, file)
    file.mkdir()
    assert_refused(run, file)


class Bomb:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sums", ["as they were", "made to match"])
def test_a_pickle_in_place_of_a_file_is_refused_and_not_executed(run, tmp_path, name, sums):
    folder, mark = run / "checkpoints" / "step-00000009", tmp_path / "executed"
    (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    if sums == "made to match" and name != checkpoint.SUMS:
        recorded = parse_sums((folder / checkpoint.SUMS).read_text())
        (folder / checkpoint.SUMS).write_text(render_sums({**recorded, name: digest(folder / name)}.items()))
    assert_refused(run, folder / name)
    assert not mark.exists()
    pickle.loads((folder / name).read_bytes())
    assert mark.exists(), "the pickle was harmless, the test proves nothing"


@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_from_the_checkpoint_before_a_damaged_one(dataset, run, tmp_path, name):
    train(small_model(), small_train(sample_every=0), dataset, tmp_path / "whole")
    (run / "checkpoints" / "step-00000009" / name).write_bytes(b"not what was written")
    train(small_model(), small_train(sample_every=0), dataset, run, resume=True)
    assert_same_run(tmp_path / "whole", run)


def test_a_run_without_a_usable_checkpoint_is_not_started_anew(dataset, run, capsys):
    for path in checkpoint.listing(run / "checkpoints"):
        (path / checkpoint.STATE).write_text("{}")
    assert main(["train", "--out", str(run), "--resume", "--quiet"]) == 2
    assert "has no usable checkpoint" in capsys.readouterr().err


def test_the_checkpoints_of_a_run_are_listed_and_verified(run, capsys):
    assert main(["checkpoints", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == [4, 8, 9]
    assert [row["latest"] for row in rows] == [False, False, True]
    assert sum(row["best"] for row in rows) == 1
    file = run / "checkpoints" / "step-00000008" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["checkpoints", str(run)]) == 1
    shown = capsys.readouterr().out
    assert "damaged" in shown
    assert "step-00000008/model.safetensors" in "".join(shown.split())
    assert main(["checkpoints", str(run.parent)]) == 2
