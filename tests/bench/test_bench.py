"""`rmt bench` on a tiny shape: every row is there, the result is plain data, wrong numbers are never timed."""

import copy
import json
import re

import pytest
import torch

from rmt.bench import checks, memory, suite
from rmt.bench.cases import MATRIX_ROWS, PARTS, SHAPES, find_case, training_flops
from rmt.bench.harness import Gemm, Sample, Timing, interleave
from rmt.bench.profile import PARTS as KINDS
from rmt.bench.profile import kind_named
from rmt.bench.stock import StockTransformer
from rmt.bench.targets import TARGETS, judge
from rmt.cli import main
from rmt.config import ModelConfig
from rmt.ops.native import build as native
from rmt.theory.accounting import count
from rmt.train import heap

needs_native = pytest.mark.skipif(bool(native.problem()), reason="no compiler")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """One round of everything but memory, as the command writes it."""
    path = tmp_path_factory.mktemp("bench") / "tiny.json"
    what = ",".join(part for part in PARTS if part != "memory")
    assert main(["bench", "--shape", "tiny", "--rounds", "1", "--what", what, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@needs_native
def test_every_part_has_all_its_rows(result):
    rows = {part: set(result[part]["rows"]) for part in PARTS if part != "memory"}
    assert rows["stack"] == {"stock", "vector", *MATRIX_ROWS}
    assert rows["step"] == rows["stack"] | {"one sequence", "stock, memory kept"}
    assert rows["decode"] == {"gpt2", "vector", "portable", "native"}
    assert rows["loss"] == {"stock", *MATRIX_ROWS}
    assert rows["keydim"] == {"8", "16", "32"}


@needs_native
def test_a_row_has_its_time_and_its_ratios(result):
    row = result["stack"]["rows"]["native"]
    assert row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
    assert row["rounds"] == 1
    own, base = (result["stack"]["rows"][name]["seconds"]["median"] for name in ("native", "stock"))
    assert row["ratios"]["stock"]["median"] == pytest.approx(own / base)
    assert result["stack"]["gemm_flops_per_second"] > 0


def test_a_result_describes_the_machine_and_the_shape(result):
    assert result["schema"] == suite.SCHEMA
    assert result["shape"] == {"name": "tiny", "batch": 2, **SHAPES["tiny"][0]}
    about = result["environment"]
    assert about["machine"]["cores"] > 0
    assert about["versions"]["torch"] == torch.__version__
    assert re.match(r"\d{4}-\d\d-\d\d", about["started"])
    assert "command" not in about  # it may hold paths of this machine
    assert set(result["checks"]) >= {"plain", "portable", "vector", "stock", "decode"}


def test_the_profile_adds_up_to_the_step(result):
    for seconds in result["step"]["profile"].values():
        assert set(seconds) == set(KINDS)
        assert all(value >= 0 for value in seconds.values())
        assert seconds["gemm"] > 0
        assert seconds["optimizer"] > 0
        assert seconds["activation"] > 0
    best = result["step"]["profile"][result["best"]]
    assert best["boundary"] > 0
    assert best["loss"] > 0


def test_the_table_shows_every_target_and_judges_none_of_another_shape(result, capsys, tmp_path):
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(result))
    assert main(["bench", "--from", str(kept), "--figure", str(tmp_path / "step.png")]) == 0
    shown = capsys.readouterr().out
    for target in TARGETS:
        assert target.figure in shown
    assert "✓" not in shown
    assert (tmp_path / "step.png").stat().st_size > 1000
    assert (tmp_path / "step.svg").exists()


def test_json_can_be_printed(result, capsys, tmp_path):
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(result))
    assert main(["bench", "--from", str(kept), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == result


@needs_native
def test_a_target_is_ticked_when_it_is_met(result):
    asked = copy.deepcopy(result)
    asked["shape"]["name"] = "small"
    for value, met in ((0.6, True), (0.9, False)):
        asked["stack"]["rows"]["native"]["ratios"]["stock"]["median"] = value
        answer = {target["figure"]: target for target in judge(asked)}["RMT, native / stock, layers"]
        assert answer["value"] == value
        assert answer["met"] is met
    asked["all_layers"] = False
    assert all(target["met"] is None for target in judge(asked))


def test_memory_that_was_not_measured_is_a_dash(result):
    assert {target["value"] for target in result["targets"] if target["part"] == "memory"} == {None}


def test_nothing_is_timed_when_a_row_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(checks, "stock_difference", lambda config: 0.3)
    assert main(["bench", "--shape", "tiny", "--what", "loss", "--rounds", "1"]) == 1
    captured = capsys.readouterr()
    assert re.search(r"^rmt: bench: stock differs .* nothing was timed.*$", captured.err, re.MULTILINE)
    assert "ms" not in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "smal"], "there is no shape 'smal'. Did you mean 'small'?"),
        (["--what", "stakc"], "nothing called 'stakc' to measure. Did you mean 'stack'?"),
        (["--rows", "nativ"], "there is no row 'nativ'. Did you mean 'native'?"),
        (["--rows", "stock"], "--rows must name one of plain"),
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--layers", "0"], "--layers 0: must be at least 1"),
        (["--clock", "cpu"], "use it with --threads 1"),
        (["--json", "/no/such/folder/x.json"], "name a file in a folder that exists"),
        (["--from", "/no/such/file.json"], "cannot read /no/such/file.json"),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, message):
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_peak_of_a_step_is_measured_in_a_process_of_its_own():
    config = ModelConfig(layers=2, heads=4, head_dim=32, key_dim=16, ff_dim=512, vocab_size=20_000, context=128)
    measured = memory.measure_apart(memory.Job(config.to_dict(), batch=2), threads=1)
    assert measured == pytest.approx(count(config, batch=2).memory.peak, rel=0.25)  # small: temporaries weigh more


