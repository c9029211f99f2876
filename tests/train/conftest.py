"""A small corpus as a token dataset, and configurations that train in seconds."""

import random
from pathlib import Path

import pytest

from rmt.config import ModelConfig, TrainConfig
from rmt.data import prepare

TEXT = "the stream of a token is read and written by every layer through keys that point to values"


def write_corpus(folder: Path, documents: int = 60, seed: int = 0) -> Path:
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(documents):
        text = " ".join(rng.choice(TEXT.split()) for _ in range(200)) + ".\n"
        (folder / f"{index:03d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    prepare([write_corpus(folder / "text")], "train:300", folder / "tokens", dev=0.1, workers=1)
    return folder / "tokens"


@pytest.fixture(params=["matrix", "vector"])
def stream(request) -> str:
    return request.param


@pytest.fixture
def model_config(stream) -> ModelConfig:
    return small_model(stream)


def small_model(stream: str = "matrix") -> ModelConfig:
    return ModelConfig(stream=stream, layers=2, heads=2, head_dim=8, key_dim=8, ff_dim=32, vocab_size=512, context=16)


def small_train(**changes) -> TrainConfig:
    settings = {"steps": 12, "batch_size": 4, "lr": 1e-2, "eval_every": 5, "eval_tokens": 64, "tensorboard": False}
    return TrainConfig(**{**settings, "checkpoint_every": 4, "keep": 10, "sample_every": 6, **changes})
