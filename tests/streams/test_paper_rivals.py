"""The paper's three rivals and the transformer: each against its equations written out and the paper's counts."""

import copy

import naive
import pytest
import torch

import rmt


def test_vector_stream_follows_the_transformers_equations():
    model = naive.model("vector")
    parts = naive.Parts(model)
    x = parts.embed()
    for core in range(8):
        x = x + parts.core(core, x)
    naive.assert_equal(naive.logits_of(model), parts.logits(x))


@pytest.mark.parametrize("layers", [4, 5])
def test_aggregation_stream_merges_every_second_layer(layers):
    model = naive.model("aggregation", layers=layers)
    parts = naive.Parts(model)
    merged = x = parts.embed()
    for layer in range(layers):
        before = x
        x = x + parts.attention(layer, x)
        x = x + parts.feed_forward(layer, x)
        if layer % 2:
            joined = parts.norm(torch.cat((before, x, merged), dim=-1), "stream.4.node.norm.gain")
            hidden = 1 / (1 + torch.exp(-joined @ parts["stream.4.node.into_D3D"].T))
            merged = x = x + hidden @ parts["stream.4.node.out_DD"].T
    naive.assert_equal(naive.logits_of(model), parts.logits(x))


def test_aggregation_has_one_node_for_all_depths_also_in_a_copy():
    model = copy.deepcopy(naive.model("aggregation"))
    assert model.stream[8].node is model.stream[4].node
    assert [name for name in model.state_dict() if "node" in name and "stream.4." not in name] == []


def test_depthwise_lstm_stream_follows_its_equations():
    model = naive.model("depthwise_lstm")
    parts = naive.Parts(model)
    o = parts.embed()
    c = torch.zeros_like(o)
    for layer in range(4):
        core, boundary = f"feed_forward.{layer}", f"stream.{2 * layer + 2}.gates"
        u = torch.cat((parts.attention(layer, o), o), dim=-1)
        weights = parts[f"{boundary}.weight"].chunk(3)
        i, f, g = (
            torch.sigmoid(parts.norm(u @ weight.T, f"{boundary}.norms.{index}.gain"))
            for index, weight in enumerate(weights)
        )
        hidden = parts.norm(u @ parts[f"{core}.into_FU"].T, f"{core}.norm.gain")
        h = naive.gelu(hidden) @ parts[f"{core}.out_DF"].T
        c = f * c + i * h
        o = g * c
    naive.assert_equal(naive.logits_of(model), parts.logits(o))


def test_depthwise_lstm_refuses_another_feed_forward_core():
    with pytest.raises(rmt.InputError, match="gelu"):
        rmt.build(naive.config("depthwise_lstm", ff="swiglu"))


def test_highway_stream_adds_a_gate_of_each_sublayers_input():
    model = naive.model("highway")
    parts = naive.Parts(model)
    x = parts.embed()
    for core in range(8):
        gate = f"stream.{core + 1}.gate"
        n = parts.norm(x, f"{gate}.norm.gain")
        x = x + parts.core(core, x) + torch.tanh(n @ parts[f"{gate}.gate_DD"].T) * (n @ parts[f"{gate}.value_DD"].T)
    naive.assert_equal(naive.logits_of(model), parts.logits(x))


@pytest.mark.parametrize(("stream", "silent"), [("aggregation", "node.out_DD"), ("highway", "gate.value_DD")])
def test_a_rival_whose_added_part_is_silent_is_the_transformer(stream, silent):
    plain, rival = (rmt.build(naive.config(name), dtype=torch.float64) for name in ("vector", stream))
    with torch.no_grad():
        for name, parameter in rival.named_parameters():
            if name.endswith(silent):
                parameter.zero_()
    naive.assert_equal(naive.logits_of(rival), naive.logits_of(plain), tolerance=1e-12)


@pytest.mark.parametrize(
    ("stream", "params", "flops"),
    [
        ("vector", 162_541_824, 188_964_864),
        ("matrix", 134_291_072, 136_028_160),
        ("aggregation", 164_903_424, 217_276_416),
        ("depthwise_lstm", 233_376_000, 330_522_624),
        ("highway", 190_871_808, 245_587_968),
    ],
)
def test_counts_at_gpt2_small_dimensions_are_the_papers(stream, params, flops):
    config = rmt.ModelConfig(stream=stream)
    assert sum(parameter.numel() for parameter in rmt.build(config, device="meta").parameters()) == params
    assert rmt.count(config).params == params
    assert rmt.count(config).flops.non_embedding_per_token == flops
