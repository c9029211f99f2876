"""The folder `OUT.partial` in which a dataset grows until it is complete and renamed to `OUT`.

`plan.json` says what is being built (another plan starts over), `progress.json` how many chunks of text are finished
and how many tokens each split then had. Tokens are on disk before the record that counts them, so after a crash
everything beyond the record is cut off and the work goes on from there. One process at a time holds the lock.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rmt.data.manifest import FILE as MANIFEST_FILE
from rmt.data.manifest import SPLITS, shard_name
from rmt.errors import InputError

PLAN, PROGRESS, LOCK, STDIN = "plan.json", "progress.json", "lock", "stdin.txt"


@dataclass
class Finished:
    """How far the work has come: chunks, the digest of their text, and the tokens they gave."""

    chunks: int = 0
    digest: str = ""
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))


class Workspace:
    def __init__(self, out: Path, overwrite: bool) -> None:
        self.out, self.overwrite = out, overwrite
        self.folder = out.with_name(out.name + ".partial")

    @contextmanager
    def open(self) -> Iterator[None]:
        """Hold the folder for this process, after making sure that its result may be put in place."""
        self.check_output()
        try:
            if self.folder.exists() and not self.is_ours():
                raise InputError(f"{self.folder} is in the way: remove it, or choose another --out.")
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LOCK).open("w") as lock:
                acquire(lock.fileno(), self.folder)
                try:
                    yield
                except InputError:
                    if not (self.folder / PROGRESS).exists():  # nothing worth resuming
                        shutil.rmtree(self.folder, ignore_errors=True)
                    raise
        except OSError as error:
            raise InputError(f"cannot write {self.folder}: {error.strerror or error}.") from error

    def is_ours(self) -> bool:
        if not self.folder.is_dir():
            return False
        names = set(os.listdir(self.folder))
        return not names or LOCK in names or MANIFEST_FILE in names

    def check_output(self) -> None:
        if not self.out.name:
            raise InputError(f"--out {self.out} is not a name for a new folder.")
        try:
            in_use = self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir()))
        except OSError as error:
            raise InputError(f"cannot use {self.out}: {error.strerror or error}.") from error
        if not in_use:
            return
        if not (self.out / MANIFEST_FILE).is_file():
            raise InputError(f"{self.out} exists and is not a token dataset: choose another --out.")
        if not self.overwrite:
            raise InputError(f"{self.out} exists already: choose another --out, or replace it with --overwrite.")

    def begin(self, plan: dict[str, Any]) -> Finished:
        """Go on if the folder holds unfinished work of the same plan; otherwise start over."""
        if self.read(PLAN) != plan:
            self.clear()
            self.write(PLAN, plan)
        try:
            finished = Finished(**(self.read(PROGRESS) or {}))
        except TypeError:
            finished = Finished()
        return finished

    def clear(self) -> None:
        for path in self.folder.iterdir():
            if path.name not in (LOCK, STDIN):
                path.unlink()

    def read(self, name: str) -> Any:
        try:
            return json.loads((self.folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def write(self, name: str, value: Any) -> None:
        new = self.folder / f"{name}.new"
        with new.open("w", encoding="utf-8") as file:
            file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
            sync(file.fileno())
        new.replace(self.folder / name)

    def save(self, finished: Finished) -> None:
        self.write(PROGRESS, asdict(finished))

    def publish(self) -> None:
        """Everything is written: drop the scaffolding, make it durable, and give the folder its name."""
        for name in (PLAN, PROGRESS, STDIN, LOCK):
            (self.folder / name).unlink(missing_ok=True)
        for path in self.folder.iterdir():
            sync_path(path)
        sync_path(self.folder)
        replaced = self.out.with_name(self.out.name + ".replaced")
        if self.out.exists() and any(self.out.iterdir()):
            shutil.rmtree(replaced, ignore_errors=True)
            self.out.rename(replaced)
        self.folder.rename(self.out)
        sync_path(self.out.parent)
        shutil.rmtree(replaced, ignore_errors=True)


class ShardWriter:
    """Appends tokens to the shards of one split; shard k holds tokens [k * shard_tokens, (k + 1) * shard_tokens)."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, dtype: np.dtype[Any], tokens: int) -> None:
        self.folder, self.split, self.shard_tokens, self.dtype = folder, split, shard_tokens, dtype
        self.tokens = tokens
        self._file: BinaryIO | None = None
        self._unsynced: list[BinaryIO] = []
        self._cut_back()

    def _cut_back(self) -> None:
        """Remove what an interrupted run wrote after its last record."""
        full, rest = divmod(self.tokens, self.shard_tokens)
        for path in self.folder.glob(f"{self.split}-*.bin"):
            if path.name > shard_name(self.split, full) or (path.name == shard_name(self.split, full) and not rest):
                path.unlink()
        if rest:
            os.truncate(self.folder / shard_name(self.split, full), rest * self.dtype.itemsize)

    def append(self, tokens: npt.NDArray[Any]) -> None:
        while len(tokens):
            number, used = divmod(self.tokens, self.shard_tokens)
            if self._file is None or not used:
                self._file = (self.folder / shard_name(self.split, number)).open("ab")
                self._unsynced.append(self._file)
            part = tokens[: self.shard_tokens - used]
            self._file.write(part.tobytes())
            self.tokens += len(part)
            tokens = tokens[len(part) :]

    def sync(self) -> None:
        for file in self._unsynced:
            file.flush()
            sync(file.fileno())
            if file is not self._file:
                file.close()
        self._unsynced = [self._file] if self._file else []

    def close(self) -> None:
        for file in self._unsynced:
            file.close()

    def shards(self) -> list[tuple[Path, int]]:
        """Every shard with its number of tokens."""
        starts = range(0, self.tokens, self.shard_tokens)
        return [
            (self.folder / shard_name(self.split, number), min(self.shard_tokens, self.tokens - start))
            for number, start in enumerate(starts)
        ]


def acquire(descriptor: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such lock on this system: two runs into one folder are the user's to avoid
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"another process is writing {folder}: wait for it, or choose another --out.") from None


def sync(descriptor: int) -> None:
    os.fsync(descriptor)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
