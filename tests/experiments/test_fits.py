"""Fits find laws that are known, say how sure they are, and repeat themselves bit for bit."""

import numpy as np
import pytest

from rmt.experiments.fits import Law, bootstrap, fit, interval

PARAMETERS = np.geomspace(1e4, 3e5, 5).repeat(3)
TOKENS = PARAMETERS * np.tile([10.0, 20.0, 40.0], 5)
CHINCHILLA = Law(floor=1.69, scales=(406.4, 410.7), exponents=(0.34, 0.28))


def noisy(losses, size=0.003, seed=0):
    return losses * np.exp(np.random.default_rng(seed).normal(0.0, size, len(losses)))


def test_a_law_in_parameters_and_tokens_is_recovered_exactly():
    found = fit([PARAMETERS, TOKENS], CHINCHILLA.loss(PARAMETERS, TOKENS))
    assert found.floor == pytest.approx(CHINCHILLA.floor, rel=1e-4)
    assert found.scales == pytest.approx(CHINCHILLA.scales, rel=1e-3)
    assert found.exponents == pytest.approx(CHINCHILLA.exponents, rel=1e-4)
    assert found.error < 1e-6


@pytest.mark.parametrize("floor", [0.0, 2.5])
def test_a_power_law_is_recovered_with_and_without_a_floor(floor):
    true, spent = Law(floor, (90.0,), (0.12,)), np.geomspace(1e15, 1e19, 6)
    found = fit([spent], true.loss(spent), floor=floor > 0)
    assert (found.floor, *found.scales, *found.exponents) == pytest.approx((floor, 90.0, 0.12), rel=1e-4)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    true, spent = Law(0.0, (30.0,), (0.08,)), np.geomspace(1e12, 1e15, 5).repeat(2)
    covered = 0
    for seed in range(40):
        losses = noisy(true.loss(spent), seed=seed)
        others = bootstrap(fit([spent], losses, floor=False), [spent], losses, 100)
        low, high = interval([law.exponents[0] for law in others])
        covered += low <= 0.08 <= high
    assert 33 <= covered <= 40, f"{covered} of 40 intervals of 95 %"


def test_noisy_runs_give_exponents_within_their_intervals():
    losses = noisy(CHINCHILLA.loss(PARAMETERS, TOKENS), 0.001)
    others = bootstrap(fit([PARAMETERS, TOKENS], losses), [PARAMETERS, TOKENS], losses)
    for index, exponent in enumerate(CHINCHILLA.exponents):
        low, high = interval([law.exponents[index] for law in others])
        assert low <= exponent <= high


def test_one_wild_run_hardly_moves_the_fit():
    true, spent = Law(0.0, (30.0,), (0.08,)), np.geomspace(1e12, 1e15, 8)
    losses = true.loss(spent)
    losses[3] *= 1.2
    assert fit([spent], losses, floor=False).exponents[0] == pytest.approx(0.08, rel=0.02)


def test_what_is_needed_is_the_inverse_of_the_loss():
    law = Law(1.5, (40.0,), (0.1,))
    assert law.needed(float(law.loss(3e16))) == pytest.approx(3e16)
    assert law.needed(1.5) == float("inf")


def test_the_same_input_gives_the_same_bits():
    losses = noisy(CHINCHILLA.loss(PARAMETERS, TOKENS))
    one, two = (fit([PARAMETERS, TOKENS], losses) for _ in range(2))
    assert one == two
    assert bootstrap(one, [PARAMETERS, TOKENS], losses, 20) == bootstrap(two, [PARAMETERS, TOKENS], losses, 20)
