"""The tiny trained run of the hub's tests, and a few rows of each of the paper's tasks written here."""

import json
from pathlib import Path

import pytest

from hub.conftest import exported, tiny_run  # noqa: F401 -- fixtures

SENTENCES = [
    "the stream of a token is read and written by every layer",
    "keys point to values that every layer has written",
    "a layer is read through keys and values of the stream",
]


@pytest.fixture(scope="session")
def local(tmp_path_factory) -> Path:
    """Data in the names and fields of the official tasks: three documents each."""
    folder = tmp_path_factory.mktemp("local")
    choices = {"text": ["a layer", "a key"], "label": ["A", "B"]}
    rows = {
        "lambada_openai_test": [{"text": text} for text in SENTENCES],
        "arc_easy_test": [{"question": text, "choices": choices, "answerKey": "B"} for text in SENTENCES],
        "arc_challenge_test": [{"question": text, "choices": choices, "answerKey": "A"} for text in SENTENCES],
        "hellaswag_validation": [
            {
                "activity_label": "Reading",
                "ctx_a": text,
                "ctx_b": "it",
                "endings": ["is read", "is a key"],
                "label": "0",
            }
            for text in SENTENCES
        ],
        "piqa_validation": [{"goal": text, "sol1": "read", "sol2": "write", "label": 1} for text in SENTENCES],
        "winogrande_xl_validation": [
            {"sentence": f"{text} so _ is read.", "option1": "a key", "option2": "a value", "answer": "1"}
            for text in SENTENCES
        ],
        "wikitext2_raw_test_documents": [{"page": f" = {text} = \n \n {text} , {text} . \n "} for text in SENTENCES],
    }
    for name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    pages = "\n".join(line["page"] for line in rows["wikitext2_raw_test_documents"])
    (folder / "wiki.test.raw").write_text(f" \n{pages}", encoding="utf-8")
    return folder
