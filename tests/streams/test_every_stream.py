"""What every registered stream must do, and the stream of docs/streams/adding-a-stream.md with them.

A new stream gets all of this from its line in the registry; the one exception is `WITHOUT_GRADIENT`. Each stream is
tested in two settings, plain and modern, and with its parameters moved away from their initial values, at which a
stream may be a trivial one.
"""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch.utils.flop_counter import FlopCounterMode

import rmt
from rmt.streams import STREAMS
from rmt.theory.mup import roles_of
from rmt.train.optimizer import build_optimizer

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "streams" / "adding-a-stream.md"
EXAMPLE = "scaled"  # the stream that the guide adds
SIZES = dict(layers=4, heads=4, head_dim=4, key_dim=5, ff_dim=24, vocab_size=29, context=12)
STREAM_SIZES = dict(hyper_streams=3, residual_blocks=3)
SETTINGS = {
    "plain": {},
    "modern": dict(norm="rmsnorm", position="rope", kv_heads=2, qk_norm=True, value_residual=True, norm_gain="none"),
}
# The first layer of the depth-wise LSTM forgets a cell that is still zero, so this gain has no effect; the method (and
# the paper's parameter count) has it nevertheless.
WITHOUT_GRADIENT = {"depthwise_lstm": {"stream.2.gates.norms.1.gain"}}


@pytest.fixture(params=[*STREAMS, EXAMPLE])
def stream(request, monkeypatch) -> str:
    if request.param == EXAMPLE:
        code = re.search(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
        assert code is not None
        module = types.ModuleType("scaled_stream")
        exec(compile(code[1], str(GUIDE), "exec"), module.__dict__)
        monkeypatch.setitem(sys.modules, "scaled_stream", module)
        monkeypatch.setitem(STREAMS, EXAMPLE, "scaled_stream:ScaledStream")
    return request.param


@pytest.fixture(params=SETTINGS)
def config(request, stream) -> rmt.ModelConfig:
    return rmt.ModelConfig(stream=stream, **SIZES, **STREAM_SIZES, **SETTINGS[request.param])


def moved(config: rmt.ModelConfig, dtype: torch.dtype = torch.float64) -> rmt.LanguageModel:
    model = rmt.build(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(2))


def gradients(model: rmt.LanguageModel) -> dict[str, torch.Tensor]:
    ids = tokens(2, 12)
    model.zero_grad()
    model(ids, targets=ids.roll(-1, 1)).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_later_tokens_do_not_change_earlier_logits(config):
    model, ids = moved(config), tokens(1, 12)
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % config.vocab_size
    before, after = model(ids).logits, model(changed).logits
    close(after[:, :7], before[:, :7])
    assert not torch.allclose(after[:, 7:], before[:, 7:])


def test_documents_do_not_see_each_other(config):
    model, ids = moved(config), tokens(1, 12)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    changed = ids.clone()
    changed[:, :5] = (changed[:, :5] + 1) % config.vocab_size
    close(model(changed, document_ids=documents).logits[:, 5:], model(ids, document_ids=documents).logits[:, 5:])
    assert not torch.allclose(model(changed).logits[:, 5:], model(ids).logits[:, 5:])


def test_decoding_with_a_cache_gives_the_same_logits(config):
    model, ids = moved(config), tokens(2, 12)
    cache = model.new_cache(2)
    with torch.no_grad():
        pieces = [model(piece, cache=cache).logits for piece in ids.split([4, 1, 1, 3, 1, 2], dim=1)]
        close(torch.cat(pieces, dim=1), model(ids).logits)


def test_a_sequence_does_not_depend_on_its_batch(config):
    model, ids = moved(config), tokens(3, 12)
    with torch.no_grad():
        close(model(ids).logits[1:2], model(ids[1:2]).logits)


def test_every_parameter_gets_a_gradient(config):
    model = moved(config)
    found = gradients(model)
    for name, parameter in model.named_parameters():
        if name in WITHOUT_GRADIENT.get(config.stream, ()):
            assert not found[name].any(), f"{name} has a gradient after all: take it off the list"
            continue
        assert name in found, f"{name} has no gradient"
        assert torch.isfinite(found[name]).all(), f"{name} has a gradient that is not finite"
        assert found[name].any(), f"{name} of shape {list(parameter.shape)} has no gradient but zero"


def test_recomputing_activations_gives_the_same_gradients(config):
    model = moved(config)
    expected = gradients(model)
    model.recompute = "full"
    found = gradients(model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        close(gradient, expected[name])


def test_float32_agrees_with_float64(config):
    ids = tokens(2, 12)
    with torch.no_grad():
        exact = moved(config)(ids).logits
        assert exact.dtype == torch.float64
        close(moved(config, torch.float32)(ids).logits.double(), exact, tolerance=2e-3)


@pytest.mark.parametrize("how", ["parameters", "autocast"])
def test_bfloat16_stays_near_float32(config, how):
    ids, model = tokens(2, 12), moved(config, torch.float32)
    with torch.no_grad():
        exact = model(ids).logits
        if how == "parameters":
            rounded = model.to(torch.bfloat16)(ids).logits
        else:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                rounded = model(ids).logits
    assert (rounded.float() - exact).square().mean() < 0.05 * exact.square().mean()


def test_saving_and_loading_gives_the_same_model(config):
    model, ids = moved(config), tokens(2, 12)
    other = rmt.build(config, seed=1, dtype=torch.float64)
    other.load_state_dict(load(save(model.state_dict())))
    with torch.no_grad():
        assert torch.equal(other(ids).logits, model(ids).logits)


def test_counted_parameters_are_those_of_the_model(config):
    model = rmt.build(config, device="meta")
    assert rmt.count(config).params == sum(parameter.numel() for parameter in model.parameters())


def test_counted_flops_are_those_that_run(stream):
    config = rmt.ModelConfig(stream=stream, **SIZES, **STREAM_SIZES)
    model, ids = moved(config, torch.float32), tokens(3, config.context)
    model.set_ops("plain")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        _ = model(ids).logits
    assert counter.get_total_flops() == ids.numel() * rmt.count(config).flops.per_token.without("softmax")


def test_every_parameter_is_described_and_trained_once(config):
    model = rmt.build(config)
    assert roles_of(model).keys() == dict(model.named_parameters()).keys()
    trained = [p for group in build_optimizer(model, rmt.TrainConfig()).param_groups for p in group["params"]]
    assert len(trained) == len(set(trained)) == len(list(model.parameters()))


def test_a_few_sequences_are_learnt_by_heart(stream):
    config = rmt.ModelConfig(stream=stream, **{**SIZES, "layers": 2}, **STREAM_SIZES)
    model, ids = rmt.build(config), tokens(2, 12)
    optimizer = build_optimizer(model, rmt.TrainConfig(lr=1e-2))
    for _ in range(100):
        ce = (output := model(ids[:, :-1], targets=ids[:, 1:])).ce
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
        if ce < 0.1:
            break
    assert ce < 0.1
