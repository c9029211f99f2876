"""What a token dataset says about itself: reading `manifest.json` with suspicion, the fingerprint, and `verify`.

A dataset is a folder: `manifest.json`, `tokenizer.json` and, per split, shards `train-00000.bin`, ... of little-endian
uint16 or uint32 tokens. The fingerprint is a hash of the token sequences and the tokenizer, not of how they are cut
into shards, so it names exactly what a model is trained on.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rmt.data.tokenizer import FILE as TOKENIZER_FILE
from rmt.errors import InputError

FILE = "manifest.json"
FORMAT, VERSION = "rmt-tokens", 1
SPLITS = ("train", "dev")
DTYPES = {"uint16": "<u2", "uint32": "<u4"}
BLOCK = 1 << 22

REQUIRED = ("fingerprint", "tokenizer", "vocab_size", "eot", "dtype", "splits")
REBUILD = "Prepare the dataset again with `rmt data prepare`."


def token_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a dataset whose files are all there with the right sizes, or `InputError`."""
    path = folder / FILE
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{folder} is not a token dataset (no {FILE}): make one with `rmt data prepare SRC --out {folder}`."
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is damaged: {error}. {REBUILD}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path} is not the manifest of a token dataset. {REBUILD}")
    if manifest.get("version") != VERSION:
        raise InputError(f"{path} has format version {manifest.get('version')!r}; this rmt reads {VERSION}. {REBUILD}")
    try:
        check_manifest(manifest, folder)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged: {type(error).__name__} {error}. {REBUILD}") from None
    return manifest


def check_manifest(manifest: dict[str, Any], folder: Path) -> None:
    for key in REQUIRED:
        if key not in manifest:
            raise InputError(f"{folder / FILE} is damaged: it lacks {key!r}. {REBUILD}")
    if manifest["dtype"] not in DTYPES:
        raise InputError(f"{folder / FILE} is damaged: unknown dtype {manifest['dtype']!r}. {REBUILD}")
    if not (folder / TOKENIZER_FILE).is_file():
        raise InputError(f"{folder / TOKENIZER_FILE} is missing. {REBUILD}")
    itemsize = np.dtype(DTYPES[manifest["dtype"]]).itemsize
    for split in SPLITS:
        entry = manifest["splits"][split]
        for number, shard in enumerate(entry["shards"]):
            if shard["file"] != shard_name(split, number):  # also keeps a foreign manifest inside its folder
                raise InputError(f"{folder / FILE} is damaged: unexpected shard name {shard['file']!r}. {REBUILD}")
            path = folder / shard["file"]
            if not path.is_file():
                raise InputError(f"{path} is missing. {REBUILD}")
            expected, found = shard["tokens"] * itemsize, path.stat().st_size
            if found != expected:
                raise InputError(f"{path} is damaged: {found} bytes instead of {expected}. {REBUILD}")
        if entry["tokens"] != sum(shard["tokens"] for shard in entry["shards"]):
            raise InputError(f"{folder / FILE} is damaged: the shards of {split} do not add up. {REBUILD}")


def fingerprint(manifest: dict[str, Any]) -> str:
    content = {
        "format": [FORMAT, VERSION],
        "tokenizer": manifest["tokenizer"]["sha256"],
        "vocab_size": manifest["vocab_size"],
        "eot": manifest["eot"],
        "dtype": manifest["dtype"],
        "splits": {split: [manifest["splits"][split][key] for key in ("tokens", "sha256")] for split in SPLITS},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for block in blocks(path):
        digest.update(block)
    return digest.hexdigest()


def hash_shards(paths: Iterable[Path]) -> tuple[list[str], str]:
    """The sha256 of each shard, and of all their bytes in a row."""
    whole, each = hashlib.sha256(), []
    for path in paths:
        one = hashlib.sha256()
        for block in blocks(path):
            one.update(block)
            whole.update(block)
        each.append(one.hexdigest())
    return each, whole.hexdigest()


def verify(path: str | Path) -> dict[str, Any]:
    """Read every byte of a dataset and compare it with its manifest; `InputError` names the file that differs."""
    folder = Path(path)
    manifest = read_manifest(folder)
    if file_sha256(folder / TOKENIZER_FILE) != manifest["tokenizer"]["sha256"]:
        raise InputError(f"{folder / TOKENIZER_FILE} is damaged: its checksum differs from the manifest's. {REBUILD}")
    read = (folder / TOKENIZER_FILE).stat().st_size
    for split in SPLITS:
        entry = manifest["splits"][split]
        paths = [folder / shard["file"] for shard in entry["shards"]]
        each, whole = hash_shards(paths)
        for shard, shard_path, found in zip(entry["shards"], paths, each, strict=True):
            if found != shard["sha256"]:
                raise InputError(f"{shard_path} is damaged: its checksum differs from the manifest's. {REBUILD}")
            read += shard_path.stat().st_size
        if whole != entry["sha256"]:
            raise InputError(f"{folder / FILE} is damaged: the checksum of split {split} is wrong. {REBUILD}")
        check_tokens(manifest, split, paths)
    if fingerprint(manifest) != manifest["fingerprint"]:
        raise InputError(f"{folder / FILE} is damaged: its fingerprint does not match its content. {REBUILD}")
    return {
        "path": str(folder),
        "ok": True,
        "fingerprint": manifest["fingerprint"],
        "bytes": read,
        "shards": sum(len(manifest["splits"][split]["shards"]) for split in SPLITS),
        "tokens": {split: manifest["splits"][split]["tokens"] for split in SPLITS},
    }


def check_tokens(manifest: dict[str, Any], split: str, paths: list[Path]) -> None:
    """Every token is in the vocabulary, and as many documents end as the manifest says, the last with the split."""
    dtype = np.dtype(DTYPES[manifest["dtype"]])
    documents, last = 0, manifest["eot"]
    for path in paths:
        for block in blocks(path):
            tokens = np.frombuffer(block, dtype=dtype)
            documents += int((tokens == manifest["eot"]).sum())
            last = int(tokens[-1])
            if int(tokens.max()) >= manifest["vocab_size"]:
                raise InputError(f"{path} holds a token outside the vocabulary of {manifest['vocab_size']}. {REBUILD}")
    if documents != manifest["splits"][split]["documents"] or last != manifest["eot"]:
        raise InputError(f"split {split} holds {documents} complete documents, not as its manifest says. {REBUILD}")
