"""The value residual: an option of the attention core, so it must work with every stream."""

import naive
import pytest
import torch

import rmt
from rmt.streams import STREAMS


def test_value_residual_follows_its_equation():
    model = naive.model("vector", value_residual=True)
    parts = naive.Parts(model)
    x = parts.embed()
    for layer in range(4):
        q, k, v = parts.qkv(layer, x)
        if layer == 0:
            first = v
        else:
            own_weight, first_weight = parts[f"attention.{layer}.value_mix"]
            v = own_weight * v + first_weight * first
        x = x + parts.heads(layer, q, k, v) @ parts[f"stream.{2 * layer + 1}.output"].T
        x = x + parts.feed_forward(layer, x)
    naive.assert_equal(naive.logits_of(model), parts.logits(x))


@pytest.mark.parametrize("stream", STREAMS)
def test_value_residual_with_weights_one_and_zero_is_the_plain_stream(stream):
    plain, mixed = (rmt.build(naive.config(stream, value_residual=on), dtype=torch.float64) for on in (False, True))
    assert not torch.allclose(naive.logits_of(plain), naive.logits_of(mixed))
    with torch.no_grad():
        for name, parameter in mixed.named_parameters():
            if name.endswith("value_mix"):
                parameter.copy_(torch.tensor([1.0, 0.0]))
    naive.assert_equal(naive.logits_of(mixed), naive.logits_of(plain), tolerance=1e-12)


def test_value_residual_adds_two_weights_to_every_layer_but_the_first():
    sizes = [
        sum(parameter.numel() for parameter in rmt.build(naive.config("matrix", value_residual=on)).parameters())
        for on in (False, True)
    ]
    assert sizes[1] - sizes[0] == 2 * 3
