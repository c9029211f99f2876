"""Files that can be trusted: written through to the disk, replaced in one step, with their sha256.

Tensors are written in the safetensors format here, and not by its library, because a checkpoint is written while
training goes on: no second copy of the tensors is made, the sha256 comes from the same pass, other threads run
meanwhile (hashing and writing release the interpreter), and a full disk is an ordinary OSError. They are read by the
library.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
CHUNK = 4 * 2**20
ALIGNMENT = 8


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write tensors of the CPU as a safetensors file; returns its sha256. Wide types first, so that all are aligned."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, dict] = {}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    contents = (tensors[name].reshape(-1).view(torch.uint8).numpy().data for name in names)
    return write_bytes(path, len(text).to_bytes(8, "little"), text, *contents)


def write_bytes(path: Path, *contents: bytes | memoryview) -> str:
    """Write a file through to the disk; returns its sha256."""
    sha256 = hashlib.sha256()
    with open(path, "wb") as file:
        for content in contents:
            for start in range(0, len(content), CHUNK):
                part = content[start : start + CHUNK]
                sha256.update(part)
                file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


def write_text(path: Path, text: str) -> None:
    """Replace a file in one step: a reader sees the old content or the new, never a part, whenever the power fails."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        write_bytes(temporary, text.encode())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def render_sums(sums: Iterable[tuple[str, str]]) -> str:
    """The text of a checksum file as `sha256sum` writes and checks it."""
    return "".join(f"{sha256}  {name}\n" for name, sha256 in sums)


def parse_sums(text: str) -> dict[str, str]:
    pairs = (line.partition("  ") for line in text.splitlines())
    return {name: sha256 for sha256, _, name in pairs}
