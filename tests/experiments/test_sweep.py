"""The paper's experiments are declared right, priced by the accounting, resumable, and analysed without their runs."""

import itertools
import json

import numpy as np
import pytest

from rmt.cli import main
from rmt.errors import InputError
from rmt.experiments import residual_size, scaling_laws
from rmt.experiments.ladder import ladder, ratio_of, with_settings
from rmt.experiments.residual_size import page_trend
from rmt.experiments.sweep import counted
from rmt.theory.accounting import count

SMALL = """--model.vocab_size 512 --model.context 16 --train.sample_every 0 --train.eval_tokens 64
--train.tensorboard false --workers 2 --json"""


def dry_run(capsys, *flags):
    assert main(["sweep", *flags, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_papers_variants_are_listed_with_their_published_sizes(capsys):
    rows = {row["stream"]: row for row in dry_run(capsys, "variants", "--scale", "paper")["runs"]}
    assert {stream: row["parameters"] for stream, row in rows.items()} == {
        "matrix": 134_291_072,
        "vector": 162_541_824,
        "highway": 190_871_808,
        "aggregation": 164_903_424,
        "depthwise_lstm": 233_376_000,
    }
    assert {row["tokens"] for row in rows.values()} == {50_000 * 64 * 512}


def test_the_papers_stream_sizes_are_listed_with_the_transformer(capsys):
    rows = dry_run(capsys, "residual-size", "--scale", "paper")["runs"]
    assert [row["stream_size"] for row in rows] == [384, 768, 1536, 2048, 3072, 4096, 768]
    assert {(row["steps"], row["batch_size"], row["context"]) for row in rows} == {(50_000, 64, 512)}


def test_the_papers_scaling_law_is_priced_as_the_paper_counts(capsys):
    found = dry_run(capsys, "scaling-laws", "--scale", "paper")
    rows = {row["name"]: row for row in found["runs"]}
    published = {  # parameters in millions, tokens in billions, batch
        "rmt-46m-x20": (45.90, 0.142, 64),
        "transformer-49m-x20": (49.42, 0.212, 64),
        "rmt-134m-x20": (134.29, 1.1, 64),
        "transformer-160m-x20": (162.54, 1.7, 64),
        "rmt-206m-x20": (206.31, 2.3, 64),
        "transformer-260m-x20": (263.96, 3.5, 64),
        "rmt-305m-x20": (305.13, 6.04, 256),
        "transformer-405m-x20": (405.49, 6.04, 256),
    }
    assert list(rows) == list(published)
    for name, (parameters, tokens, batch) in published.items():
        assert round(rows[name]["parameters"] / 1e6, 2) == parameters
        assert rows[name]["tokens"] / 1e9 == pytest.approx(tokens, rel=0.035)
        assert rows[name]["batch_size"] == batch
        assert rows[name]["flops_without_logits"] < rows[name]["flops"]
    assert rows["transformer-405m-x20"]["flops_without_logits"] == pytest.approx(1.187e19, rel=1e-3)
    assert rows["rmt-305m-x20"]["flops_without_logits"] == pytest.approx(8.57e18, rel=1e-3)
    assert "NVIDIA H100 SXM at 40 %" in found["machine"]
    assert 9 < rows["transformer-405m-x20"]["seconds"] / 3600 < 10  # 1.37e19 / (0.4 * 989e12)


def test_a_slower_gpu_takes_longer_and_every_seed_and_rate_is_paid_for(capsys):
    fast = dry_run(capsys, "residual-size", "--scale", "paper")
    slow = dry_run(
        capsys, "residual-size", "--scale", "paper", "--gpu", "A100 80 GB", "--seeds", "3", "--lr", "1e-2,2e-2"
    )
    assert slow["runs"][0]["runs"] == 4
    assert slow["total_seconds"] > 2 * 4 * fast["total_seconds"]


def test_the_tiny_ladder_takes_less_than_25_minutes_on_two_cores(capsys, monkeypatch):
    monkeypatch.setattr("rmt.experiments.pool.cores", lambda: 2)
    found = dry_run(capsys, "scaling-laws", "--tokens-per-parameter", "10,20,40")
    assert len(found["runs"]) == 30
    assert found["total_seconds"] < 25 * 60
    transformers = [row["non_embedding_parameters"] for row in found["runs"] if row["stream"] == "vector"]
    assert max(transformers) > 8 * min(transformers)


def test_tuned_settings_reach_every_rung_and_dimensions_do_not():
    declared = ladder("tiny")
    files = {
        stream: {
            "model": {"init": "mup", "mup": {"base_heads": 2, "alpha_out": out}, "layers": 9},
            "train": {"lr": lr, "steps": 7},
        }
        for stream, out, lr in (("matrix", 3.0, 0.05), ("vector", 5.0, 0.01))
    }
    plain = with_settings(declared, {}, lambda *pair: pair)
    for before, member in zip(plain, with_settings(declared, files, lambda *pair: pair), strict=True):
        is_matrix = member.model.stream == "matrix"
        assert member.model.mup.alpha_out == (3.0 if is_matrix else 5.0)
        assert member.train.lr == (0.05 if is_matrix else 0.01)
        assert count(member.model).params == count(before.model).params
        assert member.steps == before.steps


def test_page_trend_counts_orders_exactly():
    falling = np.arange(6.0)[::-1][None]
    assert page_trend(falling) == pytest.approx(1 / 720)
    assert page_trend(-falling) == pytest.approx(1.0)
    table = np.array([[3.0, 1.0, 2.0], [3.0, 2.0, 1.0]])
    place, orders = np.arange(1, 4), list(itertools.permutations((1, 2, 3)))
    observed = (np.array([[1, 3, 2], [1, 2, 3]]) * place).sum()
    chances = [np.dot(a, place) + np.dot(b, place) >= observed for a in orders for b in orders]
    assert page_trend(table) == pytest.approx(np.mean(chances))


def test_page_trend_of_many_sizes_is_the_limit_of_counting():
    table = np.random.default_rng(0).normal(size=(4, 9)) - 0.12 * np.arange(9)
    shuffled = np.random.default_rng(1).permuted(np.tile(table, (4000, 1, 1)), axis=2)
    place = np.arange(1, 10)

    def statistic(losses):
        return ((np.argsort(np.argsort(-losses, axis=-1), axis=-1) + 1) * place).sum((-2, -1))

    assert page_trend(table) == pytest.approx(np.mean(statistic(shuffled) >= statistic(table)), abs=0.02)


def size_rows(change, seeds=3):
    rows = []
    for seed, key_dim in itertools.product(range(seeds), (4, 8, 16)):
        loss = 4.5 + change[key_dim] + 0.01 * seed
        row = {"name": f"key_dim-{key_dim}", "stream": "matrix", "key_dim": key_dim, "stream_size": 16 * key_dim}
        row |= {"parameters": 1000 + key_dim, "tokens": 100, "flops": 1e6, "steps": 10, "seconds": 2.0, "lr": 0.02}
        rows.append(row | {"seed": seed, "dev_loss": loss, "train_loss": loss})
    return rows


def test_a_falling_loss_is_called_monotone_and_a_rise_is_named(tmp_path):
    result = residual_size.analyse(size_rows({4: 0.0, 8: -0.1, 16: -0.15}))
    assert result["is_monotone"]
    assert result["trend_p"] == pytest.approx(1 / 6**3)
    assert [step["change"] for step in result["neighbours"]] == pytest.approx([-0.1, -0.05])
    assert "The loss fell with every increase." in result["statement"]
    rising = residual_size.analyse(size_rows({4: 0.0, 8: -0.1, 16: -0.08}))
    assert not rising["is_monotone"]
    assert "did not fall from key_dim 8 to 16 (+0.0200)" in rising["statement"]


def test_the_papers_losses_stand_beside_ours_at_its_scale_only():
    rows = [{**row, "key_dim": 6, "name": "key_dim-6"} for row in size_rows({4: 0, 8: 0, 16: 0}) if row["key_dim"] == 4]
    assert residual_size.analyse(rows, "paper")["models"][0]["paper_loss"] == 3.6186
    assert residual_size.analyse(rows, "tiny")["models"][0]["paper_loss"] is None


def test_only_the_best_learning_rate_counts():
    rows = size_rows({4: 0.0, 8: -0.1, 16: -0.2}, seeds=1)
    rows += [{**row, "lr": 0.1, "dev_loss": row["dev_loss"] + (-1 if row["key_dim"] == 4 else 1)} for row in rows]
    rows[-1]["dev_loss"] = float("nan")  # a run that diverged is never the best
    assert {name: runs[0]["lr"] for name, runs in counted(rows).items()} == {
        "key_dim-4": 0.1,
        "key_dim-8": 0.02,
        "key_dim-16": 0.02,
    }


def paper_rows():
    """The paper's eight runs as rows: its losses, our counts, its seconds per step of the largest pair."""
    rows = []
    for member in ladder("paper").members():
        counted_model, name = count(member.model), member.name.removesuffix("-x20")
        tokens = 20 * counted_model.non_embedding_params
        loss = scaling_laws.PAPER_LOSS[name]
        row = {"name": member.name, "stream": member.model.stream, "layers": member.model.layers}
        row |= {"heads": member.model.heads, "head_dim": 64, "stream_size": member.model.stream_size, "seed": 0}
        row |= {"parameters": int(counted_model.params), "tokens": tokens, "lr": 0.01, "curve": []}
        row |= {"non_embedding_parameters": counted_model.non_embedding_params, "dev_loss": loss, "train_loss": loss}
        row |= {"flops": counted_model.flops.training(tokens), "seconds": tokens / 131_072 * 4.06}
        rows.append(row | {"flops_without_logits": counted_model.flops.training(tokens, logits=False)})
    return rows


def test_the_papers_eight_losses_give_its_savings_about():
    """Its table 3 (58 % fewer FLOPs, 41 % fewer tokens, 25 % fewer parameters) was read off a training curve. Its
    eight final losses say 58 %, 38 % and 28 % if joined by lines, and 57 %, 36 % and 29 % if fitted by laws."""
    result = scaling_laws.analyse(paper_rows(), "paper")
    last = result["savings"][-1]
    assert last["name"] == "transformer-405m-x20"
    joined = {"flops_without_logits": 0.419, "tokens": 0.622, "parameters": 0.716}
    fitted = {"flops_without_logits": 0.434, "tokens": 0.644, "parameters": 0.707}
    printed = {"flops_without_logits": 0.42, "tokens": 0.59, "parameters": 0.75}
    for resource in joined:
        assert last[resource]["interpolated"] == pytest.approx(joined[resource], abs=0.002)
        assert last[resource]["share"] == pytest.approx(fitted[resource], abs=0.002)
        low, high = last[resource]["interval"]
        assert low < printed[resource] < high
    assert last["flops_without_logits"]["interval"][1] < 0.7
    assert result["joint_laws"] == {"matrix": None, "vector": None}  # one ratio cannot tell N from D
    assert "53 % fewer FLOPs" in result["statement"]
    assert [line["paper"] for line in scaling_laws.readable(result)][:2] == ["3.9664", "4.0904"]


def test_of_an_extended_run_the_law_takes_what_its_own_budget_gave():
    row = paper_rows()[-2]
    budget = row["tokens"]
    longer = {**row, "tokens": 2 * budget, "flops": 2 * row["flops"], "dev_loss": 2.0}
    longer["curve"] = [[0.5 * budget, 4.0], [1.5 * budget, 3.0], [2 * budget, 2.0]]
    found = scaling_laws.point(longer)
    assert (found["tokens"], found["flops"], found["dev_loss"]) == (budget, row["flops"], 3.5)


def synthetic_rows(share, seeds=2):
    """A ladder whose RMTs reach every loss with a given share of the transformer's tokens and parameters."""
    rows, rng = [], np.random.default_rng(0)
    for member in ladder("tiny").members():
        counted_model = count(member.model)
        size = counted_model.non_embedding_params
        worth = size / (share if member.model.stream == "matrix" else 1.0)
        for ratio, seed in itertools.product((10, 20, 40), range(seeds)):
            loss = (1.8 + 90 / worth**0.35 + 300 / (ratio * worth) ** 0.37) * np.exp(rng.normal(0, 5e-4))
            row = {"name": member.name.replace("-x20", f"-x{ratio}"), "stream": member.model.stream, "seed": seed}
            row |= {"layers": member.model.layers, "heads": member.model.heads, "head_dim": 16, "curve": [], "lr": 0.02}
            row |= {"parameters": int(counted_model.params), "non_embedding_parameters": size, "stream_size": 1}
            row |= {"tokens": ratio * size, "flops": 1e3 * ratio * size**2, "flops_without_logits": ratio * size**2}
            rows.append(row | {"seconds": 1e-6 * ratio * size**2, "dev_loss": loss, "train_loss": loss})
    return rows


def test_a_known_saving_is_found_within_its_interval(tmp_path):
    result = scaling_laws.analyse(synthetic_rows(0.6))
    for line in result["savings"]:
        for resource, truth in (("tokens", 0.6), ("non_embedding_parameters", 0.6), ("flops", 0.36)):
            assert line[resource]["share"] == pytest.approx(truth, rel=0.03)
            low, high = line[resource]["interval"]
            assert low * 0.99 <= truth <= high * 1.01
    for stream in ("matrix", "vector"):
        law = result["joint_laws"][stream]
        assert (law["a"], law["b"]) == pytest.approx((0.35, 0.37), abs=0.02)
        for exponent in "ab":
            low, high = law[f"{exponent}_interval"]
            assert low < law[exponent] < high < low + 0.1
    assert json.loads(json.dumps(result)) == result, "plain data"
    from rmt.report.sweeps import scaling_laws_figure

    one, two = (scaling_laws_figure(result, tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


@pytest.mark.slow
def test_a_size_sweep_runs_from_data_to_page(dataset, tmp_path, capsys):
    flags = f"residual-size --key-dims 4 --no-transformer --seeds 2 --lr 1e-2,1e-6 --model.layers 1 {SMALL}".split()
    flags += f"--train.steps 4 --train.batch_size 2 --data {dataset} --out {tmp_path / 'out'}".split()
    assert main(["sweep", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(model["name"], model["lr"], model["seeds"]) for model in result["models"]] == [("key_dim-4", 1e-2, 2)]
    kept = json.loads((tmp_path / "out" / "results.json").read_text())
    runs = ["lr-0.01-seed-0", "lr-1e-06-seed-0", "lr-0.01-seed-1"]
    assert [row["run"] for row in kept["rows"]] == [f"key_dim-4/{name}" for name in runs]
    assert residual_size.analyse(kept["rows"]) == kept["analysis"]
    for name in ("report.html", "residual-size.png", "residual-size.svg", "key_dim-4/lr-0.01-seed-1/metrics.jsonl"):
        assert (tmp_path / "out" / name).stat().st_size > 100


@pytest.mark.slow
def test_a_ladder_runs_from_data_to_savings_and_repeats_nothing(dataset, tmp_path, capsys):
    out = tmp_path / "out"
    flags = f"scaling-laws --rungs 1,2 --tokens-per-parameter 0.05 --train.batch_size 4 {SMALL}".split()
    flags += f"--data {dataset} --out {out}".split()
    assert main(["sweep", *flags]) == 0
    first = capsys.readouterr().out
    assert [line["name"] for line in json.loads(first)["savings"]] == [
        "transformer-1x32-x0.05",
        "transformer-2x32-x0.05",
    ]
    before = {path: path.stat().st_mtime_ns for path in out.glob("*/*/metrics.jsonl")}
    assert len(before) == 4
    (out / "rmt-2x32-x0.05" / "lr-0.02-seed-0" / "loss.png").unlink()  # as if it had been killed at the very end
    assert main(["sweep", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["models"] == json.loads(first)["models"]
    after = {path: path.stat().st_mtime_ns for path in out.glob("*/*/metrics.jsonl")}
    changed = {path.parent.parent.name for path in after if after[path] != before[path]}
    assert changed <= {"rmt-2x32-x0.05"}, "finished runs are not touched"
    for name in ("report.html", "scaling-laws.png", "scaling-laws.svg", "results.json"):
        assert (out / name).stat().st_size > 1000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("variant", "Did you mean 'variants'"),
        ("variants --scale papers", "Did you mean 'paper'"),
        ("variants --out O", "give --data"),
        ("variants --data D", "give --out"),
        ("residual-size --data D --out O", "D is not a token dataset"),
        ("residual-size --data D --out O --seeds 0", "at least one"),
        ("residual-size --dry-run --key-dims 4,x", "write numbers with commas, for example 4,8,16"),
        ("residual-size --dry-run --key-dims 4,4", "name each size once"),
        ("residual-size --dry-run --gpu H100", "Did you mean 'H100 SXM'"),
        ("residual-size --dry-run --train.stepz 4", "steps"),
        ("scaling-laws --dry-run --rungs 9", "the rungs 1 to 5"),
        ("scaling-laws --dry-run --model.layers 3", "the ladder decides it"),
        ("scaling-laws --dry-run --train.steps 3", "the ladder decides it"),
        ("scaling-laws --dry-run --tokens-per-parameter 0", "greater than zero"),
        ("scaling-laws --dry-run --tuned best.yaml", "write matrix=FILE.yaml,vector=FILE.yaml"),
        ("scaling-laws --dry-run --tuned matrix=nowhere.yaml", "cannot read nowhere.yaml"),
    ],
)
def test_bad_input_is_one_clear_line(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_name_without_a_ratio_is_no_point_of_a_law():
    with pytest.raises(InputError, match="must end in -x20"):
        ratio_of("key_dim-4")
