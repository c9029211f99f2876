"""The order of windows: laws of the permutation, and independence from how a batch is shared out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmt.data import Order
from rmt.data.order import permute, round_keys
from rmt.errors import InputError


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.text(max_size=5))
def test_the_order_of_an_epoch_is_a_permutation_of_all_windows(windows: int, seed: int, fingerprint: str) -> None:
    ids = permute(np.arange(windows), windows, round_keys(fingerprint, seed, 0))
    assert np.array_equal(np.sort(ids), np.arange(windows))


@pytest.mark.parametrize("windows", [2**40, 2**40 + 1, 10**12 + 7, 2**62])
def test_a_huge_number_of_windows_needs_no_memory_and_no_two_places_collide(windows: int) -> None:
    ids = Order("print", windows, 4096, seed=1).window_ids(10**6 if windows > 2**41 else 3)
    assert len(np.unique(ids)) == 4096
    assert ids.min() >= 0
    assert ids.max() < windows


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 20))
def test_steps_walk_through_epochs_without_leaving_a_window_out(windows: int, batch: int, seed: int) -> None:
    order = Order("print", windows, batch, seed)
    steps = -(-3 * windows // batch)
    sequence = np.concatenate([order.window_ids(step) for step in range(steps)])[: 3 * windows]
    for epoch in sequence.reshape(3, windows):
        assert np.array_equal(np.sort(epoch), np.arange(windows))


@settings(deadline=None)
@given(st.integers(1, 500), st.sampled_from([1, 2, 4, 8]), st.integers(0, 30))
def test_the_global_order_does_not_depend_on_the_batch_size(windows: int, parts: int, start: int) -> None:
    whole = Order("print", windows, 8, seed=3).window_ids(start)
    small = Order("print", windows, 8 // parts, seed=3)
    assert np.array_equal(whole, np.concatenate([small.window_ids(start * parts + part) for part in range(parts)]))


def test_epoch_counts_the_complete_passes_before_a_step() -> None:
    order = Order("print", windows=10, batch_size=4)
    assert [order.epoch(step) for step in range(6)] == [0, 0, 0, 1, 1, 2]


def test_epochs_seeds_and_fingerprints_give_different_orders() -> None:
    orders = [Order("a", 1000, 1000, 0).window_ids(0), Order("a", 1000, 1000, 0).window_ids(1)]
    orders += [Order("a", 1000, 1000, 1).window_ids(0), Order("b", 1000, 1000, 0).window_ids(0)]
    for i, first in enumerate(orders):
        for second in orders[:i]:
            assert (first == second).mean() < 0.02


def test_the_order_is_the_same_for_ever() -> None:
    """A change here would silently give every resumed run other data."""
    assert Order("f" * 64, windows=1000, batch_size=8, seed=7).window_ids(0).tolist() == PINNED


PINNED = [35, 638, 589, 706, 727, 478, 431, 313]


def test_every_window_is_equally_likely_at_every_place() -> None:
    windows, seeds = 10, 1500
    counts = np.zeros((windows, windows))
    for seed in range(seeds):
        counts[np.arange(windows), Order("print", windows, windows, seed).window_ids(0)] += 1
    expected = seeds / windows
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 81 + 5 * np.sqrt(2 * 81)  # (windows - 1)**2 degrees of freedom, five standard deviations


def test_neighbours_do_not_stay_neighbours() -> None:
    ids = Order("print", windows=100_000, batch_size=100_000).window_ids(0)
    assert abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(np.arange(100_000), ids)[0, 1]) < 0.02


@pytest.mark.parametrize("wrong", [{"windows": 0}, {"batch_size": 0}])
def test_sizes_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="at least 1"):
        Order("print", **({"windows": 5, "batch_size": 2} | wrong))


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(InputError, match="-1"):
        Order("print", 5, 2).window_ids(-1)
