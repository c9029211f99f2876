"""Documents as bounded pieces of UTF-8, so that a 100 GB file without a single separator needs no more memory than a
short note. A document up to about a megabyte is one piece; a longer one is cut, at a blank line where there is one,
into sections of that size. Cuts depend only on the document, never on how the file was read.
"""

from collections.abc import Iterable, Iterator
from typing import BinaryIO, NamedTuple

SEPARATOR = b"<|endoftext|>"
SECTION = 1 << 20  # bytes of text in a section of a long document
LONG_DOCUMENT = 1 << 18  # above this a document is "long": see rmt.data.split
LOOK_BACK = 4096  # how far before the wanted place a cut may move to find a better one
BLOCK = 1 << 20


class Piece(NamedTuple):
    """Text that stays together: a whole document (`first` and `last`) or one section of a long one."""

    text: bytes
    first: bool
    last: bool

    @property
    def whole(self) -> bool:
        return self.first and self.last


def cut_point(text: bytes | bytearray, wanted: int, look_back: int = LOOK_BACK) -> int:
    """The best place to cut at or shortly before `wanted`: at a blank line, else a line end, else a space.

    The cut comes before the white space, which then belongs to what follows: GPT-2's tokenizer always starts a new
    word there, so that cutting changes no token.
    """
    lowest = max(0, wanted - look_back)
    for mark in (b"\n\n", b"\n\r\n", b"\n", b" "):
        at = text.rfind(mark, lowest, wanted)
        while at > lowest and text[at - 1] in b" \t\r\n":
            at -= 1
        if at > lowest:
            return at
    while 0 < wanted < len(text) and text[wanted] & 0xC0 == 0x80:  # never inside a character
        wanted -= 1
    return wanted


def sections(parts: Iterable[tuple[bytes, bool]], drop_newline: bool = False) -> Iterator[Piece]:
    """Pieces from (bytes, does a document end here?); `drop_newline` takes the line end before a separator away."""
    document, first = bytearray(), True
    for part, ends in parts:
        document += part
        # A section leaves only when enough follows that the last one is long as well.
        while len(document) >= SECTION + LONG_DOCUMENT:
            cut = cut_point(document, SECTION)
            yield Piece(bytes(document[:cut]), first, False)
            del document[:cut]
            first = False
        if ends:
            text = bytes(document)
            if drop_newline and text.endswith(b"\n"):
                text = text[:-2] if text.endswith(b"\r\n") else text[:-1]
            yield Piece(text, first, True)
            document, first = bytearray(), True
    if document:
        yield Piece(bytes(document), first, True)


def document_pieces(text: bytes) -> Iterator[Piece]:
    """The pieces of one document that is already in memory (a line of jsonl, a row of parquet)."""
    return sections([(text, True)])


def text_pieces(stream: BinaryIO) -> Iterator[Piece]:
    """The pieces of a text file, in which a line `<|endoftext|>` ends a document."""
    return sections(separated(stream), drop_newline=True)


def separated(stream: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """The bytes of a stream without its separator lines, and whether such a line followed."""
    at_line_start, first_block = True, True
    while block := stream.read(BLOCK):
        if not block.endswith(b"\n"):
            block += stream.readline(BLOCK)  # whole lines, unless a line is longer than any separator could be
        if first_block:
            block, first_block = block.removeprefix(b"\xef\xbb\xbf"), False  # the byte order mark of some editors
        start = search = 0
        while (at := block.find(SEPARATOR, search)) >= 0:
            search = at + len(SEPARATOR)
            line_end = block.find(b"\n", search)
            line_end = len(block) if line_end < 0 else line_end
            starts_line = at_line_start if at == 0 else block[at - 1] == 0x0A
            if starts_line and not block[search:line_end].strip():
                yield block[start:at], True
                start = search = min(line_end + 1, len(block))
        yield block[start:], False
        at_line_start = block.endswith(b"\n")
