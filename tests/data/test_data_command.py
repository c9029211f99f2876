"""`rmt data` as a person meets it: what it prints, and one line with status 2 when something is wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rmt import cli


@pytest.fixture
def rmt(monkeypatch: Any, capsys: Any) -> Any:
    def call(*arguments: Any) -> tuple[int, str, str]:
        status = cli.main(["data", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    monkeypatch.setitem(cli.COMMANDS, "data", "text -> checksummed token shards (prepare, verify, show)")
    return call


def test_prepare_verify_and_show_work_together(rmt: Any, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, printed, _ = rmt(
        "prepare", text, "--tokenizer", "train:300", "--out", out, "--dev", "0.1", "--workers", "1"
    )
    assert status == 0
    assert "fingerprint" in printed
    status, printed, _ = rmt("verify", out)
    assert (status, "is intact" in printed) == (0, True)
    status, printed, _ = rmt("show", out, "--document", 2, "--characters", 10)
    assert status == 0
    assert "train document 2" in printed
    assert "Document 2…" in printed


def test_results_are_available_as_json(rmt: Any, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, printed, _ = rmt("prepare", text, "--tokenizer", "train:300", "--out", out, "--workers", "1", "--json")
    assert status == 0
    assert json.loads(printed) == json.loads((out / "manifest.json").read_text())
    assert json.loads(rmt("verify", out, "--json")[1])["ok"] is True
    shown = json.loads(rmt("show", out, "--split", "dev", "--json")[1])
    assert shown["manifest"]["format"] == "rmt-tokens"
    assert shown["documents"][0]["text"].startswith("Document")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say what to do: prepare, verify or show"),
        (["prepare", "gone.txt", "--tokenizer", "train:300", "--out", "o"], "there is no file 'gone.txt'"),
        (["prepare", "a.txt", "--tokenizer", "gtp2", "--out", "o"], "Did you mean 'gpt2'?"),
        (["prepare", "a.txt", "--tokenizr", "gpt2", "--out", "o"], "Did you mean '--tokenizer'?"),
        (["prepare", "a.txt", "--tokenizer", "gpt2"], "required"),
        (["prepare", "a.txt", "--tokenizer", "train:300", "--out", "o", "--dev", "2"], "dev share must be"),
        (["prepare", "bad.txt", "--tokenizer", "train:300", "--out", "o", "--strict"], "bad.txt is not valid UTF-8"),
        (["prepare", "empty.txt", "--tokenizer", "train:300", "--out", "o"], "the corpus is empty"),
        (["prepare", "a.jsonl", "--tokenizer", "train:300", "--out", "o"], "a.jsonl line 1 has no field 'text'"),
        (["prepare", "a.txt", "--tokenizer", "train:300", "--out", "a.txt/o"], "cannot write"),
        (["prepare", "a.txt", "--tokenizer", "train:300", "--out", "full"], "full exists"),
        (["verify", "o"], "is not a token dataset"),
        (["show", "o"], "is not a token dataset"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    rmt: Any, tmp_path: Path, monkeypatch: Any, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("some text")
    Path("empty.txt").touch()
    Path("bad.txt").write_bytes(b"\xff")
    Path("a.jsonl").write_text('{"body": "x"}\n')
    Path("full").mkdir()
    Path("full/file").touch()
    status, printed, error = rmt(*arguments)
    lines = [line for line in error.splitlines() if not line.startswith("training a tokenizer")]
    assert status == 2
    assert not printed
    assert len(lines) == 1
    assert message in lines[0]


def test_a_document_that_does_not_exist_is_named(rmt: Any, text: Path, make: Any) -> None:
    out = make(text)
    assert "there is no document 999" in rmt("show", out, "--document", 999)[2]
    assert "there is no split 'dve'" in rmt("show", out, "--split", "dve")[2]


@pytest.mark.parametrize("action", ["prepare", "verify", "show"])
def test_help_teaches_with_examples(rmt: Any, capsys: Any, action: str) -> None:
    with pytest.raises(SystemExit) as end:
        rmt(action, "--help")
    assert end.value.code == 0
    assert f"  rmt data {action} " in capsys.readouterr().out


def test_the_data_pipeline_does_not_import_torch() -> None:
    program = (
        "import sys, rmt.data, rmt.commands.data; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
