"""The Triton kernels in Triton's interpreter: against the definition on drawn shapes, and the authors' numbers.

Run by test_triton.py, with TRITON_INTERPRET=1. The interpreter is slow, so the shapes are small and few.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_boundary import assert_equal_to_definition, chain, in_float64, norms, run
from test_choice import assert_equal_to_the_authors

from rmt.ops.boundary import Norming

small = st.tuples(
    st.integers(1, 20),  # tokens: one or several programs, the last one not full
    st.sampled_from([1, 2, 5, 16, 19]),
    st.sampled_from([1, 3, 8, 17, 33]),
    st.integers(1, 13),
    st.integers(1, 18),
    st.sampled_from(["full", "value", "none"]),
).filter(lambda drawn: drawn[1] * drawn[2] > 1)


@given(dims=small, norm=norms)
@settings(max_examples=12, deadline=None)
def test_float32_equals_the_definition(dims, norm):
    assert_equal_to_definition(chain(dims, dtype=torch.float32), norm, "triton", 1e-5)


def test_float32_in_two_passes_over_more_than_one_block():
    dims = (18, 64, 48, 4, 5, "full")
    assert_equal_to_definition(chain(dims, dtype=torch.float32), Norming("rmsnorm", 1e-5), "triton", 1e-5)


@pytest.mark.parametrize("dims", [(9, 32, 64, 12, 33, "full"), (9, 64, 64, 4, 5, "full")])
def test_bfloat16_data_stays_near_the_definition(dims):
    steps = [(d.detach().bfloat16().requires_grad_(), *rest) for d, *rest in chain(dims, dtype=torch.float32)]
    exact = in_float64(steps)
    norm = Norming("layernorm", 1e-6)
    for ours, true in zip(run(steps, norm, "triton"), run(exact, norm, None), strict=True):
        largest = max(x.abs().max() for x in true)
        for one, other in zip(ours, true, strict=True):
            assert (one.double() - other).abs().max() <= 2e-2 * largest


@pytest.mark.parametrize("file", ["rmt_a", "rmt_mup"])
def test_the_authors_numbers(shared, file):
    assert_equal_to_the_authors(shared / "golden" / f"{file}.npz", "triton", "none")
