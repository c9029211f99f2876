"""The feed-forward core, with every policy and version, against its definition in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rmt.ops.feed_forward import activate, feed_forward
from rmt.ops.native import build


def definition(x, into_FD, out_DE, gated):
    h = x @ into_FD.t()
    if not gated:
        return F.gelu(h, approximate="tanh") @ out_DE.t()
    gate, up = h.chunk(2, dim=-1)
    return (F.silu(gate) * up) @ out_DE.t()


def draw(N, D, E, gated, dtype):
    generator = torch.Generator().manual_seed(N + 7 * E)
    shapes = ((N, D), (2 * E if gated else E, D), (D, E))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


shapes = st.tuples(st.integers(1, 12), st.integers(1, 9), st.sampled_from([1, 2, 7, 8, 9, 16, 23, 200]))


@pytest.mark.parametrize(("ops", "dtype", "tolerance"), [("portable", "float64", 1e-10), ("native", "float32", 1e-5)])
@given(shape=shapes, gated=st.booleans(), recompute=st.sampled_from(["none", "gelu", "ff", "full"]))
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_equal_the_definition(ops, dtype, tolerance, shape, gated, recompute):
    if ops == "native" and build.problem():
        pytest.skip(build.problem())
    given_tensors = draw(*shape, gated, getattr(torch, dtype))
    exact = [x.detach().double().requires_grad_() for x in given_tensors]
    y, truth = feed_forward(*given_tensors, gated, recompute, ops), definition(*exact, gated)
    assert (y - truth).abs().max() <= tolerance * truth.abs().max()
    slope = torch.randn_like(truth)
    ours = torch.autograd.grad(y, given_tensors, slope.to(y.dtype))
    for mine, theirs in zip(ours, torch.autograd.grad(truth, exact, slope), strict=True):
        assert (mine - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("gated", [False, True])
def test_far_from_zero_the_native_activation_is_the_identity_or_zero(native, gated):
    h = torch.tensor([-1e30, -1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4])
    expected = torch.where(h > 0, h, 0.0)
    if gated:
        h = torch.cat((h, torch.ones_like(h)))
    assert torch.allclose(activate(h, gated, native=True), expected, atol=1e-6)


def test_a_value_that_is_no_number_stays_one(native):
    assert activate(torch.full((1, 9), torch.nan), False, native=True).isnan().all()


def test_gradients_only_of_what_wants_them(native):
    x, into_FD, out_DE = draw(5, 4, 9, False, torch.float32)
    into_FD.requires_grad_(False)
    out_DE.requires_grad_(False)
    feed_forward(x, into_FD, out_DE, False).sum().backward()
    assert x.grad is not None
    assert into_FD.grad is None
    assert out_DE.grad is None


def test_second_derivatives_raise(native):
    x, into_FD, out_DE = draw(5, 4, 9, False, torch.float32)
    y = feed_forward(x, into_FD, out_DE, False)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_plain_can_be_differentiated_twice():
    x, into_FD, out_DE = draw(5, 4, 9, False, torch.float64)
    (slope,) = torch.autograd.grad(feed_forward(x, into_FD, out_DE, False, ops="plain").sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert x.grad.isfinite().all()
