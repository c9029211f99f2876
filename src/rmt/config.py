"""Every setting of a model and of a training run, as frozen dataclasses that check themselves.

`ModelConfig` says what the network is, `TrainConfig` how it is trained. Both are validated when they are made, with
messages that name the field and the fix, are changed by `replace()`, and go to YAML and back. This file imports no
torch, so that the command line can read configurations quickly.

At the end stand the presets: the paper's eight models with their batch sizes and token budgets, a modern pair, and a
tiny pair for the demo. A preset is a `ModelConfig` (`preset(name)`) and the `TrainConfig` it is trained with
(`recipe(name)`). Where the paper's tables contradict its own parameter counts, these are the dimensions that fit the
counts (docs/errata.md).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, get_args, get_type_hints

import yaml

from rmt.errors import InputError, suggest
from rmt.streams import STREAMS

Norm = Literal["layernorm", "rmsnorm"]
NormGain = Literal["none", "value", "full"]
Position = Literal["learned", "alibi", "rope"]
FeedForward = Literal["gelu", "swiglu"]
Init = Literal["lecun", "xavier", "mup"]
OnNaN = Literal["stop", "skip"]
Parallel = Literal["fsdp", "ddp"]
Precision = Literal["auto", "float32", "bfloat16"]
Recompute = Literal["none", "gelu", "ff", "full"]
Ops = Literal["auto", "plain", "portable", "native", "triton"]

HYPER_STREAMS = ("hyper", "hyper_dynamic", "mhc")


class Settings:
    """What all configurations share: checked construction from plain data, `replace`, YAML both ways."""

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed. Unknown names are refused with the nearest known one."""
        known = {item.name for item in dataclasses.fields(self)}  # type: ignore[arg-type]
        for name in changes:
            if name not in known:
                raise InputError(f"{type(self).__name__} has no field {name!r}. {suggest(name, known)}")
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        known = {item.name: item for item in dataclasses.fields(cls)}  # type: ignore[arg-type]
        kinds = get_type_hints(cls)
        arguments = {}
        for name, value in values.items():
            if name not in known:
                raise InputError(f"{cls.__name__} has no field {name!r}. {suggest(name, known)}")
            kind = kinds[name]
            if isinstance(kind, type) and issubclass(kind, Settings) and isinstance(value, dict):
                value = kind.from_dict(value)
            arguments[name] = value
        return cls(**arguments)

    def to_yaml(self, path: str | Path | None = None) -> str:
        text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_yaml(cls, source: str | Path) -> Self:
        """From a file (a `Path`, or a string that ends in .yaml or .yml) or from YAML text."""
        is_file = isinstance(source, Path) or source.endswith((".yaml", ".yml"))
        values = read_yaml(Path(source)) if is_file else yaml.safe_load(str(source))
        if not isinstance(values, dict):
            raise InputError(f"{cls.__name__}: expected `name: value` lines, got {type(values).__name__}.")
        return cls.from_dict(values)

    def _refuse(self, name: str, problem: str) -> None:
        raise InputError(f"{type(self).__name__}.{name} = {getattr(self, name)!r}: {problem}")

    def _check_positive(self, *names: str, zero_allowed: bool = False, kind: type = int) -> None:
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            numeric = isinstance(value, int | float) and not isinstance(value, bool)
            if not numeric or not math.isfinite(value) or (kind is int and int(value) != value):
                self._refuse(name, f"must be {'a whole' if kind is int else 'a finite'} number.")
            if value < 0 or (value == 0 and not zero_allowed):
                self._refuse(name, f"must be {'zero or more' if zero_allowed else 'greater than zero'}.")

    def _check_choice(self, name: str, options: tuple[str, ...]) -> None:
        if getattr(self, name) not in options:
            self._refuse(name, suggest(str(getattr(self, name)), options))


def read_yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None


