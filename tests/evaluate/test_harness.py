"""lm-evaluation-harness on local files: its numbers are ours, tables carry the paper's, bad input is one line."""

import json
from pathlib import Path

import pytest
import torch

from rmt.cli import main
from rmt.errors import InputError
from rmt.evaluate.perplexity import read_texts, score, text_sequences
from rmt.evaluate.tables import PAPER, ModelResult, cells, markdown, rows
from rmt.hub.folder import load_model

pytest.importorskip("lm_eval")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def loaded(tiny_run):
    return load_model(tiny_run)


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def log_likelihood(loaded, context: str, continuation: str) -> float:
    """The definition: the log-probability of the continuation's tokens, one after another."""
    before = loaded.tokenizer.encode(context).ids
    ids = loaded.tokenizer.encode(context + continuation).ids
    assert ids[: len(before)] == before
    start = max(0, len(ids) - 1 - loaded.model.config.context)
    logits = loaded.model(torch.tensor([ids[start:-1]])).logits[0].log_softmax(-1)
    return sum(logits[place - 1 - start, ids[place]].item() for place in range(len(before), len(ids)))


def compare_with_harness(loaded, texts: list[str]) -> None:
    from lm_eval.api.instance import Instance

    from rmt.evaluate.harness import harness_model

    pairs = [(" ".join(text.split(" ")[:-1]), " " + text.split(" ")[-1]) for text in texts]
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index) for index, pair in enumerate(pairs)
    ]
    theirs = [value for value, _ in harness_model(loaded, batch=8).loglikelihood(requests, disable_tqdm=True)]
    ours = [log_likelihood(loaded, *pair) for pair in pairs]
    assert theirs == pytest.approx(ours, abs=1e-4)


def test_the_harness_sees_the_log_likelihoods_that_the_model_gives(loaded, local):
    texts = [json.loads(line)["text"] for line in (local / "lambada_openai_test.jsonl").read_text().splitlines()]
    compare_with_harness(loaded, texts)


@pytest.mark.slow
def test_fifty_rows_of_lambada_agree_with_the_harness(loaded, shared):
    lines = (shared / "data" / "eval" / "lambada_openai_test.jsonl").read_text().splitlines()[:50]
    compare_with_harness(loaded, [json.loads(line)["text"] for line in lines])


@pytest.mark.slow
def test_the_papers_tasks_run_from_local_files_without_network(tiny_run, exported, local, tmp_path, capsys):
    files = ("--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md"))
    assert main(["eval", str(tiny_run), str(exported), "--local", str(local), "--limit", "2", *files]) == 0
    first, second = json.loads((tmp_path / "r.json").read_text())["models"]
    assert first["tasks"] == second["tasks"]
    assert all(found["samples"] == 2 for found in first["tasks"].values())
    table = (tmp_path / "r.md").read_text()
    for task, metric in PAPER:
        assert f"| {task} | {metric}" in table
    assert "| 61.34 | 25.21 |" in table
    capsys.readouterr()
    assert main(["eval", str(exported), "--tasks", "lambada_openai", "--local", str(local), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)  # nothing of the libraries' is mixed in
    assert found["rows"][0]["paper"] == [61.34, 25.21]


def test_word_perplexity_of_wikitext_is_the_same_by_both_routes(loaded, local):
    both_routes(loaded, local / "wiki.test.raw", local)


@pytest.mark.slow
def test_word_perplexity_of_wiki_test_raw_is_the_same_by_both_routes(loaded, shared):
    folder = shared / "data" / "eval"
    both_routes(loaded, folder / "wiki.test.raw", folder)


def both_routes(loaded, raw: Path, folder: Path) -> None:
    from rmt.evaluate.harness import run_tasks

    ours = score(loaded.model, text_sequences(loaded, read_texts(raw, "wikitext")), batch=32)
    theirs = run_tasks(loaded, ["wikitext"], local=folder, batch=32)["wikitext"]
    assert ours.word_perplexity == pytest.approx(theirs["word_perplexity"], rel=1e-4)
    assert ours.bits_per_byte == pytest.approx(theirs["bits_per_byte"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "lambada_opena"), "there is no task 'lambada_opena'. Did you mean 'lambada_openai'?"),
        (("--tasks", "piqa", "--local", "nowhere"), "there is no folder nowhere"),
        (("--tasks", "piqa", "--local", "{empty}"), "has no piqa_validation.jsonl, the data of task piqa"),
        (("--tasks", "mmlu", "--local", "{empty}"), "mmlu is a group of tasks"),
    ],
)
def test_unknown_tasks_and_missing_files_are_one_line(exported, tmp_path, capsys, arguments, message):
    places = [argument.format(empty=tmp_path) for argument in arguments]
    assert main(["eval", str(exported), *places]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_answer_longer_than_the_context_is_said_in_words(loaded, tmp_path):
    from rmt.evaluate.harness import run_tasks

    line = {"goal": "read", "sol1": "the stream " * 60, "sol2": "write", "label": 1}
    (tmp_path / "piqa_validation.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(InputError, match="reads 48 at once"):
        run_tasks(loaded, ["piqa"], local=tmp_path)


def test_without_network_and_local_files_the_advice_is_to_give_them(loaded, tmp_path, monkeypatch):
    import datasets

    from rmt.evaluate.harness import run_tasks

    def refuse(*_, **__):
        raise ConnectionError("Couldn't reach the hub")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(InputError, match="give --local DIR"):
        run_tasks(loaded, ["piqa"])


def test_the_table_puts_models_side_by_side_and_the_paper_next_to_them():
    one = ModelResult("one", "runs/one", 10, {"book.txt": {"token_perplexity": 12.0}}, {"piqa": {"acc": 0.5}})
    two = ModelResult("two", "runs/two", 12, {}, {"piqa": {"acc": 0.625, "acc_stderr": 0.1, "samples": 50}})
    header, first, *_, last = cells([one, two])
    assert header == ["", "metric", "one", "two", "paper: transformer 405M", "paper: RMT 305M"]
    assert first == ["book.txt", "token_perplexity ↓", "12.00", "–", "–", "–"]
    assert last == ["piqa", "acc ↑", "50.00", "62.50 ± 10", "61.90", "63.70"]
    assert rows([one, two])[-1]["values"] == [50.0, 62.5]
    assert "| piqa | acc ↑ | 50.00 | 62.50 ± 10 | 61.90 | 63.70 |" in markdown([one, two], "note")
