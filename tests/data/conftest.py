"""Small corpora in temporary folders, and `prepare` with the settings that keep tests quick."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rmt.data

Prepare = Callable[..., Path]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """60 short documents in one text file."""
    path = tmp_path / "corpus.txt"
    documents = [f"Document {n}.\n\nIt says that {n} times {n} is {n * n}.\n" * (1 + n % 4) for n in range(60)]
    path.write_text("\n<|endoftext|>\n".join(documents), encoding="utf-8")
    return path


@pytest.fixture
def make(tmp_path: Path) -> Prepare:
    """Prepare a dataset (byte-level, one process unless told otherwise) and return its path."""

    def run(*sources: Any, out: str = "out", tokenizer: str = "train:300", workers: int = 1, **options: Any) -> Path:
        rmt.data.prepare(sources, tokenizer, tmp_path / out, workers=workers, **options)
        return tmp_path / out

    return run


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*records: Any, name: str = "corpus.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return path

    return write


@pytest.fixture
def corpora(shared: Path) -> Path:
    folder = shared / "data" / "corpora"
    if not folder.is_dir():
        pytest.skip("the real corpora are not on this machine")
    return folder


def documents(path: Path, split: str = "train") -> list[str]:
    dataset = rmt.data.TokenDataset.open(path)
    tokenizer = dataset.tokenizer()
    return [tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in dataset.documents(split)]


def all_bytes(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


@pytest.fixture(name="documents")
def documents_fixture() -> Callable[..., list[str]]:
    return documents


@pytest.fixture(name="all_bytes")
def all_bytes_fixture() -> Callable[[Path], dict[str, bytes]]:
    return all_bytes
