"""The order of training data as a pure function of (fingerprint, seed, step): nothing to save, nothing to restore.

Each epoch visits every window once, in an order given by a permutation of [0, windows) that is computed, not stored:
a Feistel network over the next power of two, with cycle walking (values outside the range are sent through again until
they fall inside). Position p of the endless sequence is the same window whatever the number of processes or
micro-batches; step s with batch size B uses the positions s*B ... s*B + B - 1.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rmt.errors import InputError

Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]

ROUNDS = 8  # even, so that the two halves have their own widths again at the end
SMALLEST_BITS = 6  # a narrower network mixes badly


@dataclass(frozen=True)
class Order:
    fingerprint: str
    windows: int
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("windows", "batch_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}.")

    def window_ids(self, step: int) -> Int64:
        """The windows of a step, [batch_size]; a step that crosses the end of an epoch goes on in the next one."""
        positions = self._first_position(step) + np.arange(self.batch_size, dtype=np.int64)
        epochs, places = np.divmod(positions, self.windows)
        ids = np.empty(self.batch_size, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            ids[chosen] = permute(places[chosen], self.windows, round_keys(self.fingerprint, self.seed, int(epoch)))
        return ids

    def epoch(self, step: int) -> int:
        """How many times all windows have been visited before the first position of this step."""
        return self._first_position(step) // self.windows

    def _first_position(self, step: int) -> int:
        if step < 0:
            raise InputError(f"a step is 0 or more, got {step}.")
        return step * self.batch_size


def round_keys(fingerprint: str, seed: int, epoch: int) -> UInt64:
    digest = hashlib.blake2b(f"{fingerprint}/{seed}/{epoch}".encode(), digest_size=8 * ROUNDS, person=b"rmt-order")
    return np.frombuffer(digest.digest(), dtype="<u8").astype(np.uint64)


def permute(places: Int64, size: int, keys: UInt64) -> Int64:
    """Where a permutation of [0, size), chosen by the keys, sends each place."""
    if size == 1:
        return np.zeros_like(places)
    bits = max(SMALLEST_BITS, (size - 1).bit_length())
    values = feistel(places.astype(np.uint64), bits, keys)
    while (outside := values >= size).any():
        values[outside] = feistel(values[outside], bits, keys)
    return values.astype(np.int64)


def feistel(values: UInt64, bits: int, keys: UInt64) -> UInt64:
    """A bijection of [0, 2**bits). Each round is invertible whatever `mix` does: the right half passes unchanged."""
    left_bits, right_bits = np.uint64(bits - bits // 2), np.uint64(bits // 2)
    one = np.uint64(1)
    left, right = values >> right_bits, values & ((one << right_bits) - one)
    for key in keys:
        left, right = right, left ^ (mix(right, key) & ((one << left_bits) - one))
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right


def mix(values: UInt64, key: np.uint64) -> UInt64:
    """Every bit of the result depends on every bit of value and key (multiply and fold, modulo 2**64)."""
    values = (values ^ key) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))
