"""Reading a token dataset: memory-mapped shards behind one token sequence per split, and windows of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rmt.data.manifest import DTYPES, SPLITS, read_manifest
from rmt.data.tokenizer import FILE as TOKENIZER_FILE
from rmt.errors import InputError, suggest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Int64 = npt.NDArray[np.int64]
SCAN = 1 << 20  # tokens looked at in one go


class TokenDataset:
    """A dataset written by `rmt data prepare`; `TokenDataset.open(path)` checks it (names and sizes) and maps it."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self.fingerprint: str = manifest["fingerprint"]
        self.vocab_size: int = manifest["vocab_size"]
        self.eot: int = manifest["eot"]
        dtype = np.dtype(DTYPES[manifest["dtype"]])
        self._shards: dict[str, list[npt.NDArray[Any]]] = {}
        self._starts: dict[str, Int64] = {}  # the first token of each shard, and the end of the last
        for split in SPLITS:
            shards = [shard for shard in manifest["splits"][split]["shards"] if shard["tokens"]]
            self._shards[split] = [np.memmap(path / shard["file"], dtype=dtype, mode="r") for shard in shards]
            self._starts[split] = np.cumsum([0, *(shard["tokens"] for shard in shards)], dtype=np.int64)

    @classmethod
    def open(cls, path: str | Path) -> "TokenDataset":
        folder = Path(path).expanduser()
        return cls(folder, read_manifest(folder))

    def tokenizer(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        try:
            return Tokenizer.from_file(str(self.path / TOKENIZER_FILE))
        except Exception as error:  # the Rust library raises a bare Exception
            raise InputError(f"{self.path / TOKENIZER_FILE} is damaged ({error}): run `rmt data verify`.") from error

    def tokens(self, split: str) -> int:
        """How many tokens a split has."""
        if split not in self._starts:
            raise InputError(f"there is no split {split!r}. {suggest(split, SPLITS)}")
        return int(self._starts[split][-1])

    def read(self, split: str, start: int, length: int) -> Int64:
        """Tokens [start, start + length) of a split, across shard borders."""
        total = self.tokens(split)
        if start < 0 or length < 0 or start + length > total:
            raise InputError(f"tokens {start} to {start + length} of {split} do not exist: it has {total}.")
        result = np.empty(length, dtype=np.int64)
        starts, filled = self._starts[split], 0
        shard = int(np.searchsorted(starts, start, side="right")) - 1
        while filled < length:
            offset = start + filled - int(starts[shard])
            part = self._shards[split][shard][offset : offset + length - filled]
            result[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return result

    def windows(self, split: str, context: int) -> int:
        """How many windows of `context` inputs, each with its targets, the split holds. They do not overlap."""
        if context < 1:
            raise InputError(f"context must be at least 1, got {context}.")
        total = self.tokens(split)
        if total < context + 1:
            advice = (
                "use a smaller context or more text" if split == "train" else "use a smaller context or a larger --dev"
            )
            raise InputError(
                f"split {split} of {self.path} has {total} tokens, fewer than one window of {context} + 1: {advice}."
            )
        return (total - 1) // context

    def window_batch(self, split: str, context: int, ids: Int64) -> Int64:
        """Windows [len(ids), context + 1]: columns 0..context-1 are inputs, 1..context their targets."""
        batch = np.empty((len(ids), context + 1), dtype=np.int64)
        for row, window in enumerate(np.asarray(ids).tolist()):
            batch[row] = self.read(split, window * context, context + 1)
        return batch

    def documents(self, split: str) -> Iterator[Int64]:
        """The documents of a split, one after the other, each without its end-of-text token."""
        total, open_parts = self.tokens(split), list[Int64]()
        for start in range(0, total, SCAN):
            block = self.read(split, start, min(SCAN, total - start))
            *complete, rest = np.split(block, np.flatnonzero(block == self.eot) + 1)
            for part in complete:
                yield np.concatenate([*open_parts, part[:-1]])
                open_parts = []
            open_parts.append(rest)


def document_ids(tokens: Int64, eot: int) -> Int64:
    """Which document of its row each token belongs to: 0, 0, 0 (end of text), 1, 1, ..., counted per row."""
    ends = (np.asarray(tokens) == eot).astype(np.int64)
    return np.cumsum(ends, axis=-1) - ends
