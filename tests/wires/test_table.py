"""The table of reads and writes: exact, causal, independent of the keys' basis, quick, and readable from its files."""

import csv
import time

import numpy as np
import pytest
import torch
from small import small_model

import rmt
from rmt.errors import InputError
from rmt.wires.slots import find_edges
from rmt.wires.table import find_network


def naive_coupling(model, read, write, v):
    """The number from the definition: what the read receives of a unit vector written at value index v."""
    table = rmt.wiring(model)
    X_KV = torch.zeros(model.config.key_dim, model.config.head_dim)
    X_KV[:, v] = table.write_KW[:, write]
    slot = table.reads[read]
    boundary = model.stream[slot.site]
    gain = 1.0 if boundary.norm.gain is None else boundary.norm.gain
    row = read - table.read_rows[slot.site].start
    return (boundary.retrieve.keys_RK[row] @ (X_KV * gain))[v].item()


def test_the_table_is_what_a_read_receives_of_a_unit_write(model):
    table, V = rmt.wiring(model), model.config.head_dim
    gain = model.config.norm_gain
    for read, write in ((5, 3), (len(table.reads) - 1, len(table.writes) - 1), (len(table.reads) - 2, 0)):
        each = np.array([naive_coupling(model, read, write, v) for v in range(V)])
        slot = table.reads[read]
        coupling = table.coupling(slot.site)[read - table.read_rows[slot.site].start, write]
        np.testing.assert_allclose(coupling.numpy(), each, rtol=1e-4, atol=1e-6)
        if gain == "full":
            assert table.raw[read, write] == pytest.approx(each.mean(), rel=1e-4, abs=1e-6)
            assert table.spread[read, write] == pytest.approx(each.std(), rel=1e-4, abs=1e-6)
        else:
            factor = 1.0 if gain == "none" else model.stream[slot.site].norm.gain.detach().numpy()
            np.testing.assert_allclose(table.raw[read, write] * factor * np.ones(V), each, rtol=1e-4, atol=1e-6)
            assert table.spread[read, write] == 0
    assert np.abs(table.normalised).max() <= 1 + 1e-6


def test_reads_and_writes_have_the_models_names(model):
    table, config = rmt.wiring(model), model.config
    assert len({slot.name for slot in table.reads}) == len(table.reads)
    assert len(table.reads) == sum(boundary.retrieve.keys_RK.shape[0] for boundary in model.stream)
    positions = config.heads if config.position == "learned" else 0
    assert len(table.writes) == config.heads * (1 + 2 * config.layers) + positions
    shared = "group" if config.kv_heads else "head"
    first_key = table.read_index(f"layer2.{shared}0.key")
    row = first_key - table.read_rows[4].start
    assert row == config.heads  # queries come first
    assert table.reads[-1].name == f"unembedding.slot{config.heads - 1}"


def test_the_table_is_strictly_causal_in_depth(model):
    table = rmt.wiring(model)

    def depth(core, reads):  # attention l is core 2l, feed-forward l is 2l + 1
        if core in ("token", "position"):
            return -1
        if core == "unembedding":
            return 2 * model.config.layers
        layer, kind = core.removeprefix("layer").split(".")
        return 2 * int(layer) + (kind == "ff")

    for row, read in enumerate(table.reads):
        for column, write in enumerate(table.writes):
            earlier = depth(write.core, False) < depth(read.core, True)
            assert table.causal[row, column] == earlier
            if not earlier:
                assert table.raw[row, column] == table.normalised[row, column] == 0
    assert (np.abs(table.normalised[table.causal]) > 0).mean() > 0.99


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("gain", ["none", "value", "full"])
def test_turning_all_keys_leaves_the_table_unless_the_gain_is_full(gain, norm, ids):
    model = small_model(norm_gain=gain, norm=norm)
    before, logits = rmt.wiring(model), model(ids).logits
    turn, _ = torch.linalg.qr(torch.randn(6, 6))
    with torch.no_grad():
        for boundary in model.stream:
            boundary.store.keys_KR.copy_(turn @ boundary.store.keys_KR)
            boundary.retrieve.keys_RK.copy_(boundary.retrieve.keys_RK @ turn.T)
        model.stream[0].store_position.keys_KR.copy_(turn @ model.stream[0].store_position.keys_KR)
    after = rmt.wiring(model)
    same = np.allclose(after.raw, before.raw, rtol=1e-4, atol=1e-5)
    assert same == (gain != "full")
    if gain != "full":
        np.testing.assert_allclose(after.normalised, before.normalised, rtol=1e-4, atol=1e-5)
    # LayerNorm's mean over the entries knows the axes, RMSNorm knows none.
    unchanged = torch.allclose(model(ids).logits, logits, rtol=1e-3, atol=1e-3)
    assert unchanged == (gain != "full" and norm == "rmsnorm")


