"""A trained run of a few steps with its dataset, and models of every stream, small enough to build in no time."""

import random
from pathlib import Path

import pytest

from rmt.config import ModelConfig, TrainConfig
from rmt.data import prepare
from rmt.hub.export import export
from rmt.hub.folder import load_model
from rmt.train.loop import train

TEXT = "the stream of a token is read and written by every layer through keys that point to values"


def small(**changes) -> ModelConfig:
    dims = dict(layers=2, heads=2, head_dim=8, key_dim=8, ff_dim=32, vocab_size=320, context=48)
    return ModelConfig(**{**dims, **changes})


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Path:
    """A run of 30 steps on words in random order."""
    folder, rng = tmp_path_factory.mktemp("tiny"), random.Random(0)
    (folder / "text").mkdir()
    for index in range(30):
        text = " ".join(rng.choice(TEXT.split()) for _ in range(200)) + ".\n"
        (folder / "text" / f"{index:03d}.txt").write_text(text, encoding="utf-8")
    prepare([folder / "text"], "train:300", folder / "tokens", dev=0.2, workers=1)
    settings = TrainConfig(
        steps=30, batch_size=4, eval_every=10, eval_tokens=96, checkpoint_every=10, keep=3, sample_every=0,
        tensorboard=False,
    )  # fmt: skip
    train(small(), settings, folder / "tokens", folder / "run")
    return folder / "run"


@pytest.fixture(scope="session")
def exported(tiny_run) -> Path:
    return export(load_model(tiny_run), tiny_run.parent / "exported")
