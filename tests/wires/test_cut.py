"""Cuts: a cut model equals a naive model from whose read the contribution was left out; ranking finds what matters."""

import numpy as np
import pytest
import torch
from small import small_model

import rmt
from rmt.data import TokenDataset
from rmt.errors import InputError
from rmt.evaluate.loss import split_loss
from rmt.ops.attention import prepare
from rmt.wires import cut, rank_edges
from rmt.wires.composition import composition
from rmt.wires.cut import batch_estimates, cut_effects, cut_mask, plain_ops


@torch.no_grad()
def naive_logits(model, ids, cuts=()):
    """The model from its definition: a list of outer products, and reads from which some of them are left out.

    `cuts` are pairs of places in the table. A left-out product takes its own mean with it; the deviation is that of
    the whole stream.
    """
    config, table = model.config, rmt.wiring(model)
    place = torch.arange(ids.shape[1])[None]
    data = model.embedding(ids, place)
    context = prepare(config, 0, place, None, None, torch.float32)
    outer, first_value = [], None
    for site, boundary in enumerate(model.stream):
        vectors, keys = boundary.written(data)
        outer += [keys[:, n, None] * vectors[:, :, n, None, :] for n in range(keys.shape[1])]
        X = sum(outer)
        mean = X.mean((-2, -1), keepdim=True) if config.norm == "layernorm" else 0.0
        deviation = (((X - mean) ** 2).mean((-2, -1), keepdim=True) + config.norm_eps).sqrt()
        gain = 1.0 if boundary.norm.gain is None else boundary.norm.gain
        reads = []
        for row, key in enumerate(boundary.retrieve.keys_RK, start=table.read_rows[site].start):
            kept = [one for write, one in enumerate(outer) if (row, write) not in cuts]
            seen = sum(one - (one.mean((-2, -1), keepdim=True) if config.norm == "layernorm" else 0) for one in kept)
            reads.append(torch.einsum("k,btkv->btv", key, gain * seen / deviation) if kept else 0 * vectors[:, :, 0])
        read = torch.stack(reads, dim=2)
        if boundary.site.before == "attention":
            qkv = read.split((config.heads, config.kv_groups, config.kv_groups), dim=2)
            first_value = qkv[2] if site == 0 and config.value_residual else first_value
            data = model.attention[site // 2](qkv, context, None, first_value)
        elif boundary.site.before == "feed_forward":
            data = model.feed_forward[site // 2](read.flatten(2))
    return model.unembedding(read.flatten(2))


def pairs(table, *edges):
    mask = np.any([table.edges(edge).mask_RW for edge in edges], axis=0)
    return {(int(r), int(w)) for r, w in zip(*np.nonzero(mask), strict=True)}


@pytest.mark.parametrize(
    "edges",
    [
        ("layer1.head2.query <- layer0.head1",),
        ("layer0.value <- token",),
        ("layer2.ff <- layer0.ff", "layer1.attention <- token.slot0"),
        ("unembedding <- all",),
    ],
)
def test_a_cut_equals_the_model_recomputed_without_the_contribution(model, ids, edges):
    expected = naive_logits(model, ids, pairs(rmt.wiring(model), *edges))
    with torch.no_grad(), cut(model, *edges):
        found = model(ids).logits
    whole = naive_logits(model, ids)
    assert (found - expected).norm() < 1e-5 * whole.norm()
    assert (found - expected).norm() < 1e-2 * (expected - whole).norm()  # much nearer than to the whole model
    with torch.no_grad():
        assert (model(ids).logits - whole).norm() < 1e-5 * whole.norm()  # and is over with the `with`


def test_cuts_hold_in_all_ops_and_while_decoding(ids):
    model = small_model()
    with torch.no_grad(), cut(model, "layer1.attention <- layer0.ff"):
        whole = model(ids).logits
        model.set_ops("plain")
        torch.testing.assert_close(model(ids).logits, whole, rtol=1e-4, atol=1e-5)
        cache = model.new_cache(len(ids))
        steps = [model(ids[:, t : t + 1], cache=cache).logits for t in range(ids.shape[1])]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-3, atol=1e-4)


def test_the_estimate_is_the_slope_of_the_loss_along_the_cut(model, ids):
    """Leave out a small share of an edge instead of all: the loss must change by that share of the estimate."""
    table = rmt.wiring(model)
    targets = ids.roll(-1, 1)
    with plain_ops(model):
        first, second = batch_estimates(model, table, ids, targets, "slots") / ids.numel()
    assert model.ops == "auto"
    edges = table.edges("layer2.head0.query <- layer0.ff")
    share = 1e-2

    def loss_without(part):
        doubled = model.double()
        fine = rmt.wiring(doubled)
        with torch.no_grad(), cut_mask(doubled, fine, edges.mask_RW * part):
            return torch.nn.functional.cross_entropy(doubled(ids).logits.flatten(0, 1), targets.flatten()).item()

    slope = (loss_without(share) - loss_without(-share)) / (2 * share)
    assert slope == pytest.approx(first[edges.mask_RW].sum(), rel=2e-2, abs=1e-6)
    assert (second[table.causal] > 0).mean() > 0.99
    assert (second[~table.causal] == 0).all()


def test_estimates_of_heads_add_up_over_slots(model, ids):
    table, targets = rmt.wiring(model), ids.roll(-1, 1)
    with plain_ops(model):
        slots, heads = (batch_estimates(model, table, ids, targets, level)[0] for level in ("slots", "heads"))
    names, writes = table.blocks("heads")[:2]
    found = heads[names.index("layer1.ff"), writes.index("layer0.head2")]
    expected = slots[table.edges("layer1.ff <- layer0.head2").mask_RW].sum()
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.fixture
def trained(run):
    return rmt.load_model(run).model, TokenDataset.open(run.parent / "tokens")


def test_ranking_finds_edges_and_measures_them_exactly(trained):
    model, dataset = trained
    found = rank_edges(model, dataset, tokens=256, top=6, level="cores")
    assert found.candidates == 2 + 3 + 4 + 5 + 6  # each core sees token, position and the cores before it
    changes = [abs(effect.change) for effect in found.effects]
    assert len(changes) == 6
    assert changes == sorted(changes, reverse=True)
    first = found.effects[0]
    with cut(model, first.edges):
        assert split_loss(model, dataset, tokens=256).ce - found.loss == pytest.approx(first.change, abs=1e-6)
    assert changes[0] > 0.1
    all_of_them = rank_edges(model, dataset, tokens=256, top=100, level="cores").effects
    assert {effect.edges for effect in all_of_them[:2]} <= {effect.edges for effect in found.effects}


def test_cut_effects_reports_each_edge_and_all_together(trained):
    model, dataset = trained
    loss, tokens, effects = cut_effects(model, ["layer0 <- token", "layer1.ff <- position"], dataset, tokens=128)
    assert tokens == 128
    assert [effect.number for effect in effects] == [16, 4, 20]
    assert effects[-1].edges == "all of these"
    assert loss == pytest.approx(split_loss(model, dataset, tokens=128).ce)


def naive_scores(model, later, earlier):
    """Composition of head (1, later) with head (0, earlier), by the large matrices."""
    V, H = model.config.head_dim, model.config.heads

    def weights(layer, head):
        weight = (model.stream[2 * layer].qkv * model.stream[2 * layer].norm.gain).double()
        q, k, v = (weight[(part * H + head) * V :][:V] for part in range(3))
        o = model.stream[2 * layer + 1].output[:, head * V :][:, :V].double()
        return q.T @ k, o @ v

    (qk2, ov2), (_, ov1) = weights(1, later), weights(0, earlier)
    return [(left @ ov1).norm() / left.norm() / ov1.norm() for left in (qk2.T, qk2, ov2)]


def test_composition_scores_equal_those_of_the_large_matrices():
    model = rmt.build(rmt.preset("transformer-tiny").replace(layers=2))
    with torch.no_grad():
        model.stream[2].norm.gain.uniform_(0.5, 2)
    found = composition(model)
    row = found.reads.index("layer1.head2.query")
    expected = torch.stack(naive_scores(model, 2, 3)).float()
    torch.testing.assert_close(found.scores[row : row + 3, 3], expected)
    assert (found.scores[: 3 * 4] == 0).all()
    assert (found.scores[:, 4:] == 0).all()
    assert found.scores[12:, :4].square().mean().sqrt() == pytest.approx(found.random, rel=0.15)
    with pytest.raises(InputError, match="'matrix'"):
        composition(small_model())
