"""Which text is held out. A document goes to `dev` if the hash of its text is below the share, so it stays where it
is when documents are added, removed or reordered. A long document would make that a lottery (one file of Shakespeare
is all train or all dev), so each of its sections gives a part from its middle instead. `docs/data.md` has the rule.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from rmt.data.pieces import LONG_DOCUMENT, LOOK_BACK, Piece, cut_point
from rmt.errors import InputError

HASHES = 1 << 64
FEW_DOCUMENTS = 10


class Unit(NamedTuple):
    """Text for one split; `ends` says that an end-of-text token follows it."""

    split: str
    text: bytes
    ends: bool


@dataclass(frozen=True)
class SplitRule:
    share: float
    hash_limit: int
    long_document: int = LONG_DOCUMENT

    def units(self, piece: Piece) -> list[Unit]:
        if not self.share:
            return [Unit("train", piece.text, piece.last)]
        if not self.is_long(piece):
            return [Unit("dev" if document_hash(piece.text) < self.hash_limit else "train", piece.text, True)]
        start, end = self.held_out(piece.text)
        if start == end:
            return [Unit("train", piece.text, piece.last)]
        # The text breaks at both cuts, so the parts before them end: what follows them is not their continuation.
        before, held, after = piece.text[:start], piece.text[start:end], piece.text[end:]
        parts = [Unit("train", before, True), Unit("dev", held, True), Unit("train", after, piece.last)]
        return [part for part in parts if part.text]

    def held_out(self, text: bytes) -> tuple[int, int]:
        """The part of a long text that goes to dev: its share, at a place given by the hash, between good cuts."""
        size = max(1, round(self.share * len(text)))
        start = document_hash(text) % (len(text) - size + 1)
        look_back = min(LOOK_BACK, size // 2)
        return cut_point(text, start, look_back), cut_point(text, start + size, look_back)

    def is_long(self, piece: Piece) -> bool:
        return not piece.whole or len(piece.text) > self.long_document


def document_hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"rmt-split").digest(), "big")


def split_rule(share: float, pieces: Iterable[Piece]) -> SplitRule:
    """The rule for a corpus: the plain one as soon as a piece of it gives dev text, else one that does.

    Reads no further than the first piece that gives dev text, which takes 1 / share documents or so.
    """
    if not 0 <= share < 1:
        raise InputError(f"the dev share must be at least 0 and below 1, got {share:g} (0.01 holds out one percent).")
    rule = SplitRule(share, int(share * HASHES))
    if not share:
        return rule
    documents, lowest = 0, HASHES
    for piece in pieces:
        if rule.is_long(piece):
            return rule
        documents, lowest = documents + 1, min(lowest, document_hash(piece.text))
        if lowest < rule.hash_limit:
            return rule
    if documents < FEW_DOCUMENTS:
        return SplitRule(share, rule.hash_limit, long_document=0)
    return SplitRule(share, lowest + 1)
