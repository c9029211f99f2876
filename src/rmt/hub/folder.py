"""Reads a model with its tokenizer and its history from a run directory or from a transformers folder.

A transformers folder holds config.json, model.safetensors (or shards with an index), tokenizer.json and, if we wrote
it, rmt.json: where the model comes from. It is read here without transformers, so that `rmt generate` starts quickly
and every damage is one clear line. Pickles are refused: reading one can run code.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rmt.config import ModelConfig
from rmt.data import TokenDataset
from rmt.data.tokenizer import TokenizerFile, from_folder, load_tokenizer, vocabulary_size
from rmt.errors import InputError
from rmt.model import LanguageModel, build
from rmt.train import checkpoint as checkpoints
from rmt.train.run import RunConfig, read_log

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MODEL_TYPE = "rmt"
CONFIG, WEIGHTS, INDEX, RECORD = "config.json", "model.safetensors", "model.safetensors.index.json", "rmt.json"
PREFIXES = ("model.network.", "network.")  # of the names in a folder that RMTForCausalLM or RMTModel has saved
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass
class Loaded:
    """A model read from disk.

    Args:
        path: the run directory or the transformers folder.
        model: the network, in evaluation mode.
        tokenizer_file: its tokenizer, or None where there is none.
        record: where it comes from: step, tokens, losses, FLOPs, data, training settings, command; what is known.
    """

    path: Path
    model: LanguageModel
    tokenizer_file: TokenizerFile | None
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        return self.need_tokenizer().load()

    @property
    def eot(self) -> int:
        """The token that ends a text; also what stands before its first token."""
        found = self.tokenizer.token_to_id(self.need_tokenizer().eot_token)
        assert found is not None  # `TokenizerFile` names a token that is there
        return found

    def need_tokenizer(self) -> TokenizerFile:
        if self.tokenizer_file is None:
            raise InputError(
                f"{self.path} has no tokenizer, and its dataset is not where it was: give --tokenizer gpt2|DIR."
            )
        return self.tokenizer_file


def load_model(
    path: str | Path,
    *,
    checkpoint: str | int = "best",
    tokenizer: str | None = None,
    device: str | torch.device | None = None,
) -> Loaded:
    """The model of a run directory or of a transformers folder, with its tokenizer.

    Args:
        path: the directory.
        checkpoint: of a run: "best" (by the dev loss; the latest where none was measured), "latest" or a step.
        tokenizer: "gpt2" or a folder, instead of the model's own.
        device: default: the CPU.
    """
    folder = Path(path).expanduser()
    if (folder / "config.yaml").is_file():
        loaded = load_run(folder, checkpoint)
    elif (folder / CONFIG).is_file():
        loaded = load_folder(folder)
    elif folder.is_dir():
        raise InputError(f"{path} is neither a run (config.yaml) nor an exported model (config.json).")
    else:
        raise InputError(f"there is no folder {path}. Give a run directory or an exported model.")
    if tokenizer is not None:
        loaded.tokenizer_file = load_tokenizer(tokenizer)
    if loaded.tokenizer_file is not None:
        check_vocabulary(loaded)
    loaded.model.to(device or "cpu").eval()
    return loaded


def check_vocabulary(loaded: Loaded) -> None:
    size, room = vocabulary_size(loaded.tokenizer), loaded.model.config.vocab_size
    if size > room:
        raise InputError(
            f"{loaded.path}: the tokenizer has {size} tokens, the model's vocabulary {room}: they do not belong "
            "together. Give the right one with --tokenizer."
        )


def load_run(run: Path, checkpoint: str | int) -> Loaded:
    config = RunConfig.load(run / "config.yaml")
    chosen = find_checkpoint(run, checkpoint)
    checkpoints.verify(chosen)
    state = checkpoints.read_state(chosen)
    model = fill(config.model, read_tensors(chosen / "model.safetensors"), chosen)
    return Loaded(run, model, run_tokenizer(run, config), run_record(run, config, state))


def find_checkpoint(run: Path, wanted: str | int) -> Path:
    folder = run / "checkpoints"
    known = checkpoints.listing(folder)
    if not known:
        raise InputError(f"{run} has no checkpoint yet.")
    if str(wanted) in ("best", "latest"):
        pointers = ("best", "latest") if wanted == "best" else ("latest",)
        found = (checkpoints.pointed(folder, pointer) for pointer in pointers)
        return next((path for path in found if path is not None), known[-1])
    steps = {int(path.name.removeprefix("step-")): path for path in known}
    try:
        return steps[int(wanted)]
    except (ValueError, KeyError):
        listed = ", ".join(map(str, steps))
        raise InputError(f"{run} has no checkpoint {wanted!r}. It has best, latest and the steps {listed}.") from None


def run_tokenizer(run: Path, config: RunConfig) -> TokenizerFile | None:
    """The tokenizer in the run itself (an imported one), else that of its dataset, if it is still the same dataset."""
    if (run / "tokenizer.json").is_file():
        return from_folder(run)
    data = Path(str(config.data.get("path") or "")).expanduser()
    if not (data / "tokenizer.json").is_file():
        return None
    if TokenDataset.open(data).fingerprint != config.data["fingerprint"]:
        raise InputError(f"{data} is not the dataset that {run} was trained on any more: give --tokenizer gpt2|DIR.")
    return from_folder(data)


def run_record(run: Path, config: RunConfig, state: dict[str, Any]) -> dict[str, Any]:
    """Where a model comes from, as written to rmt.json. An imported run has it from there."""
    if (run / RECORD).is_file() and (imported := read_json(run / RECORD)).get("step") == state["step"]:
        return imported
    losses = [line["ce"] for line in read_log(run) if "ce" in line and line["step"] <= state["step"]]
    try:
        environment = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        environment = {}
    return {
        "step": state["step"],
        "tokens": state.get("tokens"),
        "dev_ce": state.get("dev_ce"),
        "train_ce": losses[-1] if losses else None,
        "data": {"fingerprint": config.data.get("fingerprint")},
        "train": config.train.to_dict(),
        "command": environment.get("command"),
        "versions": environment.get("versions"),
        "git_commit": environment.get("git_commit"),
    }


def load_folder(folder: Path) -> Loaded:
    values = read_json(folder / CONFIG)
    if values.get("model_type") != MODEL_TYPE:
        raise InputError(
            f"{folder} holds a model of type {values.get('model_type')!r}, not {MODEL_TYPE!r}: it is not one of ours."
        )
    known = {item.name for item in dataclasses.fields(ModelConfig)}
    config = ModelConfig.from_dict({name: value for name, value in values.items() if name in known})
    model = fill(config, own_names(read_weights(folder)), folder)
    has_tokenizer = (folder / "tokenizer.json").is_file()
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    return Loaded(folder, model, from_folder(folder) if has_tokenizer else None, record)


def read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} should hold names and values, not a {type(values).__name__}.")
    return values


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a transformers folder, of one file or of several."""
    if (folder / INDEX).is_file():
        files = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
        if odd := [name for name in files if Path(name).name != name]:
            raise InputError(f"{folder / INDEX} names a file outside the folder: {odd[0]!r}.")
    elif (folder / WEIGHTS).is_file():
        files = [WEIGHTS]
    else:
        pickle = next((path for pattern in PICKLES for path in sorted(folder.glob(pattern))), None)
        if pickle is None:
            raise InputError(f"{folder} has no weights: {WEIGHTS} is missing.")
        raise InputError(
            f"{folder} has its weights in {pickle.name}, a pickle, which could run code and is not read: "
            f"convert it to {WEIGHTS}."
        )
    return {name: tensor for file in files for name, tensor in read_tensors(folder / file).items()}


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path} is damaged or incomplete ({error}): copy or export it again.") from None


def own_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    for prefix in PREFIXES:
        if weights and all(name.startswith(prefix) for name in weights):
            return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def fill(config: ModelConfig, weights: dict[str, Tensor], where: Path) -> LanguageModel:
    """The model of a configuration with these weights, in their dtype."""
    model = build(config, device="meta")
    expected = dict(model.named_parameters())
    if odd := sorted(expected.keys() ^ weights.keys()):
        lacks = "its weights lack" if odd[0] in expected else "its weights have, beyond the configuration,"
        raise InputError(f"{where}: {lacks} {odd[0]!r}.")
    for name, parameter in expected.items():
        if parameter.shape != weights[name].shape:
            shapes = f"{list(weights[name].shape)}, the configuration says {list(parameter.shape)}"
            raise InputError(f"{where}: the weights of {name} have shape {shapes}.")
    model.load_state_dict(weights, assign=True)
    return model
