"""Perplexity: equal to sums of log-probabilities computed one token at a time, in both kinds of windows."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rmt.cli import main
from rmt.data import TokenDataset
from rmt.evaluate.loss import split_loss
from rmt.evaluate.perplexity import Sequence, Text, dataset_sequence, read_texts, score, spans, text_sequences
from rmt.hub.folder import load_model


@pytest.fixture(scope="module")
def loaded(tiny_run):
    return load_model(tiny_run)


@given(tokens=st.integers(1, 200), context=st.integers(1, 40), stride=st.integers(1, 40), sliding=st.booleans())
def test_every_token_is_scored_exactly_once_in_windows_no_longer_than_the_context(tokens, context, stride, sliding):
    stride = min(stride, context)
    scored = []
    for start, end, first in spans(tokens, context, "sliding" if sliding else "full", stride):
        assert start <= first < end <= start + context
        scored += range(first, end)
    assert scored == list(range(tokens))


@pytest.mark.parametrize(("window", "stride"), [("full", 48), ("sliding", 7)])
def test_the_score_is_the_sum_of_log_probabilities(loaded, window, stride):
    context, tokens = loaded.model.config.context, np.random.default_rng(0).integers(0, 300, 150)
    found = score(loaded.model, [Sequence(tokens, 30, 400)], window=window, stride=stride, batch=3)
    expected = 0.0
    for place in range(1, len(tokens)):  # predict each token by itself
        window_index = max(0, math.ceil((place - context) / stride))
        start = max(0, min(window_index * stride + context, len(tokens) - 1) - context)
        before = torch.from_numpy(tokens[start:place])[None]
        assert before.shape[1] <= context
        expected -= loaded.model(before).logits[0, -1].log_softmax(-1)[tokens[place]].item()
    assert found.nll == pytest.approx(expected, rel=1e-5)
    assert found.token_perplexity == pytest.approx(math.exp(found.nll / 149))
    assert found.word_perplexity == pytest.approx(math.exp(found.nll / 30))
    assert found.bits_per_byte == pytest.approx(found.nll / 400 / math.log(2))


def test_batches_and_documents_do_not_mix(loaded):
    texts = [Text(text, text) for text in ("the stream", "keys that point to values " * 20, "a")]
    together = score(loaded.model, text_sequences(loaded, texts), batch=8)
    alone = [score(loaded.model, text_sequences(loaded, [text]), batch=1) for text in texts]
    assert together.nll == pytest.approx(sum(one.nll for one in alone), rel=1e-6)
    assert together.tokens == sum(one.tokens for one in alone)
    assert together.bytes == sum(len(text.read) for text in texts)


def test_a_token_dataset_gives_the_loss_that_training_reports(loaded, tiny_run):
    data = tiny_run.parent / "tokens"
    dataset, context = TokenDataset.open(data), loaded.model.config.context
    sequence = dataset_sequence(loaded, data, "dev", None)
    whole = dataset.windows("dev", context) * context + 1  # training leaves out the part of a window at the end
    found = score(loaded.model, [sequence._replace(tokens=sequence.tokens[:whole])])
    assert found.nll / found.tokens == pytest.approx(split_loss(loaded.model, dataset, "dev").ce, rel=1e-5)
    text = "".join(loaded.tokenizer.decode(ids.tolist()) for ids in dataset.documents("dev"))
    assert sequence.bytes == len(text.encode())


def test_jsonl_and_plain_files_are_read_as_documents(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"page": "two"}\n')
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert [text.read for text in read_texts(tmp_path / "a.jsonl")] == ["one", "two"]
    assert [text.read for text in read_texts(tmp_path / "a.txt")] == ["one\ntwo\n"]


def test_the_command_writes_json_and_markdown_for_several_models(tiny_run, exported, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the stream of a token is read")
    files = ("--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md"))
    data = ("--data", str(tiny_run.parent / "tokens"), "--text", str(tmp_path / "text.txt"))
    assert main(["eval", str(tiny_run), str(exported), *data, *files, "--window", "sliding"]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert [model["name"] for model in result["models"]] == ["run", "exported"]
    assert result["models"][0]["perplexity"] == result["models"][1]["perplexity"]
    assert "| tokens | token_perplexity ↓ |" in (tmp_path / "r.md").read_text()
    assert "bits_per_byte" in capsys.readouterr().out
    assert main(["eval", str(exported), *data, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["window"] == "full"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--text", "nowhere.txt"), "there is no file nowhere.txt"),
        (("--text", "{file}", "--window", "slide"), "Did you mean 'sliding'"),
        (("--text", "{file}", "--window", "sliding", "--stride", "99"), "longer than the context"),
        (("--text", "{file}", "--limit", "0"), "--limit must be at least 1"),
        (("--data", "{folder}"), "manifest.json"),
        (("--text", "{empty}"), "no text to score"),
        (("--text", "{bad}"), "bad.jsonl, line 1"),
    ],
)
def test_bad_input_is_one_line(exported, tmp_path, capsys, arguments, message):
    for name, text in (("file", "some text"), ("empty", "")):
        (tmp_path / name).write_text(text)
    (tmp_path / "bad.jsonl").write_text('{"words": 1}\n')
    places = {name: tmp_path / name for name in ("file", "empty")} | {"folder": tmp_path, "bad": tmp_path / "bad.jsonl"}
    assert main(["eval", str(exported), *(argument.format(**places) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
