"""Where text comes from: files, folders, standard input and Hugging Face datasets, read as one stream of pieces.

`Corpus` names the sources, reads them in a fixed order with bounded memory, and counts what it saw. A file's format is
known by its ending; an unknown ending given by hand is plain text. Every problem is an `InputError` with file and line.
"""

import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from rmt.data.hub import require_hub
from rmt.data.pieces import Piece, document_pieces, text_pieces
from rmt.data.zstd import ZstdReader
from rmt.errors import InputError, suggest

TEXT, JSONL, PARQUET = (".txt", ".text", ".md"), (".jsonl", ".ndjson"), (".parquet",)
COMPRESSED = (".gz", ".zst")
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
SURROGATES = re.compile("[\ud800-\udfff]")
INSTALL = "pip install 'residual-matrix-transformer[data]'"


@dataclass
class Source:
    """One file or dataset; `documents`, `bytes` and `invalid` are what the last complete reading counted."""

    name: str
    path: Path | None  # None: a dataset of the hub
    documents: int = 0
    bytes: int = 0
    invalid: int = 0

    @property
    def size(self) -> int | None:
        return self.path.stat().st_size if self.path else None

    def identity(self) -> list[str | int]:
        """What changes when the source does, as far as can be known without reading it."""
        if self.path is None:
            return [self.name]
        status = self.path.stat()
        return [self.name, status.st_size, status.st_mtime_ns]


class Corpus:
    def __init__(self, sources: Sequence[Source], field: str = "text", strict: bool = False) -> None:
        self.sources, self.field, self.strict = list(sources), field, strict
        self.position = 0  # bytes of the source files read so far, for a progress bar
        sizes = [source.size for source in self.sources]
        self.size = sum(cast(list[int], sizes)) if None not in sizes else None

    def pieces(self) -> Iterator[Piece]:
        """All text, from the beginning, as valid UTF-8; documents without a printable character are left out."""
        finished = 0
        for source in self.sources:
            source.documents = source.bytes = source.invalid = 0
            self.position = finished
            for piece in self._read(source):
                if piece.whole and not piece.text.strip():
                    continue
                source.documents += piece.last
                source.bytes += len(piece.text)
                yield piece
            finished += source.size or 0
        self.position = finished

    def _read(self, source: Source) -> Iterator[Piece]:
        if source.path is None:
            return self._documents(source, hub_texts(source.name, self.field))
        ending = format_ending(source.path)
        if ending in PARQUET:
            return self._documents(source, parquet_texts(source.path, self.field))
        if ending in JSONL:
            return self._jsonl(source)
        return self._text(source)

    def _text(self, source: Source) -> Iterator[Piece]:
        with self._open(source) as stream:
            for piece in text_pieces(stream):
                yield piece._replace(text=self._valid(piece.text, source, source.name))

    def _jsonl(self, source: Source) -> Iterator[Piece]:
        with self._open(source) as stream:
            for number, line in enumerate(stream, start=1):
                if not line.strip():
                    continue
                where = f"{source.name} line {number}"
                text = json_field(self._valid(line, source, where), self.field, where)
                yield from document_pieces(self._encode(text, source, where))

    def _documents(self, source: Source, texts: Iterator[tuple[str, str]]) -> Iterator[Piece]:
        for where, text in texts:
            yield from document_pieces(self._encode(text, source, where))

    @contextmanager
    def _open(self, source: Source) -> Iterator[BinaryIO]:
        assert source.path is not None
        before = self.position
        try:
            with source.path.open("rb") as raw:
                yield TrackedReader(decompressed(raw, source.path), lambda: self._at(before + raw.tell()))
        except (OSError, EOFError, zlib.error) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise InputError(f"cannot read {source.name}: {reason}.") from error

    def _at(self, position: int) -> None:
        self.position = position

    def _valid(self, data: bytes, source: Source, where: str) -> bytes:
        """The same bytes if they are UTF-8, else with U+FFFD in the place of each invalid sequence."""
        try:
            data.decode()
        except UnicodeDecodeError as error:
            if self.strict:
                raise InputError(
                    f"{where} is not valid UTF-8 (byte {data[error.start]:#04x}, {error.reason}): convert it, "
                    "or leave --strict out to replace such bytes."
                ) from None
            text = data.decode(errors="replace")
            source.invalid += text.count("\ufffd") - data.count("\ufffd".encode())
            return text.encode()
        return data

    def _encode(self, text: str, source: Source, where: str) -> bytes:
        """UTF-8; JSON can hold half of a surrogate pair, which is no character."""
        try:
            return text.encode()
        except UnicodeEncodeError:
            if self.strict:
                raise InputError(f"{where} holds half of a surrogate pair, which is not valid text.") from None
            text, replaced = SURROGATES.subn("\ufffd", text)
            source.invalid += replaced
            return text.encode()


