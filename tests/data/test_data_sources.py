"""What can be read, and what is said when it cannot."""

import builtins
import gzip
import io
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rmt.data.pieces as pieces_module
import rmt.data.sources as sources_module
from rmt.data import TokenDataset, prepare
from rmt.data.pieces import document_pieces, text_pieces
from rmt.data.sources import Corpus, find_sources
from rmt.errors import InputError


def texts(*names: Any, **options: Any) -> list[str]:
    return [piece.text.decode() for piece in Corpus(find_sources(names), **options).pieces()]


def test_a_separator_line_ends_a_document_and_takes_its_line_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n<|endoftext|>\ntwo\r\n<|endoftext|>\r\nthree <|endoftext|> still\n\n<|endoftext|> \nfour\n")
    assert texts(path) == ["one", "two", "three <|endoftext|> still\n", "four\n"]


def test_a_file_without_separators_is_one_document_and_empty_ones_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("line\nline\n")
    (tmp_path / "b.txt").write_text("<|endoftext|>\n\n \n<|endoftext|>\n<|endoftext|>\nb\n<|endoftext|>")
    (tmp_path / "c.txt").write_text("")
    assert texts(tmp_path) == ["line\nline\n", "b"]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello", encoding="utf-8-sig")
    assert texts(tmp_path / "a.txt") == ["hello"]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["<|endoftext|>", "\n", "a", "\r\n", " ", "é", "\n<|endoftext|>\n", "bb\n"]), max_size=30),
    st.integers(1, 40),
)
def test_documents_do_not_depend_on_how_the_file_is_read(parts: list[str], block: int) -> None:
    data = "".join(parts).encode()
    expected = list(text_pieces(io.BytesIO(data)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "BLOCK", max(block, 20))  # longer than a separator line
        assert list(text_pieces(io.BytesIO(data))) == expected


@settings(deadline=None)
@given(st.text(alphabet="ab \n\té漢", max_size=400))
def test_a_long_document_is_cut_into_bounded_sections_that_join_to_the_same_text(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SECTION": 60, "LONG_DOCUMENT": 20, "LOOK_BACK": 15}.items():
            patch.setattr(pieces_module, name, value)
        found = list(document_pieces(text.encode()))
    assert b"".join(piece.text for piece in found) == text.encode()
    assert all(len(piece.text) < 80 for piece in found)
    assert [piece.first for piece in found] == [True] + [False] * (len(found) - 1)
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
    for piece in found:
        piece.text.decode()  # never cut inside a character


def test_memory_does_not_grow_with_a_file_that_is_one_endless_line() -> None:
    class Endless(io.RawIOBase):
        left = 200 << 20

        def read(self, size: int = -1) -> bytes:
            size = min(size, self.left)
            self.left -= size
            return b"x" * size

        def readline(self, size: int | None = -1) -> bytes:
            return self.read(size or 0)

    sizes = [len(piece.text) for piece in text_pieces(Endless())]  # type: ignore[arg-type]
    assert sum(sizes) == 200 << 20
    assert max(sizes) < 4 << 20


def test_jsonl_plain_and_compressed_give_the_same_documents(tmp_path: Path, jsonl: Any) -> None:
    zstandard = pytest.importorskip("zstandard")
    plain = jsonl({"text": "eins"}, {"text": None}, {"text": "zwei\nline"}, {"text": "\u2028 drei"})
    data = plain.read_bytes() + b"\n"
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(data[:20]) + gzip.compress(data[20:]))
    frames = zstandard.ZstdCompressor()
    (tmp_path / "c.jsonl.zst").write_bytes(frames.compress(data[:20]) + frames.compress(data[20:]))
    for path in (plain, tmp_path / "b.jsonl.gz", tmp_path / "c.jsonl.zst"):
        assert texts(path) == ["eins", "zwei\nline", "\u2028 drei"]


def test_text_may_be_compressed_too(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n<|endoftext|>\ntwo"))
    assert texts(tmp_path / "a.txt.gz") == ["one", "two"]


def test_parquet_is_read_by_column(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["eins", None, "zwei"], "n": [1, 2, 3]}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet", field="body") == ["eins", "zwei"]
    with pytest.raises(InputError, match=r"a.parquet has no column 'bod'.*'body'"):
        texts(tmp_path / "a.parquet", field="bod")
    with pytest.raises(InputError, match="not text but int"):
        texts(tmp_path / "a.parquet", field="n")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(InputError, match=r"cannot read .*b.parquet as parquet"):
        texts(tmp_path / "b.parquet")


def test_a_folder_is_read_recursively_in_sorted_order_by_known_endings(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/1.TXT", "c.md", "ignored.png", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a/1.TXT", "b/2.txt", "c.md"]


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file with a known ending"):
        find_sources([tmp_path])


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").touch()
    with pytest.raises(InputError, match=r"no file '.*corpsu.txt'\. Did you mean 'corpus.txt'\?"):
        find_sources([tmp_path / "corpsu.txt"])


def test_jsonl_without_the_field_names_file_line_and_nearest_field(jsonl: Any) -> None:
    path = jsonl({"text": "a"}, {"txt": "b"})
    with pytest.raises(InputError, match=r"corpus.jsonl line 2 has no field 'text': .*--field.*'txt'"):
        texts(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2 is not valid JSON"), ("[1]", "line 2 is not a JSON object"), ('{"text": 3}', "not text but int")],
)
def test_a_bad_line_of_jsonl_is_named(jsonl: Any, line: str, message: str) -> None:
    path = jsonl({"text": "a"})
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InputError, match=message):
        texts(path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
def test_a_compressed_file_that_was_cut_off_or_is_no_such_file_is_refused(tmp_path: Path, name: str) -> None:
    zstandard = pytest.importorskip("zstandard")
    data = b" ".join(str(n * n).encode() for n in range(5000))
    packed = gzip.compress(data) if name.endswith("gz") else zstandard.ZstdCompressor().compress(data)
    for content in (packed[: len(packed) // 2], b"this is not compressed"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=rf"cannot read .*{name}"):
            texts(tmp_path / name)


def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path, make: Any, documents: Any) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("good \ufffd ".encode() + b"bad \xff\xfe bad \xe2\x82")
    manifest = TokenDataset.open(make(path, dev=0)).manifest
    assert manifest["invalid_sequences"] == 3  # the U+FFFD that was written as such is text
    assert documents(tmp_path / "out") == ["good \ufffd bad \ufffd\ufffd bad \ufffd"]


def test_invalid_utf8_is_refused_when_strict(tmp_path: Path, jsonl: Any) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\nbad \xff")
    with pytest.raises(InputError, match=r"a.txt is not valid UTF-8 \(byte 0xff"):
        texts(tmp_path / "a.txt", strict=True)
    (tmp_path / "b.jsonl").write_bytes(b'{"text": "good"}\n{"text": "bad \xff"}\n')
    with pytest.raises(InputError, match=r"b.jsonl line 2 is not valid UTF-8"):
        texts(tmp_path / "b.jsonl", strict=True)
    with pytest.raises(InputError, match="surrogate"):
        texts(jsonl({"text": "half \ud83d"}), strict=True)


def test_half_a_surrogate_pair_in_json_is_replaced_and_counted(jsonl: Any) -> None:
    corpus = Corpus(find_sources([jsonl({"text": "half \ud83d, whole \U0001f600"})]))
    assert [piece.text.decode() for piece in corpus.pieces()] == ["half \ufffd, whole \U0001f600"]
    assert corpus.sources[0].invalid == 1


def test_standard_input_is_a_source(make: Any, documents: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"one\n<|endoftext|>\ntwo")))
    assert documents(make("-", dev=0)) == ["one", "two"]


def hub_with(monkeypatch: Any, load_dataset: Any) -> None:
    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr(sources_module, "require_hub", lambda what, advice: None)


def test_a_dataset_of_the_hub_is_streamed(monkeypatch: Any) -> None:
    asked: list[Any] = []

    def load_dataset(*names: Any, **options: Any) -> Any:
        asked.append((names, options))
        return ({"text": f"document {n}"} for n in range(3))

    hub_with(monkeypatch, load_dataset)
    assert texts("wikitext:wikitext-103-raw-v1") == ["document 0", "document 1", "document 2"]
    assert asked == [(("wikitext", "wikitext-103-raw-v1"), {"split": "train", "streaming": True})]
    with pytest.raises(InputError, match="no column 'body'"):
        texts("some/name", field="body")


def test_a_dataset_that_the_hub_does_not_have_is_one_line(monkeypatch: Any) -> None:
    def load_dataset(*names: Any, **options: Any) -> Any:
        raise FileNotFoundError("no dataset of this name\nand a second line")

    hub_with(monkeypatch, load_dataset)
    with pytest.raises(InputError, match=r"cannot read 'nosuch', neither a path nor .*: no dataset of this name$"):
        texts("nosuch")


def test_no_network_is_said_in_one_line(monkeypatch: Any) -> None:
    import urllib.request

    def no_network(*args: Any, **kwargs: Any) -> Any:
        raise OSError("Name or service not known")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=None))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "urlopen", no_network)
    with pytest.raises(
        InputError, match=r"no file or folder 'openwebtext', and the Hugging Face hub cannot be reached"
    ):
        texts("openwebtext")


