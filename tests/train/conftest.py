"""Fixtures of the trainer's tests: a token dataset, and processes that start fast."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Processes
from small_runs import small_model, write_corpus

from rmt.config import ModelConfig
from rmt.data import prepare


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    prepare([write_corpus(folder / "text")], "train:300", folder / "tokens", dev=0.1, workers=1)
    return folder / "tokens"


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    server = Processes()
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch) -> None:
    """Measuring the machine and drawing a curve take longer than these runs; `monkeypatch.undo()` brings them back."""
    monkeypatch.setattr("rmt.train.loop.matmul_peak", lambda *_: 1e12)
    monkeypatch.setattr("rmt.report.curves.loss_curve", lambda *_: None)


@pytest.fixture(params=["matrix", "vector"])
def stream(request) -> str:
    return request.param


@pytest.fixture
def model_config(stream) -> ModelConfig:
    return small_model(stream)
