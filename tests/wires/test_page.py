"""The page and the command: files, numbers and messages; and Chromium, which draws the page and answers to clicks."""

import base64
import json
import re
import shutil
import subprocess
from html import unescape

import numpy as np
import pytest
import torch

import rmt
from rmt.commands import wiring as command
from rmt.errors import InputError
from rmt.report import shell
from rmt.train.loop import train
from rmt.wires.findings import Findings
from rmt.wires.load import load
from rmt.wires.page import packed, write_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TEXT = "the dog </script> sat on the mat"  # a text must not be able to end a script


def start(*arguments):
    command.run(command.parser().parse_args([str(argument) for argument in arguments]))


@pytest.fixture(scope="module")
def page(run, tmp_path_factory):
    """The page of the trained run, with a text and a ranking."""
    out = tmp_path_factory.mktemp("page")
    data = run.parent / "tokens"
    start(run, "--text", TEXT, "--data", data, "--tokens", 128, "--rank", 4, "--out", out, "--json")
    return out / "wiring.html"


def page_values(page):
    block = re.search(r'<script type="application/json" id="wiring-data">(.*?)</script>', page.read_text(), re.S)
    return json.loads(block[1])


def unpacked(value):
    numbers = np.frombuffer(base64.b64decode(value["data"]), dtype="<i2")
    return (numbers * value["factor"]).reshape(value["shape"])


def test_the_command_writes_its_files_and_prints_what_they_say(run, tmp_path, capsys):
    start(run, "--out", tmp_path / "a", "--json")
    answer = json.loads(capsys.readouterr().out)
    table = rmt.wiring(rmt.load_model(run).model)
    assert (answer["reads"], answer["writes"]) == table.raw.shape
    first = answer["top"][0]
    assert abs(first["normalised"]) == pytest.approx(np.abs(table.normalised).max())
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {f"wiring.{kind}" for kind in ("html", "png", "svg", "npz", "csv")} | {"load.png", "load.svg"}
    assert len(answer["load"]) == 5
    start(run, "--out", tmp_path / "a", "--top", 3)
    printed = " ".join(capsys.readouterr().out.split())
    assert first["read"] in printed
    assert f"{first['normalised']:+.3f}" in printed


def test_cuts_are_measured_and_reported(run, tmp_path, capsys):
    data = run.parent / "tokens"
    edges = ("unembedding <- layer1.ff", "layer0.head0.query <- position")
    start(run, "--out", tmp_path, "--data", data, "--tokens", 128, "--cut", *edges, "--json")
    _, tokens, effects = json.loads(capsys.readouterr().out)["cuts"]
    assert tokens == 128
    assert [effect["edges"] for effect in effects] == [*edges, "all of these"]
    assert f"{effects[0]['change']:+.5f}" in (tmp_path / "wiring.html").read_text()
    assert (tmp_path / "cuts.png").stat().st_size > 5_000


def test_the_page_holds_the_numbers_of_the_model(run, page):
    values, table = page_values(page), rmt.wiring(rmt.load_model(run).model)
    np.testing.assert_allclose(unpacked(values["normalised"]), table.normalised, atol=2e-5)
    np.testing.assert_allclose(unpacked(values["text"]["shares"]).sum(1), 1, atol=2e-2)
    assert "".join(values["text"]["tokens"][1:]).strip() == TEXT
    stored = np.load(page.with_name("text.npz"))
    seen = stored["attribution_predicted"].sum(1)
    np.testing.assert_allclose(np.sum(values["text"]["attribution"]["predicted"], axis=1), seen, atol=1e-2)
    assert [row["step"] for row in values["history"]] == [20, 40, 60]
    assert stored["share"].shape == (len(stored["tokens"]), *table.raw.shape)
    np.testing.assert_allclose(stored["share"].sum(-1), 1, atol=1e-3)


def test_packing_keeps_four_digits():
    values = np.random.default_rng(0).normal(size=(5, 7))
    np.testing.assert_allclose(unpacked(packed(values)), values, atol=1e-4)
    assert (unpacked(packed(np.zeros((2, 2)))) == 0).all()