@pytest.mark.parametrize(
    ("library", "name"), [("datasets", "openwebtext"), ("pyarrow", "a.parquet"), ("zstandard", "a.txt.zst")]
)
def test_a_missing_optional_library_says_what_to_install(
    tmp_path: Path, monkeypatch: Any, library: str, name: str
) -> None:
    really_import = builtins.__import__

    def without(wanted: str, *args: Any, **kwargs: Any) -> Any:
        if wanted.partition(".")[0] == library:
            raise ImportError(wanted)
        return really_import(wanted, *args, **kwargs)

    monkeypatch.chdir(tmp_path)
    if name != "openwebtext":
        (tmp_path / name).write_bytes(b"x")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'residual-matrix-transformer\[data\]'"):
        texts(name)


def test_nothing_given_and_nothing_in_it_are_refused(tmp_path: Path, jsonl: Any) -> None:
    with pytest.raises(InputError, match="no sources"):
        prepare([], "train:300", tmp_path / "out")
    (tmp_path / "blank.txt").write_text("\n \n")
    for path in (tmp_path / "blank.txt", jsonl({"text": ""})):
        for dev in (0, 0.1):
            with pytest.raises(InputError, match="the corpus is empty"):
                prepare([path], "train:300", tmp_path / "out", dev=dev)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


def test_manifest_counts_what_each_source_gave(tmp_path: Path, jsonl: Any, make: Any) -> None:
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo")
    manifest = json.loads((make(tmp_path / "a.txt", jsonl({"text": "drei"}), dev=0) / "manifest.json").read_text())
    assert [(source["documents"], source["bytes"]) for source in manifest["sources"]] == [(2, 6), (1, 4)]
    assert (manifest["documents"], manifest["bytes"]) == (3, 10)
