"""The closed forms of `rmt.count` against the built model, torch's FLOP counter and autograd's memory."""

import copy
import itertools
import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import rmt
from rmt.config import PRESETS, ModelConfig
from rmt.theory.accounting import Total

PAPER_SIZES = {
    "rmt-46m": 45_900_160,
    "rmt-134m": 134_291_072,
    "rmt-206m": 206_313_056,
    "rmt-305m": 305_128_448,
    "transformer-49m": 49_415_808,
    "transformer-160m": 162_541_824,
    "transformer-260m": 263_960_704,
    "transformer-405m": 405_490_688,
}


@st.composite
def configs(draw, streams=("matrix", "vector")):
    heads, stream = draw(st.integers(1, 4)), draw(st.sampled_from(streams))
    return ModelConfig(
        stream=stream,
        layers=draw(st.integers(1, 3)),
        heads=heads,
        head_dim=2 * draw(st.integers(2, 4)),
        kv_heads=draw(st.sampled_from([None, *(n for n in range(1, heads + 1) if heads % n == 0)])),
        key_dim=draw(st.integers(2, 6)),
        width=draw(st.sampled_from([None, 5, 12])) if stream == "vector" else None,
        ff_dim=draw(st.integers(2, 9)),
        vocab_size=draw(st.integers(2, 11)),
        context=draw(st.integers(2, 6)),
        norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        norm_gain=draw(st.sampled_from(["none", "value", "full"])),
        position=draw(st.sampled_from(["learned", "alibi", "rope"])),
        ff=draw(st.sampled_from(["gelu", "swiglu"])),
        qk_norm=draw(st.booleans()),
        value_residual=draw(st.booleans()),
    )


def random_ids(config, batch):
    return torch.randint(0, config.vocab_size, (batch, config.context))


@pytest.mark.parametrize(("name", "size"), PAPER_SIZES.items())
def test_presets_have_exactly_the_parameters_of_the_paper_s_models(name, size):
    assert rmt.count(rmt.preset(name)).params == size


@pytest.mark.parametrize("name", PRESETS)
def test_params_equal_those_of_the_built_preset(name):
    model = rmt.build(rmt.preset(name), device="meta")
    assert rmt.count(model.config).params == sum(p.numel() for p in model.parameters())


@given(configs())
@settings(max_examples=60, deadline=None)
def test_params_equal_those_of_the_built_model_part_by_part(config):
    model = rmt.build(config, device="meta")
    parts = rmt.count(config).params.parts

    def size(module):
        return sum(p.numel() for p in module.parameters())

    stream = parts["stream_writes"] + parts["stream_reads"] + parts["norms"]
    assert size(model.stream) == stream
    assert size(model.embedding) == parts["token_embedding"] + parts["position_embedding"]
    assert size(model.attention) == parts["attention"]
    assert size(model.feed_forward) == parts["feed_forward"]
    assert size(model.unembedding) == parts["unembedding"]
    gains = sum(p.numel() for name, p in model.stream.named_parameters() if "gain" in name)
    assert gains == parts["norms"]