class TrackedReader(io.BufferedReader):
    """A binary stream that says how far it has come whenever a block is read."""

    def __init__(self, stream: BinaryIO, moved: Callable[[], None]) -> None:
        super().__init__(cast(io.RawIOBase, stream), buffer_size=1 << 18)
        self._moved = moved

    def read(self, size: int | None = -1, /) -> bytes:
        self._moved()
        return super().read(size)

    def __next__(self) -> bytes:
        self._moved()
        return super().__next__()


def decompressed(raw: BinaryIO, path: Path) -> BinaryIO:
    ending = path.suffix.lower()
    if ending == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if ending == ".zst":
        return cast(BinaryIO, ZstdReader(raw))
    return raw


def json_field(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is not valid JSON ({error}).") from None
    if not isinstance(record, dict):
        raise InputError(f'{where} is not a JSON object: each line must look like {{"{field}": "..."}}.')
    if field not in record:
        raise InputError(f"{where} has no field {field!r}: name the text with --field. {suggest(field, record)}")
    return as_text(record[field], field, where)


def as_text(value: Any, field: str, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{where}: field {field!r} is not text but {type(value).__name__}.")
    return value


def parquet_texts(path: Path, field: str) -> Iterator[tuple[str, str]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError(f"reading {path} needs pyarrow: {INSTALL}") from None
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise InputError(f"{path} has no column {field!r}: name the text with --field. {suggest(field, names)}")
            row = 0
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    where = f"{path} row {row}"
                    yield where, as_text(value, field, where)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"cannot read {path} as parquet: {error}.") from error


def hub_texts(name: str, field: str) -> Iterator[tuple[str, str]]:
    """The `train` split of `dataset` or `dataset:configuration`, streamed."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError(
            f"there is no file or folder {name!r}; reading it as a Hugging Face dataset needs: {INSTALL}"
        ) from None
    dataset, _, configuration = name.partition(":")
    require_hub(f"there is no file or folder {name!r}", "give a path, or connect to load the dataset of that name.")
    try:
        for row, record in enumerate(load_dataset(dataset, configuration or None, split="train", streaming=True)):
            if field not in record:
                raise InputError(f"{name} has no column {field!r}: use --field. {suggest(field, record)}")
            where = f"{name} row {row + 1}"
            yield where, as_text(record[field], field, where)
    except InputError:
        raise
    except Exception as error:  # network, missing dataset, missing configuration: each library raises its own
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"cannot read {name!r}, neither a path nor a Hugging Face dataset: {reason}") from error


def find_sources(names: Sequence[str | os.PathLike[str]], stdin: Path | None = None) -> list[Source]:
    """The sources behind the names a person gave; `-` is the file `stdin`, to which standard input was copied."""
    if not names:
        raise InputError("no sources: give files, folders, '-' for standard input, or a Hugging Face dataset name.")
    sources: list[Source] = []
    for given in names:
        name = os.fspath(given)
        path = Path(name).expanduser()
        if name == "-":
            sources.append(Source("-", stdin))
        elif path.is_dir():
            sources += folder_sources(path)
        elif path.exists():
            sources.append(Source(name, path))
        elif HUB_NAME.fullmatch(name) and not has_known_ending(path):
            sources.append(Source(name, None))
        else:
            raise InputError(f"there is no file {name!r}.{similar_file(path)}")
    return sources


def folder_sources(folder: Path) -> list[Source]:
    files = [
        Path(parent) / file
        for parent, _, names in os.walk(folder)
        for file in names
        if not file.startswith(".") and has_known_ending(Path(file))
    ]
    if not files:
        known = " ".join((*TEXT, *JSONL, *PARQUET))
        raise InputError(f"folder {folder} holds no file with a known ending ({known}, also with .gz or .zst).")
    return [Source(file.as_posix(), file) for file in sorted(files)]


def format_ending(path: Path) -> str:
    """`.jsonl` for corpus.jsonl.zst."""
    return Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSED else path.suffix.lower()


def has_known_ending(path: Path) -> bool:
    return format_ending(path) in (*TEXT, *JSONL, *PARQUET)


def similar_file(path: Path) -> str:
    try:
        answer = suggest(path.name, os.listdir(path.parent))
    except OSError:
        return ""
    return f" {answer}" if answer.startswith("Did") else ""
