"""The report: numbers equal the files, the page is self-contained and safe, bad input is one line."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import yaml

import rmt
from rmt.commands import report as command
from rmt.errors import InputError
from rmt.report import shell
from rmt.report.curves import comparison_figure, loss_curve
from rmt.report.page import write_report
from rmt.report.runs import dev_curve, find_runs, group_runs, load_run, load_runs, smooth
from rmt.report.summary import change, group_row, headline, number, quantity, run_row, saving
from rmt.train.run import RunConfig

STEPS, EVALUATE_EVERY = 60, 10
STEP_SECONDS = {"matrix": 0.02, "vector": 0.01}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def make_run(
    path: Path, stream: str = "matrix", *, seed: int = 0, done: int = STEPS, worse: float = 0.0, **model
) -> Path:
    """A run directory as the trainer leaves it, with losses from a formula."""
    path.mkdir(parents=True)
    config = rmt.preset("rmt-tiny").replace(stream=stream, **model)
    train = rmt.recipe("rmt-tiny").replace(steps=STEPS, seed=seed)
    RunConfig(config, train, {"path": "data", "fingerprint": "f" * 64}).save(path / "config.yaml")
    tokens, seconds = train.batch_size * config.context, STEP_SECONDS.get(stream, 0.015)
    metrics, timing = [], []
    for step in range(1, done + 1):
        ce = 4 + 4 / step + worse + 0.01 * seed
        metrics.append(
            {"step": step, "tokens": step * tokens, "loss": ce + 0.01, "ce": ce, "lr": 0.01, "grad_norm": 1.0}
        )
        if step % EVALUATE_EVERY == 0:
            metrics.append({"step": step, "tokens": step * tokens, "dev_ce": ce + 0.1, "dev_accuracy": 0.2})
        speed = tokens / seconds
        timing.append({"step": step, "seconds": step * seconds, "tokens_per_second": speed, "peak_share": 0.25})
    write_lines(path / "metrics.jsonl", metrics)
    write_lines(path / "timing.jsonl", timing)
    (path / "samples.txt").write_text("=== step 20\nThe Union\n\n=== step 40\nFellow citizens\n\n")
    (path / "environment.json").write_text(json.dumps({"python": "3.11", "machine": {"cores": 2}}))
    return path


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def pair(tmp_path: Path) -> list[Path]:
    return [make_run(tmp_path / "rmt"), make_run(tmp_path / "transformer", "vector", worse=0.2)]


def test_the_table_says_what_the_files_say(pair):
    run = load_run(pair[0])
    row = run_row(run)
    counted = rmt.count(run.config.model)
    assert row["parameters"] == int(counted.params)
    assert row["non_embedding_parameters"] == counted.non_embedding_params
    assert row["training_flops_per_token"] == 3 * int(counted.flops.per_token)
    assert row["dev_loss"] == 4 + 4 / STEPS + 0.1
    assert row["train_loss"] == pytest.approx(4 + 4 / STEPS)  # 2 % of 60 steps: the last one
    assert row["tokens"] == STEPS * run.step_tokens
    assert row["ms_per_step"] == pytest.approx(20.0)
    assert row["tokens_per_second"] == pytest.approx(run.step_tokens / 0.02)
    assert row["peak_share"] == 0.25


def test_smoothing_keeps_a_straight_line_and_skips_nan():
    line = np.linspace(5.0, 1.0, 400)
    assert smooth(line)[:390] == pytest.approx(line[:390])
    assert smooth(np.array([1.0, np.nan, 3.0] * 100))[-1] == pytest.approx(2.0, abs=0.5)
    assert np.isfinite(smooth(np.array([1.0, np.nan, 3.0] * 100))).all()
    assert len(smooth(np.zeros(0))) == 0


def test_the_headline_names_whichever_wins(pair, tmp_path):
    assert headline(group_runs(load_runs(pair)))[0].startswith("The RMT came out ahead: dev loss 4.167")
    bad = make_run(tmp_path / "bad", worse=0.5)
    first, *rest = headline(group_runs(load_runs([bad, pair[1]])))
    assert first.startswith("The transformer came out ahead: dev loss 4.367, against the RMT's 4.667")
    assert "50 % less time per step" in rest[0]


def test_the_saving_is_read_off_the_curve(pair):
    best, other = (dev_curve(group) for group in group_runs(load_runs(pair)))
    # The other ends at 4.367; the better one passes that between step 10 (4.5) and step 20 (4.3), two thirds on.
    shares = saving(best, other)
    assert shares is not None
    assert shares["tokens"][0] == pytest.approx((10 + 10 * (4.5 - 4.1 - 4 / STEPS - 0.2) / 0.2) / STEPS)
    assert shares["time"][0] == pytest.approx(2 * shares["tokens"][0])


def test_seeds_become_one_model_with_a_spread(tmp_path):
    runs = [make_run(tmp_path / f"seed-{seed}", seed=seed) for seed in (0, 1, 2)]
    groups = group_runs(load_runs([*runs, make_run(tmp_path / "other", "vector")]))
    assert [(group.label, len(group.runs)) for group in groups] == [("RMT", 3), ("transformer", 1)]
    row = group_row(groups[0])
    assert row["seeds"] == 3
    assert row["dev_loss"] == pytest.approx(4.11 + 4 / STEPS)
    assert row["dev_loss_deviation"] == pytest.approx(0.01)
    page = write_report([tmp_path], tmp_path / "report.html", title="seeds").read_text()
    assert "4.177 ± 0.010" in page
    assert "Each run" in page


def test_models_of_one_stream_are_told_apart_by_what_differs(tmp_path):
    for key_dim in (8, 16):
        make_run(tmp_path / f"dk-{key_dim}", key_dim=key_dim)
    assert [group.label for group in group_runs(load_runs(find_runs([tmp_path])))] == [
        "RMT (key_dim 8)",
        "RMT (key_dim 16)",
    ]


def test_a_run_in_progress_is_reported(tmp_path):
    started = make_run(tmp_path / "started", done=1)
    half = make_run(tmp_path / "half", "vector", done=25)
    with open(half / "metrics.jsonl", "a") as file:
        file.write('{"step": 26, "tok')
    (started / "timing.jsonl").unlink()
    empty = make_run(tmp_path / "empty", "highway", done=0)
    page = write_report([started, half, empty], tmp_path / "report.html", title="in progress").read_text()
    assert "25 of 60" in page
    assert "No loss to compare yet: highway has none." in page
    assert loss_curve(empty).exists()
    comparison_figure([started, half, empty], tmp_path / "figure")


def test_unfinished_models_are_compared_where_both_have_been(tmp_path):
    runs = [make_run(tmp_path / "rmt", done=25), make_run(tmp_path / "transformer", "vector", done=45, worse=0.1)]
    first, second, *_ = headline(group_runs(load_runs(runs)))
    assert first == "Not finished: the RMT at step 25 of 60 and the transformer at step 45 of 60."
    assert second.endswith("dev loss: the RMT's 4.300 and the transformer's 4.400.")


def test_the_page_loads_nothing(pair, tmp_path):
    page = write_report(pair, tmp_path / "report.html", title="pair").read_text()
    assert page.count("plotly.js v") == 1
    own = page.replace(shell.plotly(), "")
    assert not re.search(r"https?:|<link (?!rel=\"icon\" href=\"data:,\")|<script src|@import|url\(", own)
    assert "default-src 'none'" in own


def test_text_from_files_cannot_become_markup(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    run = make_run(tmp_path / "a<b>&")
    (run / "samples.txt").write_text(f"=== step 1\n{evil}\n\n")
    (run / "environment.json").write_text(json.dumps({evil: evil}))
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["train"]["wandb"] = evil
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    other = make_run(tmp_path / "other")
    page = write_report([run, other], tmp_path / "report.html", title=evil, introduction=evil).read_text()
    assert "alert(1)" in page
    assert "<script>alert(1)" not in page
    assert "<img" not in page.replace(shell.plotly(), "")


def test_data_blocks_hold_json_that_cannot_end_the_script():
    block = shell.data_block("x", {"text": "</script>", "values": [1.0, float("nan")]})
    inside = block.removeprefix('<script type="application/json" id="x">').removesuffix("</script>")
    assert "<" not in inside
    assert json.loads(inside) == {"text": "</script>", "values": [1.0, None]}


def test_a_table_given_replaces_the_computed_one(pair, tmp_path):
    page = write_report(pair, tmp_path / "r.html", title="t", table=[{"model": "mine", "loss": 1.5}]).read_text()
    assert "<td>mine</td>" in page or ">mine</th>" in page
    assert "non-embedding parameters" not in page


def test_figures_are_written_as_png_and_svg(pair, tmp_path):
    assert loss_curve(pair[0]) == pair[0] / "loss.png"
    paths = comparison_figure(pair, tmp_path / "figures" / "loss")
    assert [path.name for path in paths] == ["loss.png", "loss.svg"]
    assert all(path.stat().st_size > 10_000 for path in paths)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda run: shutil.rmtree(run), "there is no run directory .*transformer. Did you mean 'transformer-2'?"),
        (lambda run: (run / "metrics.jsonl").unlink(), "is not a run directory"),
        (lambda run: (run / "metrics.jsonl").write_text("{]\n"), "metrics.jsonl cannot be read"),
        (lambda run: (run / "metrics.jsonl").write_text("3\n"), "metrics.jsonl cannot be read"),
        (lambda run: (run / "metrics.jsonl").write_text('{"ce": "low", "step": 1}\n'), "cannot be read: could not"),
        (lambda run: (run / "config.yaml").write_text("model: 3"), "is not a run's configuration"),
        (lambda run: (run / "environment.json").write_text("{"), "environment.json is not valid JSON"),
    ],
)
def test_a_damaged_run_is_refused_in_one_line(pair, tmp_path, damage, message):
    (tmp_path / "transformer-2").mkdir()
    damage(pair[1])
    with pytest.raises(InputError, match=message) as caught:
        write_report(pair, tmp_path / "report.html", title="pair")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


def test_a_folder_stands_for_the_runs_in_it(pair, tmp_path):
    assert find_runs([tmp_path]) == pair
    assert find_runs([pair[1], tmp_path]) == [pair[1], pair[0]]
    with pytest.raises(InputError, match="is a file"):
        find_runs([pair[0] / "config.yaml"])


def test_the_command_prints_the_table_and_writes_the_page(pair, tmp_path, capsys):
    out, figures = tmp_path / "out" / "page.html", tmp_path / "figures"
    arguments = [*map(str, pair), "--out", str(out), "--figures", str(figures), "--json"]
    command.run(command.parser().parse_args(arguments))
    answer = json.loads(capsys.readouterr().out)
    assert [row["stream"] for row in answer["models"]] == ["matrix", "vector"]
    assert answer["runs"][0] == run_row(load_run(pair[0]))
    assert out.exists()
    assert [Path(path).exists() for path in answer["figures"]] == [True, True]
    command.run(command.parser().parse_args([str(tmp_path), "--out", str(out)]))
    printed = capsys.readouterr().out
    assert "came out ahead" in printed
    assert "dev loss" in printed
    assert "page.html" in printed.replace("\n", "")


def test_numbers_read_well():
    assert [quantity(value) for value in (999, 1500, 1_638_400, 2.5e12, None)] == [
        "999",
        "1.50 k",
        "1.64 M",
        "2.50 T",
        "–",
    ]
    assert [number(value) for value in (0.5, 3.14159, 31.4159, 12345.6)] == ["0.500", "3.14", "31.4", "12346"]
    assert change(0.69, 1.0, "FLOPs", "fewer") == "31 % fewer FLOPs"
    assert change(1.0, 1.0, "time", "less") == "the same time"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_chromium_draws_the_page_without_errors(pair, tmp_path):
    page = write_report(pair, tmp_path / "report.html", title="pair")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    more = "--disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=10000 --dump-dom"
    result = subprocess.run(
        [str(CHROMIUM), *flags.split(), *more.split(), f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    dom = unescape(result.stdout)
    assert "CONSOLE" not in result.stderr, [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    body = dom[dom.index("<body") :]
    drawn = re.findall(
        r'<div class="plot[^"]*" id="([^"]+)"[^>]*>(?:(?!<div class="plot ).)*?class="main-svg"', body, re.S
    )
    assert drawn == ["loss-tokens", "loss-flops", "loss-seconds", "plot-lr", "plot-grad_norm"]
    assert body.count('class="scatterlayer') >= 5
