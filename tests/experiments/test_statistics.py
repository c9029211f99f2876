"""Intervals and p-values against tabulated values and against simulation."""

import numpy as np
import pytest

from rmt.experiments.statistics import holm, mean_and_interval, paired_p_value, t_quantile, t_within


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (100, 1.984)])
def test_quantiles_of_students_t_are_those_of_the_tables(freedom, quantile):
    assert t_quantile(0.95, freedom) == pytest.approx(quantile, abs=6e-4)
    assert t_within(quantile, freedom) == pytest.approx(0.95, abs=1e-4)


def test_intervals_hold_the_mean_as_often_as_they_say():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(1000):
        mean, half = mean_and_interval(rng.normal(3.0, 0.5, size=3))
        held += abs(mean - 3.0) <= half
    assert held / 1000 == pytest.approx(0.95, abs=0.02)
    assert mean_and_interval([1.0]) == (1.0, None)


def test_p_values_are_uniform_where_there_is_no_difference():
    rng = np.random.default_rng(1)
    values = [paired_p_value(*rng.normal(size=(2, 4))) for _ in range(1000)]
    assert np.quantile(values, [0.05, 0.5, 0.95]) == pytest.approx([0.05, 0.5, 0.95], abs=0.05)


def test_pairs_that_agree_are_more_convincing_than_their_spread():
    losses = np.array([4.1, 4.5, 4.9])
    assert paired_p_value(losses, losses + np.array([0.10, 0.11, 0.12])) < 0.01
    assert paired_p_value(losses, losses) == 1.0
    assert paired_p_value([1.0], [2.0]) is None


def test_several_tests_are_corrected_for():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
