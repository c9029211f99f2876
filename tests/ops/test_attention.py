"""Attention by every kernel against its definition: values, gradients, masks, and the choice of the kernel."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rmt.ops import attention
from rmt.ops.attention import Attend, alibi_slopes, attend, definition
from rmt.ops.native import attention as native_attention
from rmt.ops.native import build


@st.composite
def problems(draw):
    G, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    B, T = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 15, 16, 17, 48, 49, 70, 130]))
    V = draw(st.sampled_from([1, 2, 7, 8, 16, 20, 64]))
    documents = None
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(1, 40), min_size=T, max_size=T))
        ids = torch.repeat_interleave(torch.arange(T), torch.tensor(lengths))[:T]
        documents = torch.stack([ids, *([torch.zeros(T, dtype=torch.long)] * (B - 1))])
    slopes = alibi_slopes(G * group) if draw(st.booleans()) else None
    return B, T, G * group, G, V, documents, slopes


def heads(B, T, H, G, V, dtype, seed=0):
    """q, k, v as views of one packed tensor, as the boundaries give them."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(B, T, H + 2 * G, V, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    q, k, v = packed.split((H, G, G), dim=2)
    return packed, (q, k.transpose(1, 2), v.transpose(1, 2))


def values_and_gradients(function, problem, dtype):
    B, T, H, G, V, documents, slopes = problem
    packed, qkv = heads(B, T, H, G, V, dtype)
    context = Attend(0, T, documents, documents, None if slopes is None else slopes.to(dtype))
    y = function(*qkv, context, 0.3)
    (gradient,) = torch.autograd.grad((y * torch.linspace(-1, 2, V, dtype=dtype)).sin().sum(), packed)
    return y.detach(), gradient


@given(problem=problems())
@settings(max_examples=50, deadline=None)
def test_native_equals_the_definition(problem):
    if build.problem():
        pytest.skip(build.problem())
    _, T, *_, documents, _ = problem
    start = Attend(0, T, documents, documents).start_BT

    def kernel(q, k, v, context, scale):
        return native_attention.attend(q, k, v, start, context.slopes_H, scale)

    y, gradient = values_and_gradients(kernel, problem, torch.float32)
    exact, exact_gradient = values_and_gradients(definition, problem, torch.float64)
    assert (y - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert (gradient - exact_gradient).abs().max() <= 1e-5 * exact_gradient.abs().max().clamp(min=1e-2)


@given(problem=problems())
@settings(max_examples=25, deadline=None)
def test_pytorchs_kernel_equals_the_definition(problem):
    y, gradient = values_and_gradients(lambda *a: attend(*a, ops="portable"), problem, torch.float64)
    exact, exact_gradient = values_and_gradients(definition, problem, torch.float64)
    assert torch.allclose(y, exact, atol=1e-10)
    assert torch.allclose(gradient, exact_gradient, atol=1e-9)


def test_large_logits_neither_overflow_nor_underflow(native):
    _, (q, k, v) = heads(1, 20, 1, 1, 8, torch.float32)
    context = Attend(0, 20)
    y = attend(q * 100, k * 100, v, context, 1.0, "native")
    exact = definition((q * 100).double(), (k * 100).double(), v.double(), context, 1.0)
    assert torch.allclose(y.double(), exact, atol=1e-3)


@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_a_nan_is_not_lost(native, spoiled):
    packed, qkv = heads(1, 20, 1, 1, 8, torch.float32)
    packed.data[0, 5, spoiled, 3] = float("nan")
    y = attend(*qkv, Attend(0, 20), 1.0, "native")
    assert y[0, 5:].isnan().any()
    assert y[0, :5].isfinite().all() or spoiled == 2  # a value of weight zero is still multiplied


def test_documents_in_pieces_go_to_pytorch_and_give_the_right_result(native):
    """Document 0 comes back after document 1: no first visible key describes that."""
    documents = torch.tensor([[0, 0, 1, 1, 0, 0]])
    context = Attend(0, 6, documents, documents)
    assert not context.documents_are_contiguous
    _, qkv = heads(1, 6, 2, 2, 4, torch.float32)
    assert torch.allclose(attend(*qkv, context, 0.5, "native"), definition(*qkv, context, 0.5), atol=1e-6)


def test_start_is_the_first_token_of_the_document():
    documents = torch.tensor([[3, 3, 1, 1, 1, 7], [2, 2, 2, 2, 2, 2]])
    assert Attend(0, 6, documents, documents).start_BT.tolist() == [[0, 0, 2, 2, 2, 5], [0] * 6]


def test_one_new_token_after_a_cache_needs_no_mask():
    assert Attend(past=5, tokens=1).mask is None
    assert not Attend(past=5, tokens=1).is_causal
    _, (q, k, v) = heads(2, 6, 2, 2, 4, torch.float64)
    whole = definition(q, k, v, Attend(0, 6), 0.5)
    assert torch.allclose(attend(q[:, 5:], k, v, Attend(5, 1), 0.5), whole[:, 5:])
    assert torch.allclose(definition(q[:, 5:], k, v, Attend(5, 1), 0.5), whole[:, 5:])
    assert torch.allclose(attend(q[:, 4:], k, v, Attend(4, 2), 0.5), whole[:, 4:])


def test_the_gradients_of_queries_keys_and_values_lie_side_by_side(native):
    B, T, H, G, V = 2, 5, 4, 2, 8
    _, qkv = heads(B, T, H, G, V, torch.float32)
    leaves = [x.detach().requires_grad_() for x in qkv]
    dq, dk, dv = torch.autograd.grad(attend(*leaves, Attend(0, T), 1.0, "native").sum(), leaves)
    assert dk.data_ptr() == dq.data_ptr() + 4 * H * V
    assert dv.data_ptr() == dk.data_ptr() + 4 * G * V


def test_the_same_inputs_give_the_same_bits_on_all_threads(native):
    problem = (2, 300, 6, 2, 64, None, None)

    def native_kernel(*arguments):
        return attend(*arguments, ops="native")

    first, second = (values_and_gradients(native_kernel, problem, torch.float32) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_auto_takes_the_native_kernel_on_the_cpu(native, monkeypatch):
    calls = []
    real = attention.native.attend
    monkeypatch.setattr(attention.native, "attend", lambda *a: calls.append(1) or real(*a))
    _, qkv = heads(1, 6, 2, 2, 4, torch.float32)
    attend(*qkv, Attend(0, 6), 0.5)
    assert calls