@dataclass(frozen=True, kw_only=True)
class MuP(Settings):
    """muTransfer: base dimensions and global multipliers. A base of None leaves that dimension unscaled (ratio 1).

    Args:
        base_heads: heads of the model on which the hyperparameters were tuned.
        base_head_dim: its head dimension.
        base_key_dim: its key dimension (matrix stream).
        base_width: its width (vector streams; None: base_heads * base_head_dim).
        base_ff_dim: its feed-forward neurons.
        sigma: global standard deviation of the initial values.
        alpha_in: multiplier of the embeddings.
        alpha_attn: multiplier of the attention logits.
        alpha_out: multiplier of the output logits.
        zero_query: start the query weights at zero, so that attention starts uniform.
        zero_unembedding: start the unembedding at zero, so that the model starts with uniform predictions.
    """

    base_heads: int | None = None
    base_head_dim: int | None = None
    base_key_dim: int | None = None
    base_width: int | None = None
    base_ff_dim: int | None = None
    sigma: float = 1.0
    alpha_in: float = 1.0
    alpha_attn: float = 1.0
    alpha_out: float = 1.0
    zero_query: bool = False
    zero_unembedding: bool = True

    def __post_init__(self) -> None:
        self._check_positive("base_heads", "base_head_dim", "base_key_dim", "base_width", "base_ff_dim")
        self._check_positive("sigma", "alpha_in", "alpha_attn", "alpha_out", kind=float)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Settings):
    """What the network is. The defaults are the paper's 134M model (`rmt-134m`).

    Args:
        stream: the residual stream: matrix (the RMT), vector (the transformer), or a rival.
        layers: number of layers, each one attention and one feed-forward core.
        heads: attention heads; also the number of vectors that a matrix stream stores and retrieves at once.
        head_dim: dimension of a head; also the value dimension of a matrix stream.
        kv_heads: key and value heads (None: as many as heads); fewer is grouped-query attention.
        key_dim: key dimension of the matrix stream: the residual stream holds key_dim * head_dim numbers per token.
        width: residual width of a vector stream (None: heads * head_dim).
        ff_dim: feed-forward neurons.
        vocab_size: number of token ids.
        context: longest sequence.
        norm: normalisation before each read.
        norm_eps: its epsilon.
        norm_gain: learned gain of the norm: none, value (one per value index) or full (one per entry of the stream).
        position: learned table, ALiBi biases or rotary embedding.
        rope_theta: base wavelength of the rotary embedding.
        ff: gelu (two matrices, tanh form) or swiglu (three).
        qk_norm: RMS-normalise queries and keys, with a learned gain per head dimension.
        inverse_layer_scaling: divide the attention logits of layer l (from 0) by l + 1.
        value_residual: mix the first layer's attention values into every later layer's, with two learned weights each.
        hyper_streams: parallel residual vectors of the hyper, hyper_dynamic and mhc streams.
        residual_blocks: blocks into which attention_residual_block gathers the outputs of the 2 * layers cores.
        init: initial values: lecun (1 / fan in), xavier (2 / (fan in + fan out)) or mup.
        mup: base dimensions and multipliers, used with `init: mup`.
        z_loss: coefficient of the squared log-partition in the training loss.
    """

    stream: str = "matrix"
    layers: int = 12
    heads: int = 12
    head_dim: int = 64
    kv_heads: int | None = None
    key_dim: int = 32
    width: int | None = None
    ff_dim: int = 3072
    vocab_size: int = 50257
    context: int = 512
    norm: Norm = "layernorm"
    norm_eps: float = 1e-6
    norm_gain: NormGain = "full"
    position: Position = "learned"
    rope_theta: float = 10_000.0
    ff: FeedForward = "gelu"
    qk_norm: bool = False
    inverse_layer_scaling: bool = True
    value_residual: bool = False
    hyper_streams: int = 4
    residual_blocks: int = 8
    init: Init = "lecun"
    mup: MuP = field(default_factory=MuP)
    z_loss: float = 1e-4

    def __post_init__(self) -> None:
        self._check_positive("layers", "heads", "head_dim", "kv_heads", "key_dim", "width", "ff_dim")
        self._check_positive("vocab_size", "context", "hyper_streams", "residual_blocks")
        self._check_positive("norm_eps", "rope_theta", kind=float)
        self._check_positive("z_loss", zero_allowed=True, kind=float)
        self._check_choice("stream", tuple(STREAMS))
        for name, options in (("norm", Norm), ("norm_gain", NormGain), ("position", Position)):
            self._check_choice(name, get_args(options))
        for name, options in (("ff", FeedForward), ("init", Init)):
            self._check_choice(name, get_args(options))
        if self.kv_heads is not None and self.heads % self.kv_heads:
            self._refuse("kv_heads", f"must divide heads = {self.heads}, so that each serves as many query heads.")
        if self.stream == "matrix" and self.width is not None:
            self._refuse("width", "a matrix stream has no width; set key_dim, or leave width unset.")
        if self.position == "rope" and self.head_dim % 2:
            self._refuse("head_dim", "rotary positions turn pairs of numbers; use an even head_dim.")

    @property
    def model_dim(self) -> int:
        """Features that the embedding, the feed-forward core and the unembedding work on."""
        return self.width if self.width is not None else self.heads * self.head_dim

    @property
    def stream_size(self) -> int:
        """Numbers per token in the residual stream (of the vectors that a stream keeps beside it, none)."""
        if self.stream == "matrix":
            return self.key_dim * self.head_dim
        return self.model_dim * (self.hyper_streams if self.stream in HYPER_STREAMS else 1)

    @property
    def kv_groups(self) -> int:
        """Key and value heads, resolved."""
        return self.kv_heads if self.kv_heads is not None else self.heads


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings):
    """How a model is trained. The defaults are the paper's recipe.

    Args:
        steps: optimizer steps (give steps or tokens).
        tokens: training tokens; rounded up to whole steps.
        batch_size: sequences per optimizer step, over all processes.
        micro_batch: sequences per forward pass (None: the whole batch); gradients accumulate over the rest.
        lr: peak learning rate.
        warmup: share of the steps with linearly rising learning rate.
        final_lr: share of the peak at the end of the cosine.
        weight_decay: decoupled decay per step at the peak of the schedule, not multiplied by the learning rate.
        beta1: decay of AdamW's first moment.
        beta2: decay of AdamW's second moment.
        eps: AdamW's epsilon.
        clip: largest gradient norm.
        document_mask: let a token attend only within its own document.
        seed: of the initial values and of the data order.
        eval_every: steps between evaluations on the dev split (None: about twenty per run, fewer if they cost much).
        eval_tokens: dev tokens per evaluation.
        checkpoint_every: steps between checkpoints (None: about ten per run).
        keep: checkpoints kept besides the best.
        stop_at: stop and save at this step; the schedule stays that of all steps.
        sample_every: steps between text samples (None: about four per run; 0: never).
        precision: float32, bfloat16 autocast, or auto (bfloat16 on a GPU that has it).
        ops: version of the hot operations: plain (the definition), portable (PyTorch), native (C++), triton, or auto.
        recompute: what the backward pass computes anew instead of keeping it: none, gelu (the activation), ff (the
            inner feed-forward), full (whatever of the layer can be computed from its input).
        compile: compile the model with torch.compile (with ops auto: its plain operations).
        deterministic: refuse operations whose result may differ from run to run.
        on_nan: what a non-finite loss or gradient does: stop, or skip the step.
        spike: also skip a step whose loss or gradient norm lies this many standard deviations above the mean of the
            last 128 steps (None: never).
        skip_limit: skipped steps in a row after which the run stops.
        parallel: how several processes share the work: fsdp (each keeps a slice of the weights and moments) or ddp.
        tensorboard: write TensorBoard events.
        wandb: Weights & Biases project to log to, if the package is installed.
    """

    steps: int | None = None
    tokens: int | None = None
    batch_size: int = 64
    micro_batch: int | None = None
    lr: float = 1e-2
    warmup: float = 0.05
    final_lr: float = 0.1
    weight_decay: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    document_mask: bool = False
    seed: int = 0
    eval_every: int | None = None
    eval_tokens: int = 262_144
    checkpoint_every: int | None = None
    keep: int = 2
    stop_at: int | None = None
    sample_every: int | None = None
    precision: Precision = "auto"
    ops: Ops = "auto"
    recompute: Recompute = "none"
    compile: bool = False
    deterministic: bool = True
    on_nan: OnNaN = "stop"
    spike: float | None = None
    skip_limit: int = 10
    parallel: Parallel = "fsdp"
    tensorboard: bool = True
    wandb: str | None = None

    def __post_init__(self) -> None:
        self._check_positive("steps", "tokens", "batch_size", "micro_batch", "eval_every", "eval_tokens")
        self._check_positive("checkpoint_every", "stop_at", "keep", "skip_limit")
        self._check_positive("seed", "sample_every", zero_allowed=True)
        self._check_positive("lr", "eps", "clip", "spike", kind=float)
        self._check_positive("warmup", "final_lr", "weight_decay", "beta1", "beta2", kind=float, zero_allowed=True)
        for name, options in (("precision", Precision), ("recompute", Recompute), ("on_nan", OnNaN), ("ops", Ops)):
            self._check_choice(name, get_args(options))
        self._check_choice("parallel", get_args(Parallel))
        for name in ("warmup", "final_lr", "beta1", "beta2"):
            if getattr(self, name) > 1:
                self._refuse(name, "is a share: at most 1.")
        if self.steps is not None and self.tokens is not None:
            self._refuse("tokens", f"steps = {self.steps} is set too; give one of them.")
        if self.micro_batch is not None and self.batch_size % self.micro_batch:
            self._refuse("micro_batch", f"must divide batch_size = {self.batch_size}.")

    def total_steps(self, context: int) -> int:
        """Optimizer steps of the whole run, from `steps` or from `tokens`."""
        if self.steps is not None:
            return self.steps
        if self.tokens is not None:
            return math.ceil(self.tokens / (self.batch_size * context))
        raise InputError("the length of the run is not set: give train.steps or train.tokens.")


