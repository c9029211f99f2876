"""A small corpus, as a token dataset."""

import random

import pytest

from rmt.config import ModelConfig, TrainConfig
from rmt.data import prepare

TEXT = "a stream carries what one layer writes to every layer that reads after it"


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    for index in range(40):
        text = " ".join(rng.choice(TEXT.split()) for _ in range(200))
        (folder / f"{index}.txt").write_text(text, encoding="utf-8")
    prepare([folder], "train:280", folder / "tokens", dev=0.1, workers=1)
    return folder / "tokens"


@pytest.fixture
def model():
    return ModelConfig(layers=2, heads=2, head_dim=8, key_dim=8, ff_dim=64, vocab_size=512, context=16)


@pytest.fixture
def train():
    return TrainConfig(steps=6, batch_size=4, eval_every=2, eval_tokens=64, tensorboard=False, sample_every=0)
