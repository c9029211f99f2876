"""`prepare`: sources in, a complete token dataset out, or nothing.

Text is read in a fixed order, split, gathered into chunks of about a megabyte and tokenized by several processes; the
tokens are appended in order, so the bytes written depend on the text and the settings only. See `workspace` for how
an interrupted run goes on where it stopped.
"""

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from rmt.data.encoding import Chunk, encode_chunks
from rmt.data.manifest import DTYPES, FORMAT, SPLITS, VERSION, file_sha256, fingerprint, hash_shards, token_dtype
from rmt.data.manifest import FILE as MANIFEST_FILE
from rmt.data.progress import Meter, meter
from rmt.data.sources import Corpus, Source, find_sources
from rmt.data.split import SplitRule, Unit, split_rule
from rmt.data.tokenizer import (
    END_OF_TEXT,
    TokenizerFile,
    load_tokenizer,
    train_tokenizer,
    trained_size,
    vocabulary_size,
)
from rmt.data.tokenizer import FILE as TOKENIZER_FILE
from rmt.data.workspace import STDIN, Finished, ShardWriter, Workspace
from rmt.errors import InputError

CHUNK_BYTES = 1 << 20
SAVE_EVERY = 1.0  # seconds between records of finished work


class SourcesChangedError(Exception):
    """The text read now is not the text that the finished chunks were made from."""


def prepare(
    sources: Sequence[str | os.PathLike[str]],
    tokenizer: str,
    out: str | os.PathLike[str],
    *,
    field: str = "text",
    dev: float = 0.01,
    workers: int | None = None,
    strict: bool = False,
    shard_tokens: int = 100_000_000,
    overwrite: bool = False,
    progress: bool = False,
) -> dict[str, Any]:
    """Write the token dataset `out` and return its manifest.

    sources: files, folders, "-" for standard input, Hugging Face dataset names (`name` or `name:configuration`).
    tokenizer: "gpt2", a folder, or "train:N" for a byte-level BPE of N tokens learnt from these sources.
    field: where jsonl, parquet and datasets keep the text.   dev: the share of text held out, 0 for none.
    workers: processes that tokenize (default: one per core); the result does not depend on it.
    strict: refuse invalid UTF-8 instead of replacing and counting it.   overwrite: replace an existing dataset.
    """
    if shard_tokens < 1:
        raise InputError(f"shard_tokens must be at least 1, got {shard_tokens}.")
    if workers is not None and workers < 1:
        raise InputError(f"workers must be at least 1, got {workers}.")
    size = trained_size(tokenizer)
    given = None if size else load_tokenizer(tokenizer)
    find_sources(sources)  # a misspelt name is reported before anything is written
    split_rule(dev, ())

    work = Workspace(Path(out).expanduser(), overwrite)
    with work.open():
        corpus = Corpus(find_sources(sources, copy_stdin(work, sources)), field, strict)
        plan = {
            "version": VERSION,
            "tokenizer": given.sha256 if given else tokenizer,
            "sources": [identity(source) for source in corpus.sources],
            "settings": [field, dev, strict, shard_tokens],
        }
        finished = work.begin(plan)
        show = meter(progress, corpus.size)
        rule = split_rule(dev, corpus.pieces())
        chosen = given or trained(work, corpus, size or 0, show)
        chosen.save(work.folder)
        build = Build(work, corpus, rule, chosen, shard_tokens, workers or os.cpu_count() or 1, show)
        with show:
            manifest = build.run(finished)
        work.write(MANIFEST_FILE, manifest)
        work.publish()
    return manifest


def copy_stdin(work: Workspace, sources: Sequence[str | os.PathLike[str]]) -> Path | None:
    """Standard input can be read once only, so it is kept in the workspace until the dataset is complete."""
    if all(os.fspath(source) != "-" for source in sources):
        return None
    path = work.folder / STDIN
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
    return path


def identity(source: Source) -> list[str | int]:
    if source.name == "-" and source.path is not None:
        return ["-", file_sha256(source.path)]
    return source.identity()


def trained(work: Workspace, corpus: Corpus, size: int, show: Meter) -> TokenizerFile:
    """The tokenizer that an interrupted run of this plan trained, or a new one."""
    path = work.folder / TOKENIZER_FILE
    if path.exists():
        return TokenizerFile(f"train:{size}", path.read_text(encoding="utf-8"), END_OF_TEXT)
    show.say(f"training a tokenizer of {size} tokens")
    return train_tokenizer((piece.text.decode() for piece in corpus.pieces()), size)


