"""Reading datasets: across shard borders, windows, damaged folders, and the reading thread."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rmt.data
from rmt.data import Order, Prefetcher, TokenDataset, document_ids
from rmt.errors import InputError


@pytest.fixture
def dataset(text: Path, make: Any) -> TokenDataset:
    return TokenDataset.open(make(text, shard_tokens=500, dev=0.1))


def test_tokens_are_read_across_shard_borders(dataset: TokenDataset, text: Path, make: Any) -> None:
    whole = TokenDataset.open(make(text, out="whole", dev=0.1))
    total = dataset.tokens("train")
    assert len(dataset.manifest["splits"]["train"]["shards"]) > 3
    assert len(whole.manifest["splits"]["train"]["shards"]) == 1
    everything = whole.read("train", 0, total)
    assert everything.dtype == np.int64
    assert np.array_equal(dataset.read("train", 0, total), everything)
    for start, length in [(0, 0), (499, 2), (500, 1), (123, 1500), (total - 1, 1), (total, 0)]:
        assert np.array_equal(dataset.read("train", start, length), everything[start : start + length])


def test_the_fingerprint_does_not_depend_on_how_shards_are_cut(dataset: TokenDataset, text: Path, make: Any) -> None:
    assert TokenDataset.open(make(text, out="whole", dev=0.1)).fingerprint == dataset.fingerprint
    assert TokenDataset.open(make(text, out="other", dev=0.2)).fingerprint != dataset.fingerprint


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, -1), (0, 10**9)])
def test_tokens_that_do_not_exist_are_refused(dataset: TokenDataset, start: int, length: int) -> None:
    with pytest.raises(InputError, match="do not exist"):
        dataset.read("train", start, length)


def test_windows_tile_the_tokens_and_share_one_token_with_the_next(dataset: TokenDataset) -> None:
    count = dataset.windows("train", 16)
    batch = dataset.window_batch("train", 16, np.arange(count))
    assert batch.shape == (count, 17)
    assert np.array_equal(batch[:, :-1].ravel(), dataset.read("train", 0, 16 * count))
    assert np.array_equal(batch[:-1, -1], batch[1:, 0])
    assert 0 <= dataset.tokens("train") - (16 * count + 1) < 16


def test_a_corpus_shorter_than_a_window_is_one_clear_line(dataset: TokenDataset) -> None:
    tokens = dataset.tokens("dev")
    assert dataset.windows("dev", tokens - 1) == 1
    with pytest.raises(InputError, match=rf"dev .* has {tokens} tokens, fewer than one window of {tokens} \+ 1"):
        dataset.windows("dev", tokens)


def test_an_unknown_split_is_refused_with_the_nearest(dataset: TokenDataset) -> None:
    with pytest.raises(InputError, match="'train'"):
        dataset.tokens("trian")


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4))
def test_document_ids_count_up_after_each_end_of_text(rows: list[list[int]]) -> None:
    ids = document_ids(np.array(rows), eot=0)
    for row, found in zip(rows, ids.tolist(), strict=True):
        assert found == [row[:place].count(0) for place in range(5)]


def test_document_ids_keep_the_end_of_text_with_its_document() -> None:
    assert document_ids(np.array([5, 6, 0, 7, 0, 0, 8]), eot=0).tolist() == [0, 0, 0, 1, 1, 2, 3]


def test_batches_arrive_in_order_and_equal_direct_reading(dataset: TokenDataset) -> None:
    order = Order(dataset.fingerprint, dataset.windows("train", 16), batch_size=6, seed=1)
    with Prefetcher(dataset, order, split="train", context=16, start=5) as loader:
        for expected in range(5, 40):
            step, ids, tokens = next(loader)
            assert step == expected
            assert np.array_equal(ids, order.window_ids(step))
            assert np.array_equal(tokens, dataset.window_batch("train", 16, ids))


def test_slices_of_rows_put_together_are_the_whole_batch(dataset: TokenDataset) -> None:
    order = Order(dataset.fingerprint, dataset.windows("train", 16), batch_size=6)
    slices = [None, slice(0, 2), slice(2, 6)]
    loaders = [Prefetcher(dataset, order, split="train", context=16, rows=rows) for rows in slices]
    for (_, whole, whole_tokens), (_, a, a_tokens), (_, b, b_tokens), _ in zip(*loaders, range(9), strict=False):
        assert np.array_equal(whole, np.concatenate([a, b]))
        assert np.array_equal(whole_tokens, np.concatenate([a_tokens, b_tokens]))
    for loader in loaders:
        loader.close()


def test_an_error_while_reading_ahead_is_raised_in_the_consumer_at_its_step(
    dataset: TokenDataset, monkeypatch: Any
) -> None:
    order = Order(dataset.fingerprint, 10**6, batch_size=1)  # far more windows than there are
    read = dataset.read
    calls: list[int] = []

    def fails_at_third(split: str, start: int, length: int) -> Any:
        calls.append(start)
        if len(calls) == 3:
            raise OSError("disk gone")
        return read(split, 0, length)

    monkeypatch.setattr(dataset, "read", fails_at_third)
    loader = Prefetcher(dataset, order, split="train", context=16)
    assert [next(loader)[0], next(loader)[0]] == [0, 1]
    with pytest.raises(OSError, match="disk gone"):
        next(loader)
    with pytest.raises(StopIteration):
        next(loader)


def test_closing_ends_the_thread_even_when_nobody_reads(dataset: TokenDataset) -> None:
    order = Order(dataset.fingerprint, dataset.windows("train", 16), batch_size=2)
    loader = Prefetcher(dataset, order, split="train", context=16, depth=1)
    loader.close()
    assert not any(thread.name == "rmt-prefetch" for thread in threading.enumerate())
    assert list(loader) == []


def test_opening_a_folder_that_is_no_dataset_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"not a token dataset .*rmt data prepare"):
        TokenDataset.open(tmp_path)


def change_manifest(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_text("[]"), "not the manifest"),
        (lambda path: (path / "manifest.json").write_bytes(b"\xff"), "manifest.json is damaged"),
        (lambda path: change_manifest(path, version=99), "version 99"),
        (lambda path: change_manifest(path, dtype="float8"), "float8"),
        (lambda path: change_manifest(path, splits={}), "manifest.json is damaged"),
        (lambda path: change_manifest(path, splits=None), "manifest.json is damaged"),
        (lambda path: (path / "train-00001.bin").unlink(), "train-00001.bin is missing"),
        (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda path: (path / "train-00000.bin").write_bytes(b"1"), "train-00000.bin is damaged: 1 bytes instead of"),
    ],
)
def test_a_damaged_dataset_is_refused_and_the_file_named(dataset: TokenDataset, damage: Any, message: str) -> None:
    damage(dataset.path)
    with pytest.raises(InputError, match=message):
        TokenDataset.open(dataset.path)


def test_a_manifest_cannot_lead_out_of_its_folder(dataset: TokenDataset) -> None:
    splits = dataset.manifest["splits"]
    splits["train"]["shards"][0]["file"] = "../secret.bin"
    change_manifest(dataset.path, splits=splits)
    with pytest.raises(InputError, match="unexpected shard name"):
        TokenDataset.open(dataset.path)


def test_verify_passes_and_reports_what_it_read(dataset: TokenDataset) -> None:
    report = rmt.data.verify(dataset.path)
    assert report["ok"]
    assert report["tokens"] == {split: dataset.tokens(split) for split in ("train", "dev")}


@pytest.mark.parametrize("name", ["train-00002.bin", "dev-00000.bin", "tokenizer.json"])
def test_verify_finds_a_single_changed_bit_in_any_file(dataset: TokenDataset, name: str) -> None:
    content = bytearray((dataset.path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (dataset.path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name} is damaged"):
        rmt.data.verify(dataset.path)


@pytest.mark.parametrize("changes", [{"fingerprint": "0" * 64}, {"eot": 1}, {"vocab_size": 100}, {"vocab_size": 5000}])
def test_verify_finds_a_changed_manifest(dataset: TokenDataset, changes: dict[str, Any]) -> None:
    change_manifest(dataset.path, **changes)
    with pytest.raises(InputError):
        rmt.data.verify(dataset.path)
