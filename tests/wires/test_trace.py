"""What passed over the wires: contributions sum to the model's own reads, attributions to its own logits."""

import pytest
import torch

from rmt.hub.folder import load_model
from rmt.wires import crosstalk, load, trace
from rmt.wires.load import effective_rank, interference, unit


def relative(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


def test_contributions_sum_to_every_read(model, ids):
    seen = trace(model, ids)
    for slot in seen.table.reads:
        total = seen.contributions(slot.name).sum(-2)
        assert relative(total, seen.read_vector(slot.name)) < 1e-5, slot.name


def test_contributions_and_attributions_of_a_trained_model(run):
    loaded = load_model(run)
    ids = torch.tensor([loaded.tokenizer.encode("the dog lay by the mat and a bird sang").ids])
    seen = trace(loaded.model, ids)
    for slot in seen.table.reads:
        assert relative(seen.contributions(slot.name).sum(-2), seen.read_vector(slot.name)) < 1e-5, slot.name
    likeliest = seen.logits_BTW.max(-1)
    assert relative(seen.attribution(likeliest.indices).sum(-1), likeliest.values) < 1e-5


def test_the_traced_reads_are_those_of_the_model(model, ids):
    taken = {}
    hooks = [
        core.register_forward_pre_hook(lambda _, args, name=name: taken.__setitem__(name, args[0]))
        for name, core in (("attention", model.attention[2]), ("ff", model.feed_forward[1]))
    ]
    with torch.no_grad():
        logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    seen = trace(model, ids)
    assert relative(seen.logits_BTW, logits) < 1e-5
    assert relative(seen.read_vector("layer2.head3.query"), taken["attention"][0][:, :, 3]) < 1e-5
    unit_name = "head" if model.config.kv_heads is None else "group"
    assert relative(seen.read_vector(f"layer2.{unit_name}0.value"), taken["attention"][2][:, :, 0]) < 1e-5
    slots = torch.stack([seen.read_vector(f"layer1.ff.slot{i}") for i in range(4)], dim=2)
    assert relative(slots.flatten(2), taken["ff"]) < 1e-5


def test_attributions_sum_to_the_logits(model, ids):
    seen = trace(model, ids)
    for targets in (ids.roll(-1, 1), seen.logits_BTW.argmax(-1)):
        parts = seen.attribution(targets)
        assert parts.shape == (*ids.shape, len(seen.table.writes))
        assert relative(parts.sum(-1), seen.logits_BTW.gather(-1, targets[..., None])[..., 0]) < 1e-5


def test_shares_sum_to_one(model, ids):
    seen = trace(model, ids)
    torch.testing.assert_close(seen.total_shares().sum(-1), torch.ones(len(seen.table.reads)), rtol=0, atol=1e-4)
    torch.testing.assert_close(seen.shares("layer1.ff.slot2").sum(-1), torch.ones(ids.shape), rtol=0, atol=1e-3)
    cores = seen.core_shares()
    torch.testing.assert_close(cores.sum(-1), torch.ones(*ids.shape, 7), rtol=0, atol=1e-4)
    assert (cores[:, :, 0, 2:] == 0).all()  # the first attention sees the embedding only


def test_total_shares_are_the_shares_weighted_by_length(model, ids):
    seen = trace(model, ids)
    name = "layer2.head1.query"
    length = seen.read_vector(name).square().sum(-1, keepdim=True)
    expected = (seen.shares(name) * length).sum((0, 1)) / length.sum()
    found = seen.total_shares()[seen.table.read_index(name), : len(expected)]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_the_lens_ends_at_the_models_own_prediction(model, ids):
    seen = trace(model, ids)
    lens = seen.lens(top=3)
    assert lens.after == ["embedding", *(f"layer{i}.{part}" for i in range(3) for part in ("attention", "ff"))]
    best = seen.logits_BTW.softmax(-1).topk(3)
    assert (lens.ids[-1] == best.indices).all()
    torch.testing.assert_close(lens.probability[-1], best.values, rtol=1e-4, atol=1e-6)
    following = seen.logits_BTW.softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(lens.target[-1, :, :-1], following, rtol=1e-4, atol=1e-6)
    assert (lens.target[:, :, -1] == 0).all()


def test_load_of_orthogonal_and_of_equal_keys():
    basis = torch.eye(6, dtype=torch.float64)
    assert effective_rank(basis) == pytest.approx(6)
    assert interference(basis) == pytest.approx(0)
    same = basis[:, :1].expand(6, 4)
    assert effective_rank(same) == pytest.approx(1)
    assert interference(same) == pytest.approx(1)
    random = unit(torch.randn(2000, 6, 30, dtype=torch.float64))
    assert interference(random).mean() == pytest.approx(1 / 6, rel=0.02)


def test_load_counts_writes_and_stays_above_the_least(model, ids):
    seen = trace(model, ids)
    rows = load(seen.table)
    assert [row.core for row in rows][-1] == "unembedding"
    assert rows[-1].writes == len(seen.table.writes)
    assert rows[-1].writes_per_key_dim == len(seen.table.writes) / 6
    for row in rows:
        assert row.interference >= row.interference_least - 1e-9
        assert 1 <= row.effective_rank <= 6 + 1e-9
        assert 1 <= row.sources <= row.writes


def test_crosstalk_is_what_a_matched_read_gets_beyond_its_write(model, ids):
    seen = trace(model, ids)
    data = torch.cat(seen.data, dim=-2)
    keys = seen.table.write_KW
    stream = torch.einsum("kw,btwv->btkv", keys, data)
    for place in (0, 7, len(seen.table.writes) - 1):
        key = keys[:, place]
        back = torch.einsum("k,btkv->btv", key, stream) / key.square().sum()
        own = data[:, :, place]
        expected = (back - own).square().sum() / own.square().sum()
        assert crosstalk(seen)[place].noise == pytest.approx(expected.item(), rel=1e-3)
