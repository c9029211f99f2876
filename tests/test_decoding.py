"""Decoding with a cache: the same numbers as one pass, memory that does not grow, and no hook is passed over."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

import rmt
from rmt.ops.native import build
from rmt.sampling import left_pad, sample
from strategies import configs, tokens

CONFIG = rmt.ModelConfig(layers=2, heads=4, head_dim=16, key_dim=16, ff_dim=64, vocab_size=40, context=320)


@pytest.fixture(autouse=True)
def _native():
    if build.problem():
        pytest.skip(build.problem())


def decode(model, ids, cache):
    return torch.cat([model(ids[:, t : t + 1], cache=cache).logits for t in range(ids.shape[1])], dim=1)


@given(configs(streams=("matrix",)), st.integers(1, 3), st.integers(0, 6), st.booleans())
@settings(max_examples=25, deadline=None)
@torch.no_grad()
def test_every_matrix_model_decodes_what_one_pass_computes(config, batch, prompt, value_residual):
    model = rmt.build(config.replace(value_residual=value_residual))
    ids = tokens(config, batch, 16)
    cache = model.new_cache(batch)
    found = [model(ids[:, :prompt], cache=cache).logits] if prompt else []
    found = torch.cat([*found, decode(model, ids[:, prompt:], cache)], dim=1)
    assert cache.decoder is not None
    exact = rmt.build(model.config, dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    expected = exact(ids).logits
    # A memory of two nearly equal numbers is normalised badly by any float32 program, also by the pass without a cache.
    rounding = (model(ids).logits - expected).abs().max()
    assert (found - expected).abs().max() <= max(1e-5 * expected.abs().max(), 8 * rounding)


@pytest.mark.parametrize("stream", ["matrix", "vector"])
@torch.no_grad()
def test_padded_prompts_of_a_batch_continue_as_they_do_alone(stream):
    model = rmt.build(CONFIG.replace(stream=stream, position="alibi"))
    prompts = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    ids, mask = left_pad(prompts, pad=0)
    together = sample(model, ids, 6, mask_BT=mask, temperature=0)
    for row, prompt in enumerate(prompts):
        alone = sample(model, torch.tensor([prompt]), 6, temperature=0)
        assert torch.equal(together[row, 5:], alone[0, len(prompt) :])


def allocated(function):
    """Bytes of all tensors that PyTorch allocates, and of those that are still held afterwards."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        function()
    changes = [event.self_cpu_memory_usage for event in watched.key_averages()]
    return sum(change for change in changes if change > 0), sum(changes)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("stream", "batch"), [("matrix", 1), ("matrix", 3), ("vector", 1), ("vector", 3)])
@torch.no_grad()
def test_a_token_costs_the_same_memory_after_10_tokens_and_after_200(stream, batch):
    """Every tensor that a step makes has a fixed size and is gone after it; the cache stays where it is."""
    config = CONFIG.replace(stream=stream)
    model = rmt.build(config)
    cache = model.new_cache(batch, 256)
    place, size = cache.memory.data_ptr(), cache.memory.untyped_storage().nbytes()
    assert size == 4 * config.layers * 2 * batch * 256 * config.model_dim
    ids = tokens(config, batch, 1)
    costs = {}
    for length in range(1, 202):
        if length in (10, 200):
            costs[length] = allocated(lambda: model(ids, cache=cache))
        else:
            model(ids, cache=cache)
    whole, kept = costs[10]
    assert costs[200] == costs[10]
    assert kept == 0
    assert 0 < whole < 200 * 4 * batch * config.model_dim  # far below one layer's keys at 200 tokens, times layers
    assert (cache.memory.data_ptr(), cache.memory.untyped_storage().nbytes()) == (place, size)
    assert cache.layers[0].k_BGSV.data_ptr() == place


@torch.no_grad()
def test_a_cache_is_freed_with_its_last_use():
    model = rmt.build(CONFIG)
    cache = model.new_cache(1)
    model(tokens(CONFIG, 1, 1), cache=cache)
    memory = weakref.ref(cache.memory)
    assert cache.decoder is not None
    del cache
    assert memory() is None


@torch.no_grad()
def test_a_hook_is_called_even_if_it_comes_in_the_middle():
    model, ids = rmt.build(CONFIG), tokens(CONFIG, 2, 6)
    expected = model(ids).logits
    cache = model.new_cache(2)
    before = decode(model, ids[:, :3], cache)
    calls = []
    handle = model.stream[1].register_forward_hook(lambda *_: calls.append(1))
    between = decode(model, ids[:, 3:5], cache)
    assert len(calls) == 2
    handle.remove()
    after = decode(model, ids[:, 5:], cache)
    torch.testing.assert_close(torch.cat((before, between, after), dim=1), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_a_step_returns_stays_as_it_is():
    model, ids = rmt.build(CONFIG), tokens(CONFIG, 1, 5)
    cache = model.new_cache(1)
    outputs = [model(ids[:, t : t + 1], cache=cache) for t in range(5)]
    late = torch.cat([output.logits for output in outputs], dim=1)  # logits are computed when they are asked for
    torch.testing.assert_close(late, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_with_gradients_or_other_operations_the_model_itself_runs():
    model, ids = rmt.build(CONFIG), tokens(CONFIG, 1, 4)
    expected = model(ids).logits
    cache = model.new_cache(1)
    model(ids[:, :2], cache=cache).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        model.set_ops("portable")
        third = model(ids[:, 2:3], cache=cache).logits
        assert cache.decoder is None
        model.set_ops("auto")
        fourth = model(ids[:, 3:], cache=cache).logits
        assert cache.decoder is not None
    torch.testing.assert_close(torch.cat((third, fourth), dim=1), expected[:, 2:], rtol=1e-4, atol=1e-5)
    assert not cache.memory.requires_grad


@torch.no_grad()
def test_a_core_of_another_kind_is_not_passed_over():
    model, ids = rmt.build(CONFIG), tokens(CONFIG, 1, 4)
    model.feed_forward[1] = torch.nn.Identity()
    cache = model.new_cache(1)
    torch.testing.assert_close(decode(model, ids, cache), model(ids).logits, rtol=1e-4, atol=1e-5)
    assert cache.decoder is None
