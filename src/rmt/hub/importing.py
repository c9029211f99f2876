"""Makes a run directory of a transformers folder, or of a parameter tree that the authors' code has saved as npz.

The run can be sampled, evaluated, looked into and exported like any other, and trained on: the weights are there, the
optimizer starts anew.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rmt.config import TrainConfig
from rmt.data.tokenizer import load_tokenizer
from rmt.errors import InputError
from rmt.hub.export import check_is_free
from rmt.hub.folder import RECORD, Loaded, check_vocabulary, load_model
from rmt.hub.reference import from_reference
from rmt.train import checkpoint
from rmt.train.faults import Guard
from rmt.train.run import RunConfig, write_text


def import_folder(folder: str | Path, out: str | Path, tokenizer: str | None = None) -> Path:
    """A transformers folder as a run. The weights keep their bits."""
    if (Path(folder).expanduser() / "config.yaml").is_file():
        raise InputError(f"{folder} is a run already: there is nothing to import.")
    return write_run(load_model(folder, tokenizer=tokenizer), Path(out).expanduser())


def import_authors(file: str | Path, out: str | Path, tokenizer: str | None = None) -> Path:
    """The authors' parameter tree as a run.

    Args:
        file: an npz with one array per parameter under the authors' names, as they are or below `param/`, and `meta`, a
            JSON text with `kind` ("rmt" or "transformer") and `config` (their configuration's fields).
        out: the run directory.
        tokenizer: "gpt2" (what the authors used) or a folder; without it the run cannot read text.
    """
    params, meta = read_npz(Path(file).expanduser())
    try:
        model = from_reference(params, meta)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: its meta lacks or misstates {error}.") from None
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        detail = " ".join(str(error).split())
        raise InputError(f"{file}: its arrays do not fit its configuration ({detail}).") from None
    loaded = Loaded(Path(out), model.eval(), load_tokenizer(tokenizer) if tokenizer else None)
    if loaded.tokenizer_file is not None:
        check_vocabulary(loaded)
    return write_run(loaded, Path(out).expanduser())


def read_npz(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = [name for name in arrays.files if name != "meta"]
            chosen = [name for name in names if name.startswith("param/")] or names
            params = {name: arrays[name] for name in chosen}
            meta = json.loads(str(arrays["meta"]))
    except FileNotFoundError:
        raise InputError(f"there is no file {path}.") from None
    except KeyError:
        raise InputError(f"{path} has no `meta`: add a JSON text with kind and config.") from None
    except (OSError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} is not an npz of arrays with a JSON `meta` ({error}).") from None
    if not isinstance(meta, dict) or not {"kind", "config"} <= meta.keys():
        raise InputError(f"{path}: `meta` must have kind and config.")
    return params, meta


def write_run(loaded: Loaded, out: Path) -> Path:
    check_is_free(out)
    record, model = loaded.record, loaded.model
    train = TrainConfig.from_dict(record.get("train") or {})
    fingerprint = (record.get("data") or {}).get("fingerprint") or ""
    state = {
        "tokens": record.get("tokens") or 0,
        "dev_ce": record.get("dev_ce"),
        "best_dev_ce": record.get("dev_ce"),
        "best": True,
        "evaluation_due": False,
        "guard": Guard().state(),
        "fingerprint": fingerprint,
        "model": model.config.to_dict(),
        "train": train.to_dict(),
    }
    step = record.get("step") or 0
    snapshot = checkpoint.take_snapshot(step, model, torch.optim.AdamW(model.parameters()), state)
    assert snapshot is not None
    try:
        (out / "checkpoints").mkdir(parents=True)
        path = checkpoint.write(out / "checkpoints", snapshot)
        for pointer in ("latest", "best"):
            checkpoint.point(out / "checkpoints", pointer, path)
        if loaded.tokenizer_file is not None:
            loaded.tokenizer_file.save(out)
        write_text(out / RECORD, json.dumps({**record, "step": step}, indent=1) + "\n")
        if record.get("dev_ce") is not None:
            line = {"step": step, "tokens": state["tokens"], "dev_ce": record["dev_ce"]}
            write_text(out / "metrics.jsonl", json.dumps(line) + "\n")
        RunConfig(model.config, train, {"path": "", "fingerprint": fingerprint}).save(out / "config.yaml")
    except OSError as error:
        raise InputError(f"cannot write the run to {out}: {error.strerror or error}.") from None
    return out
