"""Zstandard files read to their true end: every frame, and a file that stops in the middle of one is an error."""

import io
from typing import BinaryIO

from rmt.errors import InputError

BLOCK = 1 << 17


class ZstdReader(io.RawIOBase):
    """A readable stream over a .zst file. (The library's own reader takes a truncated file for a complete one.)"""

    def __init__(self, raw: BinaryIO) -> None:
        try:
            import zstandard
        except ImportError:
            raise InputError(
                "reading .zst files needs zstandard: pip install 'residual-matrix-transformer[data]'"
            ) from None
        self._raw, self._library = raw, zstandard
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._left = b""  # compressed bytes not used yet
        self._text = memoryview(b"")  # decompressed bytes not given out yet
        self._started = False  # is a frame open?

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._text:
            block = self._left or self._raw.read(BLOCK)
            self._left = b""
            if not block:
                if self._started:
                    raise EOFError("the file ends in the middle of a zstandard frame")
                return 0
            self._text = memoryview(self._decompress(block))
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def _decompress(self, block: bytes) -> bytes:
        try:
            text = self._frame.decompress(block)
        except self._library.ZstdError as error:
            raise OSError(str(error)) from error
        self._started = not self._frame.eof
        if self._frame.eof:
            self._left = self._frame.unused_data
            self._frame = self._library.ZstdDecompressor().decompressobj()
        return text
