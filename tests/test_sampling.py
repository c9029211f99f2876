"""Drawing tokens: what temperature, top-k and top-p allow, when drawing ends, and that prompts do not mix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rmt
from rmt.errors import InputError
from rmt.sampling import Sampling, choose, draw, left_pad, sample

CONFIG = rmt.ModelConfig(layers=2, heads=2, head_dim=8, key_dim=8, ff_dim=32, vocab_size=40, context=24)


@pytest.fixture(scope="module")
def model():
    return rmt.build(CONFIG).eval()


@given(seed=st.integers(0, 2**31), top_k=st.integers(1, 12), top_p=st.floats(0.05, 1.0), heat=st.floats(0.1, 3.0))
@settings(max_examples=60, deadline=None)
def test_a_draw_is_among_the_most_likely(seed, top_k, top_p, heat):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 12, generator=generator) * 3
    chosen = choose(logits, Sampling(heat, top_k, top_p), generator)
    places = logits.argsort(descending=True).argsort()  # 0: the most likely
    assert (places.gather(1, chosen) < top_k).all()
    kept = (logits / heat).masked_fill(places >= top_k, float("-inf")).softmax(-1)
    before = torch.where(places < places.gather(1, chosen), kept, 0.0).sum(-1)
    assert (before <= top_p + 1e-5).all()
    assert torch.equal(choose(logits, Sampling(temperature=0))[:, 0], logits.argmax(-1))


def test_draw_yields_what_sample_returns_and_training_mode_is_restored(model):
    prompt = torch.tensor([[1, 2, 3]])
    whole = sample(model, prompt, 8, seed=4)
    assert torch.equal(whole[:, 3:], torch.cat(list(draw(model, prompt, 8, Sampling(seed=4))), dim=1))
    assert torch.equal(whole, sample(model, prompt, 8, Sampling(seed=4)))
    model.train()
    sample(model, prompt, 1)
    assert model.training
    model.eval()


def test_drawing_ends_with_the_context_and_at_the_stop_token(model):
    assert sample(model, torch.ones(1, 20, dtype=torch.long), 100).shape == (1, 24)
    greedy = sample(model, torch.tensor([[1, 2, 3]]), 10, temperature=0)
    stop = int(greedy[0, 5])
    first = greedy[0, 3:].tolist().index(stop)
    assert sample(model, torch.tensor([[1, 2, 3]]), 10, temperature=0, stop=stop).shape[1] == 3 + first + 1
    with pytest.raises(InputError, match="25 tokens, the context is 24"):
        sample(model, torch.ones(1, 25, dtype=torch.long), 1)


def test_left_pad_puts_padding_before_the_prompt():
    ids, mask = left_pad([[1, 2, 3], [4]], pad=9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