def counted_flops(model, batch):
    """What torch's counter sees in a forward pass with logits, by module; attention as the products it understands."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(random_ids(model.config, batch)).logits  # noqa: B018 -- logits are computed when asked for
    return {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}


@given(configs())
@settings(max_examples=25, deadline=None)
def test_flops_of_every_matmul_part_equal_those_of_torch_s_counter(config):
    model = rmt.build(config)
    model.set_ops("plain")
    seen = counted_flops(model, batch=2)
    tokens = 2 * config.context
    parts = rmt.count(config).flops.per_token.parts

    def group(*names):
        return sum(flops for name, flops in seen.items() if name in names) / tokens

    layers, boundaries = range(config.layers), range(2 * config.layers + 1)
    assert group(*(f"LanguageModel.attention.{i}" for i in layers)) == parts["attention"]
    assert group(*(f"LanguageModel.feed_forward.{i}" for i in layers)) == parts["feed_forward"]
    assert group("LanguageModel.unembedding", "Unembedding") == parts["logits"]
    assert group("LanguageModel.embedding") == parts["embedding"] == 0
    whole = parts["stream_writes"] + parts["stream_reads"]
    assert group(*(f"LanguageModel.stream.{i}" for i in boundaries)) == whole
    if config.stream == "vector":  # a boundary after attention has a matrix to write with, one before it to read with
        assert group(*(f"LanguageModel.stream.{i}" for i in boundaries if i % 2)) == parts["stream_writes"]
        assert group(*(f"LanguageModel.stream.{i}" for i in boundaries if i % 2 == 0)) == parts["stream_reads"]


@given(rank=st.integers(1, 5), key_dim=st.integers(1, 6), value_dim=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_storing_and_retrieving_cost_two_flops_per_key_entry_and_value(rank, key_dim, value_dim):
    """Writes and reads of a matrix boundary are one operation to the counter; here they are counted apart."""
    store, retrieve = rmt.Store(rank, key_dim), rmt.Retrieve(key_dim, rank)
    for module, arguments in (
        (store, (None, torch.zeros(rank, value_dim))),
        (retrieve, (torch.zeros(key_dim, value_dim),)),
    ):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            module(*arguments)
        assert counter.get_total_flops() == 2 * rank * key_dim * value_dim


@given(configs())
@settings(max_examples=10, deadline=None)
def test_total_flops_are_the_counter_s_plus_the_softmax(config):
    model = rmt.build(config)
    model.set_ops("plain")
    flops = rmt.count(config).flops
    tokens = 2 * config.context
    assert flops.per_token - flops.per_token.parts["softmax"] == counted_flops(model, batch=2)["Global"] / tokens
    assert flops.per_example == flops.per_token * config.context


def test_non_embedding_flops_of_the_gpt2_small_pair_are_the_paper_s():
    assert rmt.count(rmt.preset("rmt-134m")).flops.non_embedding_per_token == 136_028_160
    assert rmt.count(rmt.preset("transformer-160m")).flops.non_embedding_per_token == 188_964_864


def test_training_flops_of_the_large_pair_are_the_paper_s_totals():
    transformer = rmt.count(rmt.preset("transformer-405m")).flops.training(6.04e9, logits=False)
    ours = rmt.count(rmt.preset("rmt-305m")).flops.training(6.04e9, logits=False)
    assert transformer == pytest.approx(1.187e19, rel=0.01)
    assert ours == pytest.approx(8.56e18, rel=0.01)


def test_training_costs_three_forward_passes_with_or_without_logits():
    flops = rmt.count(rmt.preset("rmt-tiny")).flops
    assert flops.training_per_token == 3 * flops.per_token == flops.training(1)
    assert flops.training(10) - flops.training(10, logits=False) == 30 * flops.per_token.parts["logits"]


def saved_bytes(config, batch):
    """Bytes that autograd keeps for the backward pass, each storage once, without the parameters."""
    model = rmt.build(config)
    model.set_ops("portable")
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # holding it keeps its address from being used again
        return tensor

    ids = random_ids(config, batch)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(ids, targets=ids)
    return sum(storage.nbytes() for address, storage in kept.items() if address not in own)


CHOICES = list(
    itertools.product(
        ("matrix", "vector"),
        ("layernorm", "rmsnorm"),
        ("full", "value", "none"),
        ("learned", "alibi", "rope"),
        (("gelu", False, None, False), ("swiglu", True, 2, True)),
    )
)


@pytest.mark.parametrize(("stream", "norm", "gain", "position", "rest"), CHOICES)
def test_activation_memory_is_what_autograd_saves(stream, norm, gain, position, rest):
    ff, qk_norm, kv_heads, value_residual = rest
    config = ModelConfig(
        stream=stream,
        layers=2,
        heads=4,
        head_dim=8,
        key_dim=10,
        ff_dim=48,
        vocab_size=11,
        context=32,
        norm=norm,
        norm_gain=gain,
        position=position,
        ff=ff,
        qk_norm=qk_norm,
        kv_heads=kv_heads,
        value_residual=value_residual,
    )
    predicted = rmt.count(config, batch=2).memory.training.parts["activations"]
    predicted -= 4 * 2 * config.context * config.model_dim  # the gradient that the loss hands on: no saved tensor
    if stream == "matrix":  # the buffers of the stream and of its gradient: counted, but not among saved tensors
        predicted -= 2 * 4 * 2 * config.context * config.stream_size
    assert predicted == pytest.approx(saved_bytes(config, batch=2), rel=0.03)


def live_bytes(config, batch, recompute):
    """Bytes that are still allocated after the forward pass of a training step."""
    model = rmt.build(config)
    model.recompute = recompute
    ids = random_ids(config, batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        output = model(ids, targets=ids)
    assert output.loss.requires_grad
    return sum(event.self_cpu_memory_usage for event in memory.events())


@pytest.mark.parametrize(("stream", "recompute"), [("matrix", "none"), ("vector", "none"), ("vector", "full")])
def test_more_layers_need_the_memory_that_was_counted(stream, recompute):
    shape = dict(heads=4, head_dim=16, key_dim=24, ff_dim=256, vocab_size=64, context=64)
    few, many = (ModelConfig(stream=stream, layers=layers, **shape) for layers in (3, 6))
    measured = live_bytes(many, 2, recompute) - live_bytes(few, 2, recompute)
    counted = [rmt.count(config, batch=2, recompute=recompute).memory.training for config in (few, many)]
    assert counted[1].parts["activations"] - counted[0].parts["activations"] == pytest.approx(measured, rel=0.1)


def test_a_memory_twice_as_wide_costs_a_little_training_memory_and_no_cache():
    small, large = (rmt.count(rmt.preset("rmt-134m").replace(key_dim=k), batch=4).memory for k in (32, 64))
    assert 1 < large.training / small.training < 1.06
    assert large.kv_cache_per_token == small.kv_cache_per_token == 4 * 12 * 2 * 768


def test_full_recomputation_needs_less_memory_than_none():
    for name in ("rmt-134m", "transformer-160m"):
        none, full = (rmt.count(rmt.preset(name), batch=4, recompute=kind).memory.training for kind in ("none", "full"))
        assert full.parts["activations"] < 0.5 * none.parts["activations"]


def test_recomputing_more_keeps_less():
    config = rmt.preset("rmt-modern-134m")
    kept = [rmt.count(config, recompute=kind).memory.training for kind in ("none", "gelu", "ff")]
    assert sorted(kept, reverse=True) == kept
    assert len(set(kept)) == 3


def test_cache_memory_is_that_of_a_real_cache():
    config = rmt.preset("rmt-modern-134m")
    cache = rmt.build(config, device="meta").new_cache(batch=3)
    held = sum(4 * (layer.k_BGSV.numel() + layer.v_BGSV.numel()) for layer in cache.layers)
    assert rmt.count(config, batch=3).memory.inference.parts["kv_cache"] == held


def test_a_count_is_plain_data():
    counted = rmt.count(rmt.preset("rmt-134m"), batch=2)
    data = json.loads(json.dumps(counted.to_dict()))
    assert data["params"] == 134_291_072 == sum(data["params_by_part"].values())
    assert data["paper"]["params"] - data["params"] == data["paper"]["params_difference"]
    assert copy.deepcopy(counted) == counted


def test_a_total_is_the_number_and_knows_its_parts():
    total = Total(a=2, b=3)
    assert total == 5 == total.total
    assert total.without("a") == 3
    assert total.to_dict() == {"total": 5, "a": 2, "b": 3}


@pytest.mark.parametrize("setting", [{"batch": 0}, {"recompute": "half"}])
def test_count_refuses_impossible_settings(setting):
    with pytest.raises(rmt.InputError, match=next(iter(setting))):
        rmt.count(rmt.preset("rmt-tiny"), **setting)


@given(configs(streams=("matrix",)), st.integers(1, 4))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_widening_a_matrix_stream_costs_what_its_keys_and_gains_cost(config, more):
    wide = config.replace(key_dim=config.key_dim + more)
    difference = rmt.count(wide).params - rmt.count(config).params
    attention_reads = config.heads + 2 * config.kv_groups
    keys = (
        config.layers * (3 * config.heads + attention_reads) + (3 if config.position == "learned" else 2) * config.heads
    )
    gains = (2 * config.layers + 1) * config.head_dim if config.norm_gain == "full" else 0
    assert difference == more * (keys + gains)