class Build:
    """One dataset in the making."""

    def __init__(
        self,
        work: Workspace,
        corpus: Corpus,
        rule: SplitRule,
        tokenizer: TokenizerFile,
        shard_tokens: int,
        workers: int,
        show: Meter,
    ) -> None:
        self.work, self.corpus, self.rule, self.tokenizer = work, corpus, rule, tokenizer
        self.shard_tokens, self.workers, self.show = shard_tokens, workers, show
        loaded = tokenizer.load()
        self.vocab_size = vocabulary_size(loaded)
        self.eot = int(loaded.token_to_id(tokenizer.eot_token) or 0)
        self.dtype = token_dtype(self.vocab_size)
        self.documents = dict.fromkeys(SPLITS, 0)
        self.bytes = dict.fromkeys(SPLITS, 0)

    def run(self, finished: Finished) -> dict[str, Any]:
        try:
            writers = self.write_tokens(finished)
        except SourcesChangedError:
            self.show.say("the sources have changed since the interrupted run: starting over")
            writers = self.write_tokens(Finished())
        if not any(writer.tokens for writer in writers.values()):
            names = ", ".join(source.name for source in self.corpus.sources)
            raise InputError(f"the corpus is empty: there is no text in {names}.")
        return self.manifest(writers)

    def write_tokens(self, finished: Finished) -> dict[str, ShardWriter]:
        dtype = np.dtype(DTYPES[self.dtype])
        encoder = (self.work.folder / TOKENIZER_FILE, self.eot, DTYPES[self.dtype])
        with ExitStack() as stack:
            writers = {
                split: ShardWriter(self.work.folder, split, self.shard_tokens, dtype, finished.tokens[split])
                for split in SPLITS
            }
            for writer in writers.values():
                stack.callback(writer.close)
            chunks, saved = finished.chunks, time.monotonic()
            for chunk, tokens in encode_chunks(self.unfinished_chunks(finished), encoder, self.workers):
                for split, values in tokens.items():
                    writers[split].append(values)
                chunks += 1
                self.show.advance(chunk.position, chunk.bytes, sum(map(len, tokens.values())))
                if time.monotonic() - saved >= SAVE_EVERY:
                    for writer in writers.values():
                        writer.sync()
                    totals = {split: writer.tokens for split, writer in writers.items()}
                    self.work.save(Finished(chunks, chunk.digest, totals))
                    saved = time.monotonic()
            for writer in writers.values():
                writer.sync()
            return writers

    def unfinished_chunks(self, finished: Finished) -> Iterator[Chunk]:
        """The chunks still to be tokenized. The finished ones are read again, to count them and to be sure of them."""
        self.documents, self.bytes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
        skipped = 0
        for number, chunk in enumerate(self.chunks(), start=1):
            for unit in chunk.units:
                self.documents[unit.split] += unit.ends
                self.bytes[unit.split] += len(unit.text)
            if number > finished.chunks:
                yield chunk
                continue
            skipped += chunk.bytes
            if number == finished.chunks:
                if chunk.digest != finished.digest:
                    raise SourcesChangedError
                self.show.say(f"resuming: {skipped / 1e6:,.1f} MB of text are tokenized already")

    def chunks(self) -> Iterator[Chunk]:
        digest, units, size = hashlib.blake2b(digest_size=32), list[Unit](), 0
        for piece in self.corpus.pieces():
            for unit in self.rule.units(piece):
                digest.update(f"{unit.split} {unit.ends} {len(unit.text)} ".encode())
                digest.update(unit.text)
                units.append(unit)
                size += len(unit.text)
            if size >= CHUNK_BYTES:
                yield Chunk(units, digest.hexdigest(), self.corpus.position)
                units, size = [], 0
        if units:
            yield Chunk(units, digest.hexdigest(), self.corpus.position)

    def manifest(self, writers: dict[str, ShardWriter]) -> dict[str, Any]:
        splits = {}
        for split, writer in writers.items():
            shards = writer.shards()
            each, whole = hash_shards(path for path, _ in shards)
            splits[split] = {
                "documents": self.documents[split],
                "tokens": writer.tokens,
                "bytes": self.bytes[split],
                "sha256": whole,
                "shards": [
                    {"file": path.name, "tokens": tokens, "sha256": sha256}
                    for (path, tokens), sha256 in zip(shards, each, strict=True)
                ],
            }
        sources = self.corpus.sources
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": "",
            "tokenizer": {
                "name": self.tokenizer.name,
                "sha256": self.tokenizer.sha256,
                "eot_token": self.tokenizer.eot_token,
            },
            "vocab_size": self.vocab_size,
            "eot": self.eot,
            "dtype": self.dtype,
            "dev_share": self.rule.share,
            "documents": sum(source.documents for source in sources),
            "bytes": sum(source.bytes for source in sources),
            "invalid_sequences": sum(source.invalid for source in sources),
            "splits": splits,
            "sources": [
                {
                    "name": source.name,
                    "documents": source.documents,
                    "bytes": source.bytes,
                    "invalid_sequences": source.invalid,
                }
                for source in sources
            ],
        }
        manifest["fingerprint"] = fingerprint(manifest)
        return manifest