def test_blocks_are_root_mean_squares(model):
    table = rmt.wiring(model)
    blocks = table.blocks("cores")
    assert blocks.reads == [f"layer{i}.{part}" for i in range(3) for part in ("attention", "ff")] + ["unembedding"]
    chosen = table.edges("layer2.ff <- layer1.attention").mask_RW
    place = blocks.reads.index("layer2.ff"), blocks.writes.index("layer1.attention")
    assert blocks.values[place] == pytest.approx(np.sqrt((table.normalised[chosen] ** 2).mean()), rel=1e-5)
    assert not blocks.causal[0, -1]


def test_the_files_hold_the_table(tmp_path):
    table = rmt.wiring(small_model())
    arrays, lines = table.save(tmp_path / "new")
    stored = np.load(arrays)
    np.testing.assert_array_equal(stored["raw"], table.raw)
    assert stored["reads"][0] == "layer0.head0.query"
    with open(lines) as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == table.causal.sum()
    last = rows[-1]
    assert (last["read"], last["write"]) == (table.reads[-1].name, table.writes[-1].name)
    assert float(last["raw"]) == pytest.approx(table.raw[-1, -1], rel=1e-6)


def test_top_sources_are_causal_and_ordered():
    table = rmt.wiring(small_model())
    sources = table.top_sources("layer0.head1.key", 100)
    assert len(sources) == 8  # tokens and positions only
    assert [abs(number) for _, number, _ in sources] == sorted((abs(n) for _, n, _ in sources), reverse=True)


@pytest.mark.parametrize(
    ("edge", "number"),
    [
        ("layer2.head1.query <- layer0.head3", 1),
        ("layer2.head1<-layer0.head3", 3),
        ("layer2.ff <- layer2.attention", 16),
        ("layer1.key <- embedding", 32),
        ("unembedding <- all", 4 * 32),
        ("layer0 <- token", 4 * 4 * 4),
    ],
)
def test_names_of_groups(edge, number):
    table = rmt.wiring(small_model())
    assert table.edges(edge).mask_RW.sum() == number


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        ("layer2.head1.quary <- token", "no read 'layer2.head1.quary' .* Did you mean 'layer2.head1.query'"),
        ("layer2.ff <- layer2.atention", "no write .* Did you mean 'layer2.attention'"),
        ("layer2.ff <- zzz", "Names look like token.slot0"),
        ("layer2.ff", "in quotes"),
        ("layer0.head0 <- layer1.ff", "written later"),
    ],
)
def test_wrong_edges_are_refused_in_one_line(edge, message):
    table = rmt.wiring(small_model())
    with pytest.raises(InputError, match=message) as caught:
        find_edges(edge, table.reads, table.writes)
    assert "\n" not in str(caught.value)


def test_other_streams_are_refused_and_transformers_offered_composition():
    config = rmt.preset("transformer-tiny").replace(layers=1)
    with pytest.raises(InputError, match=r"matrix streams.*'vector'.*--composition"):
        rmt.wiring(rmt.build(config))
    with pytest.raises(InputError, match=r"'highway'\.$"):
        rmt.wiring(rmt.build(config.replace(stream="highway")))
    with pytest.raises(InputError, match="not of a Linear"):
        find_network(torch.nn.Linear(1, 1))


def test_the_largest_preset_takes_seconds():
    """Parameters that the table does not need are left unfilled; the keys and gains have the real shapes."""
    config = rmt.preset("rmt-305m")
    model = rmt.build(config, device="meta")
    model.stream.to_empty(device="cpu")
    for parameter in model.stream.parameters():
        torch.nn.init.normal_(parameter)
    began = time.perf_counter()
    table = rmt.wiring(model)
    assert time.perf_counter() - began < 10
    assert table.raw.shape == (1552, 800)
    assert table.raw.nbytes + table.spread.nbytes + table.causal.nbytes < 20e6