def test_the_page_loads_nothing_and_text_stays_text(page):
    own = page.read_text().replace(shell.plotly(), "")
    assert not re.search(r"https?:|<script src|@import|url\(", own)
    assert own.count("</script>") == own.count("<script")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--level", "head"], "Did you mean 'heads'"),
        (["--cut", "layer0.ff <- token"], "give --data"),
        (["--text", ""], "the text is empty"),
        (["--text", "cat " * 99], "shorten it"),
        (["--tokens", "0"], "at least 1"),
        (["--composition"], "composition scores are of transformers"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        start(run, "--out", tmp_path, *arguments)
    assert "\n" not in str(caught.value)


def test_a_transformer_gets_a_message_and_composition_scores(run, tmp_path, capsys):
    settings = rmt.TrainConfig(steps=1, batch_size=2, eval_tokens=32, sample_every=0, tensorboard=False)
    config = rmt.load_model(run).model.config.replace(stream="vector")
    train(config, settings, run.parent / "tokens", tmp_path / "transformer")
    capsys.readouterr()
    with pytest.raises(InputError, match=r"wiring is for matrix streams.*--composition"):
        start(tmp_path / "transformer", "--out", tmp_path / "out")
    start(tmp_path / "transformer", "--out", tmp_path / "out", "--composition", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert answer["top"][0]["read"].startswith("layer1.")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"composition.csv", "composition.png", "composition.svg"}


@pytest.mark.slow
def test_the_page_of_the_largest_preset_is_small(tmp_path):
    model = rmt.build(rmt.preset("rmt-305m"), device="meta")
    model.stream.to_empty(device="cpu")
    for parameter in model.stream.parameters():
        torch.nn.init.normal_(parameter)
    table = rmt.wiring(model)
    page = write_page(Findings("large", None, table, load(table)), tmp_path / "wiring.html")
    assert page.stat().st_size < 15e6


#: Clicks as a person does: on a cell of the layers map, on a row of the heads map, on "text", on a token.
CLICKS = """
window.addEventListener("load", () => setTimeout(async () => {
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const log = [];
  const note = () => log.push(["map-title", "heads-title", "sources-title", "token-title"].map(
    (id) => document.getElementById(id).textContent).join(" | "));
  async function clickCell(id, column, row) {
    const plot = document.getElementById(id), area = plot.querySelector(".nsewdrag");
    const { xaxis, yaxis } = plot._fullLayout, box = plot.getBoundingClientRect();
    const clientX = box.left + xaxis._offset + xaxis.d2p(column), clientY = box.top + yaxis._offset + yaxis.d2p(row);
    const place = { clientX, clientY, bubbles: true };
    area.dispatchEvent(new MouseEvent("mousemove", place)); await wait(300);
    area.dispatchEvent(new MouseEvent("mousedown", place));
    document.dispatchEvent(new MouseEvent("mouseup", place)); await wait(300);
  }
  note();
  await clickCell("map-layers", 1, 3); note();
  await clickCell("map-heads", 2, 1); note();
  document.querySelector('[data-view="text"]').click(); await wait(100); note();
  document.querySelectorAll("#tokens button")[2].click(); await wait(100); note();
  const out = document.createElement("pre");
  out.id = "clicked"; out.textContent = JSON.stringify(log);
  document.body.append(out);
}, 500));
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_chromium_draws_the_page_and_answers_to_clicks(page, tmp_path):
    clicked = tmp_path / "clicked.html"
    clicked.write_text(page.read_text().replace("</body>", f"<script>{CLICKS}</script></body>"))
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    more = "--disable-component-update --disable-sync --enable-logging=stderr --virtual-time-budget=15000 --dump-dom"
    size = "--window-size=1300,3000"
    result = subprocess.run(
        [str(CHROMIUM), *flags.split(), *more.split(), size, f"--user-data-dir={tmp_path / 'chr'}", clicked.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "CONSOLE" not in result.stderr, [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    log = json.loads(unescape(re.search(r'<pre id="clicked">(.*?)</pre>', result.stdout, re.S)[1]))
    first, on_cell, on_row, on_text, on_token = (line.split(" | ") for line in log)
    assert first[0] == "Layers: fit of keys"
    assert on_cell[1] == "Heads: what layer1.ff reads"
    assert on_cell[2] == "Sources of layer1.ff.slot0"
    assert on_row[2] == "Sources of layer1.ff.slot1"
    assert on_text[0] == "Layers: shares over the whole text"
    assert on_token[0].startswith("Layers: shares at token 2")
    assert on_token[3].startswith("After ")
    for plot in ("map-layers", "map-heads", "sources", "attribution", "plot-load", "plot-history", "plot-crosstalk"):
        drawn = result.stdout.split(f'id="{plot}"', 1)[1].split('class="main-svg"', 1)
        assert len(drawn) == 2, plot
        assert len(drawn[0]) < 3000, plot
