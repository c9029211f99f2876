"""Perplexity of a model on text or on a token dataset, by token, by word and by byte.

A text is scored from its first token, which follows the end-of-text token, in windows of the model's context: next to
one another ("full": every token is predicted once, from what its window holds before it), or overlapping ("sliding":
each window moves by `stride` tokens and scores only those, so that every token but the first ones has a long context;
slower, lower). Words and bytes are those of the text before tokenization, words counted as lm-evaluation-harness
counts them, so the numbers can be compared across tokenizers.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from rmt.data import TokenDataset
from rmt.errors import InputError
from rmt.hub.folder import Loaded
from rmt.model import LanguageModel

Window = Literal["full", "sliding"]
IGNORED = -100
FIELDS = ("text", "page", "content")  # of a document in a jsonl file
HEADING = re.compile(r"^ = [^=\n]+ = $", re.MULTILINE)  # a page of WikiText begins


class Text(NamedTuple):
    """A document: what the model reads, and the text whose words and bytes count."""

    read: str
    counted: str


class Sequence(NamedTuple):
    """Tokens to score, after a first one that is given, and how many words and bytes they stand for."""

    tokens: np.ndarray
    words: int
    bytes: int


@dataclass(frozen=True)
class Perplexity:
    """The summed negative log-likelihood in nats, and what it is divided by."""

    nll: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0

    @property
    def token_perplexity(self) -> float:
        return math.exp(self.nll / self.tokens)

    @property
    def word_perplexity(self) -> float:
        return math.exp(min(self.nll / self.words, 700.0))  # beyond that a float has no number

    @property
    def byte_perplexity(self) -> float:
        return math.exp(self.nll / self.bytes)

    @property
    def bits_per_byte(self) -> float:
        return self.nll / self.bytes / math.log(2)

    def to_dict(self) -> dict[str, Any]:
        names = ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "nll", "tokens", "words")
        return {name: getattr(self, name) for name in (*names, "bytes")}


def read_texts(path: Path, form: str = "plain") -> Iterator[Text]:
    """The documents of a file: a jsonl file has one per line, any other is one; or WikiText's raw form, by page."""
    try:
        content = path.expanduser().read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}.") from None
    if form == "wikitext":
        yield from wikitext_pages(content)
    elif path.suffix == ".jsonl":
        for number, line in enumerate(content.splitlines(), 1):
            text = document_of(line, f"{path}, line {number}")
            yield Text(text, text)
    else:
        yield Text(content, content)


def document_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
        return next(record[name] for name in FIELDS if isinstance(record.get(name), str))
    except (ValueError, AttributeError, StopIteration):
        raise InputError(f"{where}: expected an object with a text in {' or '.join(FIELDS)}.") from None


def wikitext_pages(content: str) -> Iterator[Text]:
    """Pages of WikiText's raw form, read as plain text again by the harness's rules; the raw words count."""
    try:
        from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
    except ImportError:
        from rmt.evaluate.harness import MISSING

        raise InputError(MISSING) from None
    starts = [found.start() for found in HEADING.finditer(content)] or [0]
    for start, end in zip(starts, [*starts[1:], len(content)], strict=True):
        page = content[start:end] if end == len(content) else content[start:end].removesuffix("\n")
        yield Text(wikitext_detokenizer({"page": page}), page)


def text_sequences(loaded: Loaded, texts: Iterable[Text]) -> Iterator[Sequence]:
    for text in texts:
        ids = loaded.tokenizer.encode(text.read, add_special_tokens=False).ids
        if ids:
            tokens = np.array([loaded.eot, *ids], dtype=np.int64)
            yield Sequence(tokens, len(re.split(r"\s+", text.counted)), len(text.counted.encode("utf-8")))


def dataset_sequence(loaded: Loaded, data: str | Path, split: str, documents: int | None) -> Sequence:
    """A split, or its first documents, as one sequence: the windows run across documents, as in training."""
    dataset = TokenDataset.open(data)
    if dataset.vocab_size > loaded.model.config.vocab_size:
        raise InputError(
            f"{data} has a vocabulary of {dataset.vocab_size}, {loaded.path} of {loaded.model.config.vocab_size}: "
            "they do not belong together."
        )
    tokenizer = dataset.tokenizer()
    length = words = size = 0
    for ids in islice(dataset.documents(split), documents):
        text = tokenizer.decode(ids.tolist())
        length, words, size = length + len(ids) + 1, words + len(re.split(r"\s+", text)), size + len(text.encode())
    if length < 2:
        raise InputError(f"split {split} of {data} has too few tokens to score.")
    return Sequence(dataset.read(split, 0, length), words, size)


def spans(tokens: int, context: int, window: Window, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows as (first input, end, first target that it scores) over `tokens` predictions.

    The last one is moved back to be as long as the others, as the harness does it.
    """
    step = context if window == "full" else stride
    scored = start = 0
    while scored < tokens:
        end = min(start + context, tokens)
        yield max(0, end - context), end, scored
        scored, start = end, start + step


@torch.no_grad()
def score(
    model: LanguageModel,
    sequences: Iterable[Sequence],
    *,
    window: Window = "full",
    stride: int | None = None,
    batch: int = 16,
    progress: Callable[[int], None] | None = None,
) -> Perplexity:
    """The perplexity of a model on some sequences.

    Args:
        model: the network, in evaluation mode.
        sequences: from `text_sequences` or `dataset_sequence`.
        window: "full" or "sliding" (see the top of this file).
        stride: of the sliding window (default: half the context).
        batch: windows at a time.
        progress: called with the number of tokens scored in each batch.
    """
    context = model.config.context
    stride = stride or max(1, context // 2)
    if window == "sliding" and stride > context:
        raise InputError(f"--stride {stride} is longer than the context of {context}: tokens would be left out.")
    device, total = next(model.parameters()).device, Perplexity()
    rows: list[tuple[np.ndarray, np.ndarray]] = []

    def flush() -> float:
        length = max(len(ids) for ids, _ in rows)
        ids_BT = torch.zeros(len(rows), length, dtype=torch.int64)
        targets_BT = torch.full((len(rows), length), IGNORED)
        for row, (ids, targets) in enumerate(rows):
            ids_BT[row, : len(ids)], targets_BT[row, : len(ids)] = torch.from_numpy(ids), torch.from_numpy(targets)
        count = int((targets_BT != IGNORED).sum())
        ce = model(ids_BT.to(device), targets=targets_BT.to(device)).ce
        rows.clear()
        if progress is not None:
            progress(count)
        return float(ce) * count

    for sequence in sequences:
        predictions = len(sequence.tokens) - 1
        total = replace(
            total,
            tokens=total.tokens + predictions,
            words=total.words + sequence.words,
            bytes=total.bytes + sequence.bytes,
        )
        for start, end, scored in spans(predictions, context, window, stride):
            targets = sequence.tokens[start + 1 : end + 1].copy()
            targets[: scored - start] = IGNORED
            rows.append((sequence.tokens[start:end], targets))
            if len(rows) == batch:
                total = replace(total, nll=total.nll + flush())
    if rows:
        total = replace(total, nll=total.nll + flush())
    if not total.tokens:
        raise InputError("there is no text to score.")
    return total
