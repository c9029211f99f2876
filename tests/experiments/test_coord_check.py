"""Under muP the numbers inside both models keep their size when the model grows; without it their updates grow."""

import json

import pytest
import torch

from rmt.cli import main
from rmt.experiments.coord_check import BASE_MODEL, MOMENTS, Check, attention_logits, coord_check, record, slope
from rmt.model import build

SMALL = BASE_MODEL.replace(heads=4, head_dim=8, key_dim=16, ff_dim=64, vocab_size=64, context=16)


@pytest.fixture(scope="module")
def rows():
    return coord_check(Check(model=SMALL, seeds=2))


def of(rows, stream, init):
    return {row["quantity"]: row for row in rows if (row["stream"], row["init"]) == (stream, init)}


@pytest.mark.parametrize("stream", ["matrix", "vector"])
def test_sizes_stay_flat_under_mup(rows, stream):
    for name, row in of(rows, stream, "mup").items():
        if name == "logits":
            assert set(row["start"].values()) == {0.0}, "the unembedding starts at zero"
        else:
            assert abs(row["start_slope"]) < 0.15, name
        # Flat, or falling by what averages out in a wider model; eight times the width may not even add a half.
        assert -0.3 < row["end_slope"] < 0.15, name
        assert -0.45 < row["change_slope"] < 0.15, name


@pytest.mark.parametrize("stream", ["matrix", "vector"])
def test_updates_grow_with_the_width_without_mup(rows, stream):
    with_mup, without = of(rows, stream, "mup"), of(rows, stream, "lecun")
    for name, row in without.items():
        assert abs(row["start_slope"]) < 0.15, name
        assert row["change_slope"] > with_mup[name]["change_slope"] + 0.2, name
    for name in ("stream", "attention logits", "feed-forward writes", "logits"):
        assert without[name]["change_slope"] > 0.25, name


def test_slopes_are_those_of_a_power_law():
    widths = (1, 2, 4, 8)
    assert slope(widths, [3 * width**0.5 for width in widths]) == pytest.approx(0.5)
    assert slope(widths, [0.0, 1.0, 1.0, 1.0]) is None


def test_recorded_attention_logits_are_those_of_the_definition():
    q_BTHV, k_BTGV = torch.randn(2, 5, 4, 3), torch.randn(2, 5, 2, 3)
    logits = attention_logits(q_BTHV, k_BTGV)
    assert logits.shape == (2, 4, 15)
    assert logits[1, 3, 4] == pytest.approx(float(q_BTHV[1, 2, 3] @ k_BTGV[1, 1, 1]))  # row 2 of the triangle, column 1


def test_recording_leaves_the_model_as_it_was():
    model = build(SMALL, seed=0)
    ids = torch.arange(16)[None]
    before = model(ids).logits
    found = record(model, ids)
    assert {name: len(tensors) for name, tensors in found.items()} == {
        "stream": 5,
        "attention reads": 2,
        "attention logits": 2,
        "attention writes": 2,
        "feed-forward reads": 2,
        "feed-forward writes": 2,
        "unembedding reads": 1,
        "logits": 1,
    }
    assert torch.equal(model(ids).logits, before)
    assert not any(module._forward_hooks for module in model.modules())


def test_the_command_prints_slopes_and_writes_the_figure(tmp_path, capsys):
    flags = ["--streams", "matrix", "--widths", "1,2", "--steps", "1", "--seeds", "1", "--out", str(tmp_path / "check")]
    flags += ["--model.layers", "1", "--model.ff_dim", "32", "--model.context", "8"]
    assert main(["tune", "coord-check", *flags]) == 0
    assert "attention logits" in capsys.readouterr().out
    written = json.loads((tmp_path / "check" / "coordinates.json").read_text())
    assert written["base"]["ff_dim"] == 32
    assert len(written["rows"]) == 2 * 8
    assert all(set(row["end"]) == {"1", "2"} for row in written["rows"])
    assert all(f"{moment}_slope" in row for row in written["rows"] for moment in MOMENTS)
    assert all((tmp_path / "check" / f"coordinates.{end}").stat().st_size > 5000 for end in ("png", "svg"))
