"""Text to tokens, in this process or in several: chunks go out in order and their tokens come back in order, so that
the result does not depend on the number of workers. A worker ends when its parent does, however the parent ended.
"""

import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rmt.data.split import Unit
from rmt.data.tokenizer import cuts_are_exact, one_thread
from rmt.errors import InputError

SHORT_TEXT = 4096  # characters; the Rust tokenizer takes twice as long per byte for texts of 64 kB
CHUNKS_AHEAD = 3  # per worker: enough that none waits, few enough to bound memory
WORD_END = re.compile(r"(?<=\S)\s")

Tokens = dict[str, npt.NDArray[np.unsignedinteger[Any]]]


class Chunk(NamedTuple):
    """About a megabyte of text, and how far the sources had been read when it was complete."""

    units: list[Unit]
    digest: str  # of all text up to the end of this chunk
    position: int

    @property
    def bytes(self) -> int:
        return sum(len(unit.text) for unit in self.units)


class Encoder:
    """The tokenizer of a dataset, ready to turn units into tokens of the dataset's type."""

    def __init__(self, tokenizer_file: Path, eot: int, dtype: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a text is text
        self.exact_cuts = cuts_are_exact(self.tokenizer)
        self.eot, self.dtype = eot, np.dtype(dtype)

    def encode(self, units: list[Unit]) -> Tokens:
        texts = [self.short_texts(unit.text.decode()) for unit in units]
        with one_thread():
            encodings = iter(self.tokenizer.encode_batch_fast(list(chain(*texts)), add_special_tokens=False))
        tokens: dict[str, list[npt.NDArray[Any]]] = {}
        for unit, parts in zip(units, texts, strict=True):
            found = tokens.setdefault(unit.split, [])
            found += [np.array(encoding.ids, dtype=self.dtype) for encoding in islice(encodings, len(parts))]
            if any((ids == self.eot).any() for ids in found[-len(parts) :]):
                raise InputError("this tokenizer turns ordinary text into its end-of-text token: choose another one.")
            if unit.ends:
                found.append(np.array([self.eot], dtype=self.dtype))
        return {split: np.concatenate(parts) for split, parts in tokens.items()}

    def short_texts(self, text: str) -> list[str]:
        """The text cut where no token crosses, if this tokenizer allows it."""
        if not self.exact_cuts:
            return [text]
        texts, start = [], 0
        while (found := WORD_END.search(text, start + SHORT_TEXT)) is not None:
            texts.append(text[start : found.start()])
            start = found.start()
        texts.append(text[start:])
        return texts


def encode_chunks(
    chunks: Iterator[Chunk], encoder: tuple[Path, int, str], workers: int
) -> Iterator[tuple[Chunk, Tokens]]:
    """Every chunk with its tokens, in order, computed by `workers` processes (none for one worker or one chunk)."""
    head = list(islice(chunks, 2))
    chunks = chain(head, chunks)
    if workers == 1 or len(head) < 2:
        local = Encoder(*encoder)
        yield from ((chunk, local.encode(chunk.units)) for chunk in chunks)
        return
    # Fresh processes, not forks: safe beside the threads of a caller, and the same on every system.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker, encoder)
    try:
        yield from in_order(lambda chunk: pool.submit(encode_in_worker, chunk.units), chunks, workers * CHUNKS_AHEAD)
    except BrokenProcessPool as error:
        raise InputError(
            "a worker process ended unexpectedly (out of memory, or a script without `if __name__ == '__main__'`): "
            "rerun to resume, with fewer workers if memory is short."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def in_order(
    submit: Callable[[Chunk], "Future[Tokens]"], chunks: Iterable[Chunk], ahead: int
) -> Iterator[tuple[Chunk, Tokens]]:
    waiting: deque[tuple[Chunk, Future[Tokens]]] = deque()
    for chunk in chunks:
        waiting.append((chunk, submit(chunk)))
        if len(waiting) == ahead:
            first, future = waiting.popleft()
            yield first, future.result()
    for chunk, future in waiting:
        yield chunk, future.result()


WORKER: dict[str, Encoder] = {}


def start_worker(tokenizer_file: Path, eot: int, dtype: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    threading.Thread(target=end_with_parent, daemon=True).start()
    WORKER["encoder"] = Encoder(tokenizer_file, eot, dtype)


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def encode_in_worker(units: list[Unit]) -> Tokens:
    return WORKER["encoder"].encode(units)
