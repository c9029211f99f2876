"""What the tests of the trainer share: a small corpus, configurations that train in seconds, and a comparison."""

import random
from pathlib import Path

from rmt.config import ModelConfig, TrainConfig
from rmt.train import checkpoint
from rmt.train.run import RunConfig

TEXT = "the stream of a token is read and written by every layer through keys that point to values"


def write_corpus(folder: Path, documents: int = 60, seed: int = 0) -> Path:
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(documents):
        text = " ".join(rng.choice(TEXT.split()) for _ in range(200)) + ".\n"
        (folder / f"{index:03d}.txt").write_text(text, encoding="utf-8")
    return folder


def small_model(stream: str = "matrix") -> ModelConfig:
    return ModelConfig(stream=stream, layers=2, heads=2, head_dim=8, key_dim=8, ff_dim=32, vocab_size=512, context=16)


def small_train(**changes) -> TrainConfig:
    settings = {"steps": 12, "batch_size": 4, "lr": 1e-2, "eval_every": 5, "eval_tokens": 64, "tensorboard": False}
    return TrainConfig(**{**settings, "checkpoint_every": 4, "keep": 10, "sample_every": 6, **changes})


def command(run: Path, dataset: Path, train: TrainConfig, stream: str = "matrix", *more: str) -> list[str]:
    """`rmt train ... --out run`; the settings go to a file beside the run."""
    file = run.with_name(f"{run.name}-{abs(hash(train))}.yaml")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        RunConfig(small_model(stream), train, {"path": str(dataset), "fingerprint": ""}).save(file)
    return ["train", "--config", str(file), "--data", str(dataset), "--out", str(run), "--quiet", *more]


def assert_same_run(first: Path, second: Path) -> None:
    """Metrics, weights, moments and random states, byte for byte."""
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()
    newest = [checkpoint.listing(run / "checkpoints")[-1] for run in (first, second)]
    assert newest[0].name == newest[1].name
    for name in checkpoint.FILES:
        assert (newest[0] / name).read_bytes() == (newest[1] / name).read_bytes(), name
    best = [checkpoint.pointed(run / "checkpoints", "best") for run in (first, second)]
    assert (best[0] and best[0].name) == (best[1] and best[1].name)
