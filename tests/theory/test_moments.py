"""How variance moves: the closed forms, the paper's table, and random data through the real modules."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rmt
from rmt.theory.moments import TABLE_1, propagate, xavier

EXPECTED = {
    ("attention", "store", "matrix"): (0.4, 1.6),
    ("attention", "retrieve", "matrix"): (8 / 7, 6 / 7),
    ("attention", "store", "vector"): (1.0, 1.0),
    ("attention", "retrieve", "vector"): (0.5, 1.5),
    ("feed_forward", "store", "matrix"): (0.4, 1.6),
    ("feed_forward", "retrieve", "matrix"): (1.6, 0.4),
    ("feed_forward", "store", "vector"): (1.6, 0.4),
    ("feed_forward", "retrieve", "vector"): (0.4, 1.6),
}


@pytest.fixture(scope="module")
def medium():
    """GPT2-medium, the dimensions of the paper's table, measured."""
    return rmt.moments()


@pytest.mark.parametrize(("place", "expected"), EXPECTED.items())
def test_theory_gives_the_variance_ratios_of_gpt2_medium(medium, place, expected):
    row = medium.find(*place)
    assert (row.forward, row.backward) == pytest.approx(expected)


@pytest.mark.parametrize("place", EXPECTED)
def test_real_modules_move_variance_as_theory_says(medium, place):
    row = medium.find(*place)
    assert row.measured_forward == pytest.approx(row.forward, rel=0.03)
    assert row.measured_backward == pytest.approx(row.backward, rel=0.03)
    assert abs(row.measured_mean) < 0.02


def test_only_the_feed_forward_rows_of_the_matrix_stream_are_marked_wrong(medium):
    wrong = {(row.layer, row.operation, row.stream) for row in medium.rows if row.paper_is_wrong}
    assert wrong == {("feed_forward", "store", "matrix"), ("feed_forward", "retrieve", "matrix")}


@given(key_dim=st.integers(1, 40), heads=st.integers(1, 12), head_dim=st.integers(1, 8), ff_dim=st.integers(1, 64))
@settings(max_examples=40, deadline=None)
def test_forward_and_backward_ratios_of_xavier_weights_sum_to_two(key_dim, heads, head_dim, ff_dim):
    result = rmt.moments(key_dim, heads, head_dim, ff_dim, samples=0)
    for row in result.rows:
        assert row.forward + row.backward == pytest.approx(2)
        assert row.measured_forward is None
        assert (row.forward == pytest.approx(1)) == (row.fan_in == row.fan_out)


def test_as_many_keys_as_vectors_make_the_feed_forward_boundary_ideal():
    result = rmt.moments(key_dim=16, heads=16, samples=0)
    for operation in ("store", "retrieve"):
        row = result.find("feed_forward", operation, "matrix")
        assert (row.forward, row.backward) == (1, 1)


def test_a_mean_of_the_inputs_adds_its_square_to_their_variance():
    assert propagate(10, xavier(10, 30), variance=1.0, mean=2.0) == (0.0, pytest.approx(10 / 20 * 5))
    result = rmt.moments(32, 16, 4, 64, samples=30_000, input_mean=1.5)
    for row in result.rows:
        assert row.measured_forward == pytest.approx(row.forward, rel=0.1)


def test_the_same_seed_measures_the_same():
    first, again, other = (rmt.moments(4, 2, 3, 8, samples=500, seed=seed).to_dict() for seed in (1, 1, 2))
    assert first == again != other


def test_moments_are_plain_data():
    data = json.loads(json.dumps(rmt.moments(4, 2, 3, 8, samples=10).to_dict()))
    assert len(data["rows"]) == 8
    assert set(data["closed_forms"]) == set(TABLE_1)
    assert data["rows"][0]["paper_forward"] is None, "the paper prints one set of dimensions only"


@pytest.mark.parametrize("wrong", [{"key_dim": 0}, {"heads": -1}, {"samples": -5}, {"input_mean": float("nan")}])
def test_moments_refuse_impossible_settings(wrong):
    with pytest.raises(rmt.InputError, match=next(iter(wrong))):
        rmt.moments(**wrong)
