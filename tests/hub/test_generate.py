"""`rmt generate`: prompts from everywhere, the same text as transformers, streams, speed, bad input."""

import io
import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from rmt.cli import main

GREEDY = ("--temperature", "0", "--max-tokens", "12")


def run(capsys, *arguments, status=0):
    assert main(["generate", *map(str, arguments)]) == status
    return capsys.readouterr()


def test_greedy_text_from_run_and_folder_equals_that_of_transformers(tiny_run, exported, capsys):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    ids = model.generate(**tokenizer("the stream of", return_tensors="pt"), max_new_tokens=12, do_sample=False)[0]
    expected = tokenizer.decode(ids, skip_special_tokens=True) + "\n"
    for place in (tiny_run, exported):
        assert run(capsys, place, "--prompt", "the stream of", *GREEDY).out == expected
    assert run(capsys, exported, "--prompt", "the stream of", *GREEDY, "--stream").out == expected


def test_a_batch_of_unequal_prompts_gives_what_each_gives_alone(exported, capsys, tmp_path):
    prompts = ["the stream of a token is read", "keys", "every layer"]
    alone = [run(capsys, exported, "--prompt", prompt, *GREEDY).out.strip("\n") for prompt in prompts]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    for source in (("--prompt", *prompts), ("--file", tmp_path / "prompts.txt", "--batch", "2")):
        found = json.loads(run(capsys, exported, *source, *GREEDY, "--json").out)
        assert [(item["prompt"] + item["text"]).strip("\n") for item in found] == alone


def test_prompts_come_from_stdin(exported, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("keys\n"))
    assert run(capsys, exported, *GREEDY).out.startswith("keys")


def test_without_a_prompt_a_person_is_asked(exported, capsys, monkeypatch):
    lines = iter(["the stream", ""])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert run(capsys, exported, *GREEDY).out.startswith("the stream")


def test_the_seed_decides_the_draw_and_speed_goes_to_stderr(exported, capsys):
    options = (exported, "--prompt", "the", "--top-k", "40", "--top-p", "0.95", "--max-tokens", "20")
    first, again, other = (run(capsys, *options, "--seed", seed) for seed in (1, 1, 2))
    assert first.out == again.out != other.out
    assert "tokens/s" in first.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "a", "--temperature", "-1"), "--temperature must be 0 or more"),
        (("--prompt", "a", "--top-p", "2"), "--top-p must be above 0"),
        (("--prompt", "a", "--file", "b"), "not both"),
        (("--file", "nowhere.txt"), "cannot read the prompts"),
        (("--prompt", "the " * 60), "fills the context of 48"),
    ],
)
def test_bad_input_is_one_line(exported, capsys, arguments, message):
    error = run(capsys, exported, *arguments, status=2).err
    assert message in error
    assert error.count("\n") == 1
