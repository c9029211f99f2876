"""Linear cross-entropy with z-loss, chunked and native, against the definition with all logits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rmt.errors import InputError
from rmt.ops.cross_entropy import linear_cross_entropy, reference
from rmt.ops.native import build


def draw(N, D, W, dtype, ignored=0):
    generator = torch.Generator().manual_seed(N + W)
    hidden, weight = (torch.randn(n, D, generator=generator, dtype=torch.float64).to(dtype) for n in (N, W))
    targets = torch.randint(0, W, (N,), generator=generator)
    targets[:ignored] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


shapes = st.tuples(
    st.integers(1, 20), st.integers(1, 9), st.sampled_from([1, 2, 7, 8, 9, 16, 40, 5000]), st.integers(0, 5)
)


@pytest.mark.parametrize(("ops", "dtype", "tolerance"), [("portable", "float64", 1e-10), ("native", "float32", 1e-5)])
@given(shape=shapes, chunk=st.sampled_from([None, 1, 3]), scale=st.sampled_from([1.0, 0.3]))
@settings(max_examples=40, deadline=None)
def test_loss_terms_and_gradients_equal_the_definition(ops, dtype, tolerance, shape, chunk, scale):
    if ops == "native" and build.problem():
        pytest.skip(build.problem())
    N, D, W, ignored = shape
    ignored = min(ignored, N - 1)
    hidden, weight, targets = draw(N, D, W, getattr(torch, dtype), ignored)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(hidden, weight, targets, 1e-2, scale, chunk, ops)
    truth = reference(*exact, targets, 1e-2, scale)
    for ours, theirs in zip(loss, truth, strict=True):
        assert ours.item() == pytest.approx(theirs.item(), rel=tolerance, abs=tolerance)
    grads = torch.autograd.grad(3 * loss.total, (hidden, weight))
    for ours, theirs in zip(grads, torch.autograd.grad(3 * truth.total, exact), strict=True):
        # A gradient is a difference of numbers of size one (probability and target), times weights of size one.
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max().clamp(min=1)


def test_the_definition_is_pytorchs_cross_entropy():
    hidden, weight, targets = draw(6, 4, 9, torch.float64, ignored=2)
    logits = hidden @ weight.t()
    loss = reference(hidden, weight, targets, 0.5)
    assert loss.ce.item() == pytest.approx(F.cross_entropy(logits, targets, ignore_index=-100).item())
    z = logits[2:].logsumexp(-1).square().mean()
    assert loss.total.item() == pytest.approx(loss.ce.item() + 0.5 * z.item())


@pytest.mark.parametrize("ops", ["plain", "portable", "native"])
def test_with_all_targets_ignored_loss_and_gradients_are_zero(native, ops):
    hidden, weight, targets = draw(5, 4, 9, torch.float32, ignored=5)
    loss = linear_cross_entropy(hidden, weight, targets, 1e-4, ops=ops)
    loss.total.backward()
    assert [term.item() for term in loss] == [0, 0, 0, 0]
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("ops", ["portable", "native"])
def test_no_tokens_at_all(native, ops):
    hidden, weight, _ = draw(1, 4, 9, torch.float32)
    loss = linear_cross_entropy(hidden[:0], weight, torch.empty(0, dtype=torch.long), 1e-4, ops=ops)
    assert loss.total.item() == 0


@pytest.mark.parametrize("ops", ["portable", "native"])
def test_ignored_rows_may_hold_nan_and_others_may_not_hide_it(native, ops):
    hidden, weight, targets = draw(5, 4, 9, torch.float32, ignored=1)
    hidden.data[0] = float("nan")
    loss = linear_cross_entropy(hidden, weight, targets, 1e-4, ops=ops)
    loss.total.backward()
    assert loss.total.isfinite()
    assert hidden.grad.isfinite().all()
    hidden.data[1, 2] = float("nan")
    assert linear_cross_entropy(hidden, weight, targets, 1e-4, ops=ops).total.isnan()


@pytest.mark.parametrize("ops", ["portable", "native"])
def test_huge_logits_stay_finite(native, ops):
    hidden, weight, targets = draw(5, 4, 9, torch.float32)
    loss = linear_cross_entropy(hidden * 1e4, weight, targets, 0.0, ops=ops)
    exact = reference(hidden.double() * 1e4, weight.double(), targets, 0.0)
    assert loss.ce.item() == pytest.approx(exact.ce.item(), rel=1e-5)


@pytest.mark.parametrize("wrong", [9, -1, -5])
def test_a_target_outside_the_vocabulary_is_named(wrong):
    hidden, weight, targets = draw(5, 4, 9, torch.float32)
    targets[3] = wrong
    with pytest.raises(InputError, match=f"target {wrong} is outside the vocabulary of 9"):
        linear_cross_entropy(hidden, weight, targets, 1e-4)


def test_under_autocast_the_products_are_bfloat16_and_the_loss_float32():
    hidden, weight, targets = draw(40, 16, 30, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, 1e-4)
    exact = reference(hidden, weight, targets, 1e-4)
    loss.total.backward()
    assert loss.total.dtype == torch.float32
    assert weight.grad.dtype == torch.float32
    assert loss.total.item() == pytest.approx(exact.total.item(), rel=2e-2)


def test_without_gradients_none_are_computed():
    hidden, weight, targets = draw(5, 4, 9, torch.float32)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, 1e-4)
    assert loss.total.item() == pytest.approx(reference(hidden, weight, targets, 1e-4).total.item(), rel=1e-5)
    assert not loss.total.requires_grad


def test_second_derivatives_raise():
    hidden, weight, targets = draw(5, 4, 9, torch.float32)
    loss = linear_cross_entropy(hidden, weight, targets, 1e-4)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(loss.total, hidden, create_graph=True)


@pytest.mark.parametrize("ops", ["portable", "native"])
def test_a_second_backward_pass_raises_and_says_what_to_do(native, ops):
    hidden, weight, targets = draw(5, 4, 9, torch.float32)
    loss = linear_cross_entropy(hidden, weight, targets, 1e-4, ops=ops)
    loss.total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"a second time .*set_ops\(\"plain\"\)"):
        loss.total.backward()


@pytest.mark.parametrize("ops", ["portable", "native"])
def test_the_table_of_gradients_exists_once(native, ops):
    hidden, weight, targets = draw(30, 64, 5000, torch.float32)
    loss = linear_cross_entropy(hidden, weight, targets, 1e-4, ops=ops)
    made = loss.total.grad_fn.grads[1].data_ptr()
    (loss.total / 2).backward()
    assert weight.grad.data_ptr() == made
