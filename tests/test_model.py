"""Laws that every language model here obeys, on models drawn from all options of the configuration."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rmt
from rmt.errors import InputError
from rmt.ops.cross_entropy import reference
from rmt.streams import STREAMS
from strategies import configs, double_model, tokens

few = settings(max_examples=25, deadline=None)
TINY = rmt.preset("rmt-tiny").replace(layers=2, vocab_size=64, context=16)


@few
@given(configs(), st.integers(2, 16), st.data())
def test_a_token_changes_no_earlier_logits(config, length, data):
    model = double_model(config)
    ids = tokens(config, 2, length)
    place = data.draw(st.integers(1, length - 1))
    other = ids.clone()
    other[:, place] = (other[:, place] + 1) % config.vocab_size
    before, after = model(ids).logits, model(other).logits
    torch.testing.assert_close(before[:, :place], after[:, :place], rtol=0, atol=1e-12)


@few
@given(configs(), st.integers(1, 7), st.integers(1, 7))
def test_documents_do_not_see_each_other(config, first, second):
    """Two documents in one sequence give what each gives alone, where positions are relative."""
    config = config.replace(position="rope" if config.position == "learned" else config.position)
    model = double_model(config)
    ids = tokens(config, 2, first + second)
    documents = torch.tensor([[0] * first + [1] * second] * 2)
    together = model(ids, document_ids=documents).logits
    alone = torch.cat((model(ids[:, :first]).logits, model(ids[:, first:]).logits), dim=1)
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


@few
@given(configs(), st.lists(st.integers(1, 6), min_size=2, max_size=4))
def test_decoding_with_a_cache_equals_one_pass(config, pieces):
    model = double_model(config)
    length = min(sum(pieces), config.context)
    ids = tokens(config, 3, length)
    documents = (torch.arange(length)[None] // 3).expand(3, -1)
    for document_ids in (None, documents):
        cache = model.new_cache(3, length)
        found, start = [], 0
        for piece in pieces:
            part = slice(start, min(start + piece, length))
            if part.start < part.stop:
                given_documents = None if document_ids is None else document_ids[:, part]
                found.append(model(ids[:, part], document_ids=given_documents, cache=cache).logits)
            start += piece
        expected = model(ids, document_ids=document_ids).logits
        torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-9, atol=1e-9)


@few
@given(configs(), st.integers(1, 8))
def test_a_sequence_does_not_depend_on_its_batch(config, length):
    model = double_model(config)
    ids = tokens(config, 4, length)
    together = model(ids).logits
    for row in range(4):
        torch.testing.assert_close(model(ids[row : row + 1]).logits[0], together[row], rtol=1e-10, atol=1e-10)


@few
@given(configs(streams=("matrix",), norm_gains=("none", "value")), st.integers(0, 100))
def test_rotating_all_keys_of_the_matrix_stream_changes_nothing(config, seed):
    """Keys matter only through their inner products. RMSNorm is invariant; LayerNorm subtracts a mean over all
    entries, which a rotation of the key axis does not keep, so the law is RMSNorm's."""
    config = config.replace(norm="rmsnorm")
    model = double_model(config)
    ids = tokens(config, 2, 8)
    before = model(ids).logits
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(config.key_dim, config.key_dim, generator=generator, dtype=torch.float64)
    rotation_KK = torch.linalg.qr(square).Q
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("keys_KR"):
                parameter.copy_(rotation_KK @ parameter)
            elif name.endswith("keys_RK"):
                parameter.copy_(parameter @ rotation_KK.T)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-10, atol=1e-10)


@few
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.floats(-3, 3))
def test_store_and_retrieve_are_linear(rank, key_dim, value_dim, factor):
    store, retrieve = rmt.Store(rank, key_dim).double(), rmt.Retrieve(key_dim, rank).double()
    a, b = torch.randn(2, 5, rank, value_dim, dtype=torch.float64)
    X, Y = torch.randn(2, 5, key_dim, value_dim, dtype=torch.float64)
    torch.testing.assert_close(store(X, a + factor * b), store(X, a) + factor * store(None, b))
    torch.testing.assert_close(retrieve(X + factor * Y), retrieve(X) + factor * retrieve(Y))


@few
@given(st.integers(1, 6), st.integers(0, 4), st.integers(1, 8))
def test_retrieving_with_orthonormal_keys_gives_back_what_was_stored(rank, extra, value_dim):
    key_dim = rank + extra
    keys_KR = torch.linalg.qr(torch.randn(key_dim, rank, dtype=torch.float64)).Q
    store, retrieve = rmt.Store(rank, key_dim).double(), rmt.Retrieve(key_dim, rank).double()
    with torch.no_grad():
        store.keys_KR.copy_(keys_KR)
        retrieve.keys_RK.copy_(keys_KR.T)
    data = torch.randn(3, rank, value_dim, dtype=torch.float64)
    torch.testing.assert_close(retrieve(store(None, data)), data)