def test_all_policies_and_widths_are_memory_rows():
    names = list(memory.jobs(find_case("small", rows=("stock", "vector", "portable"))))
    policies = [
        f"{row}{rest}"
        for row in ("vector", "portable")
        for rest in ("", *(f", recompute {p}" for p in ("gelu", "ff", "full")))
    ]
    assert set(names) == {"stock", *policies, "key_dim 64", "key_dim 128"}


def test_the_stock_transformer_has_the_parameters_of_the_vector_stream():
    config = find_case("tiny").vector
    assert sum(p.numel() for p in StockTransformer(config).parameters()) == count(config).params


def test_needed_flops_count_half_of_attention():
    counted = count(find_case("small").config)
    parts = counted.flops.per_token.parts
    rest = sum(parts.values()) - parts["attention"] - parts["softmax"]
    assert training_flops(counted, 10) == 30 * (rest + parts["attention"] / 2)


def test_disturbed_rounds_are_dropped_when_enough_quiet_ones_remain():
    quiet, loud = Sample(1.0, 0.0), Sample(9.0, 0.5)
    base = [Sample(2.0, 0.0)] * 4
    timing = Timing({"a": [quiet, quiet, quiet, loud], "b": base}, [Gemm(8.0, 4.0)] * 4)
    assert timing.seconds("a").median == 1.0
    assert timing.ratio("a", "b").high == 0.5
    assert timing.share_of_gemm("a", 4.0).low == 0.5
    assert timing.share_of_gemm("a", 4.0, "typical").low == 1.0
    few = Timing({"a": [quiet, loud], "b": base[:2]}, [Gemm(8.0, 4.0)] * 2)
    assert few.seconds("a").median == 5.0


def test_rounds_are_interleaved_forwards_and_backwards():
    order = []
    functions = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    interleave(functions, rounds=2, usual_heap=functions)
    assert "".join(order) == "ab" + "ab" + "ba"


@pytest.mark.skipif(heap._libc() is None, reason="malloc is not glibc's, or set by the user")
def test_our_rows_run_as_in_the_trainer_whatever_ran_before_them():
    seen = []
    functions = {"stock": lambda: seen.append(heap._keeping), "ours": lambda: seen.append(heap._keeping)}
    interleave(functions, rounds=2, usual_heap={"stock"})
    # Warming up; stock, ours (once more, to fill the heap); ours, stock.
    assert seen[2:] == [False, True, True, True, False]
    assert not heap._keeping


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Optimizer.step#AdamW.step", "optimizer"),
        ("_WriteReadBackward", "boundary"),
        ("_Chunked", "loss"),
        ("aten::addmm", "gemm"),
        ("_AttentionBackward", "attention"),
        ("aten::empty", None),
    ],
)
def test_operations_have_their_kind(name, kind):
    assert kind_named(name) == kind
