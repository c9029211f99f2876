"""Writes a model as a folder that transformers reads: weights, configuration, tokenizer, model card, provenance.

The folder appears whole or not at all: it is written under a temporary name beside its place and renamed.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from transformers.generation import GenerationConfig

from rmt.errors import InputError, suggest
from rmt.hub.card import model_card
from rmt.hub.folder import RECORD, Loaded
from rmt.hub.modeling import RMTForCausalLM
from rmt.hub.with_code import write_code

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    loaded: Loaded, out: str | Path, *, dtype: str | None = None, with_code: bool = False, shard_size: str = "5GB"
) -> Path:
    """Write `loaded` to the folder `out`, which must be new or empty.

    Args:
        loaded: from `load_model`.
        out: the folder.
        dtype: of the weights: float32, bfloat16 or float16 (default: as they are).
        with_code: add the modelling code, for people who do not have this package.
        shard_size: largest weight file.
    """
    out = Path(out).expanduser()
    check_is_free(out)
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"there is no dtype {dtype!r}. {suggest(dtype, DTYPES)}")
    tokenizer = loaded.need_tokenizer()
    model = adapter(loaded)
    if dtype is not None:
        loaded.model.to(DTYPES[dtype])  # the adapter holds the same parameters
        model.config.dtype = DTYPES[dtype]
    temporary = out.with_name(f".{out.name}-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary, max_shard_size=shard_size)
        tokenizer.save(temporary)
        complete_tokenizer_config(temporary / "tokenizer_config.json", loaded)
        if with_code:
            write_code(temporary)
        (temporary / RECORD).write_text(json.dumps(loaded.record, indent=1) + "\n", encoding="utf-8")
        (temporary / "README.md").write_text(model_card(loaded, out.resolve().name, with_code), encoding="utf-8")
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def check_is_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already: choose another folder, or remove it first.")


def adapter(loaded: Loaded) -> RMTForCausalLM:
    """The model as transformers sees it, with the tokens of its tokenizer."""
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), loaded.eot)
    model = RMTForCausalLM.from_language_model(loaded.model, **tokens)
    model.generation_config = GenerationConfig(**tokens)
    return model


def complete_tokenizer_config(path: Path, loaded: Loaded) -> None:
    """What batches need: a padding token, padding on the left, and the longest input."""
    values = json.loads(path.read_text(encoding="utf-8"))
    values |= {
        "pad_token": loaded.need_tokenizer().eot_token,
        "padding_side": "left",
        "model_max_length": loaded.model.config.context,
    }
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
