"""Memory that a training step on the CPU frees stays with the process, for the next step.

glibc gives large blocks back to the system when they are freed, and every step pays for them again, page by page:
gradients of whole embedding tables, logits. Here they stay on the heap until the training is over. It concerns Linux
with glibc; elsewhere, and where the user has set malloc's own environment variables, nothing is changed.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator

import torch

# Of mallopt(3).
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4
NEVER = -1
#: What glibc arrives at by itself in a process that frees blocks of many megabytes.
USUAL = {MMAP_MAX: 65536, MMAP_THRESHOLD: 32 * 2**20, TRIM_THRESHOLD: 64 * 2**20}
CHOSEN_BY_USER = (
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
)

_keeping = False


def keep() -> bool:
    """From now on, keep what is freed. True if that is a change."""
    global _keeping
    libc = _libc()
    if _keeping or libc is None:
        return False
    libc.mallopt(MMAP_MAX, 0)
    libc.mallopt(TRIM_THRESHOLD, NEVER)
    _keeping = True
    return True


def give_back() -> None:
    """Return what is free to the system, now and from now on."""
    global _keeping
    libc = _libc()
    if libc is None:
        return
    if _keeping:
        for option, value in USUAL.items():
            libc.mallopt(option, value)
        _keeping = False
    libc.malloc_trim(0)


@contextlib.contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Around the training of a model on `device`."""
    changed = device.type == "cpu" and keep()
    try:
        yield
    finally:
        if changed:
            give_back()


@functools.cache
def _libc() -> ctypes.CDLL | None:
    if any(os.environ.get(name) for name in CHOSEN_BY_USER):
        return None
    with contextlib.suppress(OSError):
        libc = ctypes.CDLL("libc.so.6")
        if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
            return libc
    return None