def _paper(stream: str, layers: int, heads: int, head_dim: int, key_dim: int, batch: int, tokens: float) -> tuple:
    model = ModelConfig(
        stream=stream, layers=layers, heads=heads, head_dim=head_dim, key_dim=key_dim, ff_dim=4 * heads * head_dim
    )
    return model, TrainConfig(batch_size=batch, tokens=int(tokens))


def _modern(stream: str) -> tuple:
    """GPT-2 small dimensions in a Llama-like block."""
    model = ModelConfig(
        stream=stream, norm="rmsnorm", position="rope", ff="swiglu", ff_dim=2048, kv_heads=4, qk_norm=True
    )
    return model, TrainConfig(batch_size=64, tokens=int(1.1e9))


def _tiny(stream: str) -> tuple:
    model = ModelConfig(
        stream=stream, layers=4, heads=4, head_dim=16, key_dim=16, ff_dim=256, vocab_size=4096, context=128
    )
    return model, TrainConfig(batch_size=16, steps=800, lr=2e-2, eval_tokens=32_768)


PRESETS: dict[str, tuple[ModelConfig, TrainConfig]] = {
    "rmt-46m": _paper("matrix", 6, 12, 32, 32, 64, 142e6),
    "rmt-134m": _paper("matrix", 12, 12, 64, 32, 64, 1.1e9),
    "rmt-206m": _paper("matrix", 18, 14, 64, 48, 64, 2.3e9),
    "rmt-305m": _paper("matrix", 24, 16, 64, 64, 256, 6e9),
    "transformer-49m": _paper("vector", 6, 12, 32, 32, 64, 212e6),
    "transformer-160m": _paper("vector", 12, 12, 64, 32, 64, 1.7e9),
    "transformer-260m": _paper("vector", 18, 14, 64, 48, 64, 3.5e9),
    "transformer-405m": _paper("vector", 24, 16, 64, 64, 256, 6e9),
    "rmt-modern-134m": _modern("matrix"),
    "transformer-modern-153m": _modern("vector"),
    "rmt-tiny": _tiny("matrix"),
    "transformer-tiny": _tiny("vector"),
}

PAPER_PRESETS = tuple(name for name in PRESETS if not name.endswith("tiny") and "modern" not in name)


def presets() -> list[str]:
    """The names of all presets."""
    return list(PRESETS)


def preset(name: str) -> ModelConfig:
    """The model of a preset."""
    return _find(name)[0]


def recipe(name: str) -> TrainConfig:
    """The training settings of a preset."""
    return _find(name)[1]


def _find(name: str) -> tuple[ModelConfig, TrainConfig]:
    if name not in PRESETS:
        raise InputError(f"there is no preset {name!r}. {suggest(name, PRESETS)}")
    return PRESETS[name]