@few
@given(configs(), st.integers(1, 8))
def test_every_parameter_gets_a_gradient_and_recomputing_gives_the_same(config, length):
    model = double_model(config)
    ids = tokens(config, 2, length)
    gradients = []
    for policy in ("none", "full"):
        model.recompute = policy
        model.zero_grad()
        model(ids, targets=ids).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("policy", ["gelu", "ff", "full"])
@pytest.mark.parametrize("stream", STREAMS)
def test_every_policy_of_recomputing_gives_every_stream_the_same_gradients(stream, policy):
    config = TINY.replace(stream=stream, heads=2, head_dim=8, key_dim=6, ff_dim=24, layers=4)
    model, ids = double_model(config), tokens(config, 2, 12)
    gradients = []
    for model.recompute in ("none", policy):
        model.zero_grad()
        model(ids, targets=ids.roll(-1, dims=1)).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-12)


def test_loss_is_that_of_the_logits_and_cross_entropy_is_reported_apart():
    model = double_model(TINY)
    ids = tokens(TINY, 3, 16)
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = -100
    output = model(ids, targets=targets)
    expected = reference(output.hidden_BTD.flatten(0, 1), model.unembedding.weight_WD, targets.flatten(), TINY.z_loss)
    torch.testing.assert_close(output.ce, expected.ce, check_dtype=False)
    torch.testing.assert_close(output.loss, expected.total, check_dtype=False)
    direct = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(output.ce, direct)


def test_the_mirrored_pair_starts_from_the_same_shared_values():
    matrix, vector = rmt.build(TINY, seed=3), rmt.build(TINY.replace(stream="vector"), seed=3)
    assert torch.equal(matrix.embedding.token_WD, vector.embedding.token_WD)
    assert torch.equal(matrix.feed_forward[1].into_FD, vector.feed_forward[1].into_FD)
    assert not torch.equal(matrix.embedding.token_WD, rmt.build(TINY, seed=4).embedding.token_WD)


@pytest.mark.parametrize("stream", ["matrix", "vector"])
def test_autocast_keeps_master_weights_and_stays_close(stream):
    model = rmt.build(TINY.replace(stream=stream))
    ids = tokens(TINY, 2, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model(ids, targets=ids)
    rough.loss.backward()
    exact = model(ids, targets=ids)
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in model.parameters())
    assert abs(rough.ce.item() - exact.ce.item()) < 0.05


def test_initial_variances_follow_the_table():
    config = TINY.replace(heads=8, head_dim=32, key_dim=64, ff_dim=512, layers=4)
    model = rmt.build(config)
    stds = {name: parameter.std().item() for name, parameter in model.named_parameters()}
    assert stds["embedding.token_WD"] == pytest.approx(1, rel=0.1)
    assert stds["stream.0.store.keys_KR"] == pytest.approx(8**-0.5, rel=0.1)
    assert stds["stream.0.retrieve.keys_RK"] == pytest.approx(64**-0.5, rel=0.1)
    assert stds["stream.3.store.keys_KR"] == pytest.approx(8**-0.5 * 8**-0.5, rel=0.1)
    assert stds["feed_forward.0.into_FD"] == pytest.approx(256**-0.5, rel=0.1)
    assert stds["feed_forward.0.out_DF"] == pytest.approx(512**-0.5, rel=0.1)
    vector = rmt.build(config.replace(stream="vector"))
    assert vector.feed_forward[0].out_DF.std().item() == pytest.approx(512**-0.5 * 8**-0.5, rel=0.1)
    assert vector.stream[1].output.std().item() == pytest.approx(256**-0.5 * 8**-0.5, rel=0.1)


def test_mup_starts_uniform_and_can_silence_queries():
    config = TINY.replace(init="mup", mup=rmt.MuP(sigma=0.5, zero_query=True))
    model = rmt.build(config)
    ids = tokens(config, 2, 8)
    assert model(ids).logits.abs().max() == 0
    q_BTHV, k_BTGV, _ = model.stream[0](None, model.embedding(ids, torch.arange(8)[None]))[1]
    assert q_BTHV.abs().max() == 0
    assert k_BTGV.abs().max() > 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.full((1, 4), 64), "token id 64 is outside the vocabulary of 64"),
        (torch.full((1, 4), -1), "token id -1"),
        (torch.zeros(1, 17, dtype=torch.long), "17 tokens, the context is 16"),
        (torch.zeros(4, dtype=torch.long), "shape"),
        (torch.zeros(1, 4), "integers"),
    ],
)
def test_bad_token_ids_are_refused_in_one_line(ids, message):
    with pytest.raises(InputError, match=message) as caught:
        rmt.build(TINY)(ids)
    assert "\n" not in str(caught.value)


def test_targets_of_another_shape_and_a_full_cache_are_refused():
    model = rmt.build(TINY)
    ids = tokens(TINY, 1, 4)
    with pytest.raises(InputError, match="targets has shape"):
        model(ids, targets=ids[:, 1:])
    with pytest.raises(InputError, match="cache holds 3 tokens, 4 are needed"):
        model(ids, cache=model.new_cache(1, 3))
