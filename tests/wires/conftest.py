"""The small models and tokens for them, and a trained run with its dataset."""

from pathlib import Path

import pytest
import torch
from small import CONFIGS, small_model

import rmt
from rmt.data import prepare
from rmt.train.loop import train


@pytest.fixture(params=CONFIGS)
def model(request) -> rmt.LanguageModel:
    return small_model(request.param)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    """A run of 60 steps that has learned which word follows which, with three checkpoints; beside it its `tokens`."""
    folder = tmp_path_factory.mktemp("wires")
    (folder / "text").mkdir()
    line = "the cat sat on the mat and the dog lay by the door while a bird sang in a tree .\n"
    for index in range(20):
        (folder / "text" / f"{index}.txt").write_text(f"{index} cats .\n" + line * 20)
    prepare([folder / "text"], "train:300", folder / "tokens", dev=0.2, workers=1)
    config = rmt.ModelConfig(layers=2, heads=2, head_dim=8, key_dim=8, ff_dim=32, vocab_size=300, context=32)
    settings = rmt.TrainConfig(
        steps=60, batch_size=8, eval_every=20, eval_tokens=96, checkpoint_every=20, keep=3, sample_every=0,
        tensorboard=False,
    )  # fmt: skip
    train(config, settings, folder / "tokens", folder / "run")
    return folder / "run"
