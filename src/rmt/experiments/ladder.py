"""The ladder of the scaling laws: mirrored pairs of growing size, each trained for 20 tokens per parameter.

A `Ladder` declares rungs (dimensions and batch size) and how many tokens per non-embedding parameter each model sees.
With one ratio, size and data grow together, as in the paper; with several (10, 20, 40) the law L(N, D) can tell them
apart. Each model counts its own parameters, so a transformer sees more tokens than the RMT that mirrors it. One
declaration at two scales: the paper's eight models, and five pairs for a CPU.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rmt.config import PAPER_PRESETS, ModelConfig, MuP, TrainConfig, preset, recipe
from rmt.errors import InputError
from rmt.experiments.match import mirror
from rmt.experiments.sweep import Member
from rmt.experiments.variants import Scale
from rmt.theory.accounting import count

STREAMS = ("matrix", "vector")
NAMES = {"matrix": "rmt", "vector": "transformer"}
RATIO = 20.0
LONGER = 1.1  # a run this many times as long as its name says was extended


@dataclass(frozen=True)
class Rung:
    """The dimensions of a mirrored pair, and its batch.

    Args:
        names: of the two models, by stream.
        is_extended: train the RMT for as many tokens as the transformer, as the paper did with its largest pair; its
            loss for the laws is read where its own budget was spent.
    """

    names: dict[str, str]
    layers: int
    heads: int
    head_dim: int
    key_dim: int
    batch_size: int
    is_extended: bool = False

    def model(self, base: ModelConfig, stream: str) -> ModelConfig:
        changes = {key: getattr(self, key) for key in ("layers", "heads", "head_dim", "key_dim")}
        return mirror(base.replace(ff_dim=4 * self.heads * self.head_dim, **changes), stream)


@dataclass(frozen=True)
class Ladder:
    """All runs of the experiment, as one declaration."""

    base: ModelConfig
    train: TrainConfig
    rungs: tuple[Rung, ...]
    ratios: tuple[float, ...] = (RATIO,)

    def members(self) -> list[Member]:
        """Rung by rung: each stream at each ratio."""
        found = []
        for rung in self.rungs:
            for ratio in self.ratios:
                tokens = {stream: self.budget(rung, stream, ratio) for stream in STREAMS}
                if rung.is_extended:
                    tokens["matrix"] = tokens["vector"]
                for stream in STREAMS:
                    train = self.train.replace(steps=None, tokens=tokens[stream], batch_size=rung.batch_size)
                    name = f"{rung.names[stream]}-x{ratio:g}"
                    found.append(Member(name, rung.model(self.base, stream), train))
        return found

    def budget(self, rung: Rung, stream: str, ratio: float) -> int:
        return math.ceil(ratio * count(rung.model(self.base, stream)).non_embedding_params)


def ladder(scale: Scale) -> Ladder:
    """The paper's eight models, or five small pairs that two cores train in minutes."""
    if scale == "paper":
        return Ladder(preset("rmt-134m"), recipe("rmt-134m").replace(micro_batch=16), paper_rungs())
    # layers, heads, key_dim, batch; the smallest see few tokens, and half a batch gives them steps enough
    shapes = ((1, 2, 8, 8), (2, 2, 8, 8), (2, 3, 12, 16), (3, 3, 12, 16), (4, 3, 12, 16))
    rungs = tuple(
        Rung({name: f"{NAMES[name]}-{layers}x{16 * heads}" for name in STREAMS}, layers, heads, 16, key_dim, batch)
        for layers, heads, key_dim, batch in shapes
    )
    return Ladder(preset("rmt-tiny"), recipe("rmt-tiny"), rungs)


def paper_rungs() -> tuple[Rung, ...]:
    ours = [name for name in PAPER_PRESETS if name.startswith("rmt")]
    theirs = [name for name in PAPER_PRESETS if name.startswith("transformer")]
    rungs = []
    for matrix, vector in zip(ours, theirs, strict=True):
        model, batch = preset(matrix), recipe(matrix).batch_size
        dims = (model.layers, model.heads, model.head_dim, model.key_dim)
        rungs.append(Rung({"matrix": matrix, "vector": vector}, *dims, batch, is_extended=matrix == ours[-1]))
    return tuple(rungs)


#: Settings that the ladder decides.
OWN = {"model": ("stream", "layers", "heads", "head_dim", "key_dim", "width", "ff_dim"), "train": ("steps", "tokens")}


def with_settings(
    declared: Ladder,
    tuned: dict[str, dict[str, Any]],
    override: Callable[[ModelConfig, TrainConfig], tuple[ModelConfig, TrainConfig]],
) -> list[Member]:
    """The members of a ladder under tuned hyperparameters and a user's settings.

    Args:
        declared: the ladder.
        tuned: per stream, the settings of a muTransfer search: initial values, multipliers with their base dimensions
            and learning rate are taken over, dimensions are not.
        override: the user's settings, laid over a model and a recipe.
    """
    model, train = override(declared.base, declared.train)
    for section, before, after in (("model", declared.base, model), ("train", declared.train, train)):
        for key in OWN[section]:
            if getattr(before, key) != getattr(after, key):
                raise InputError(f"--{section}.{key}: the ladder decides it; choose --rungs or --tokens-per-parameter.")
    is_own_batch = train.batch_size != declared.train.batch_size
    rungs = tuple(replace(rung, batch_size=train.batch_size) if is_own_batch else rung for rung in declared.rungs)
    members = replace(declared, base=model, train=train, rungs=rungs).members()
    return [with_tuned(member, tuned[member.model.stream]) if tuned else member for member in members]


def with_tuned(member: Member, settings: dict[str, Any]) -> Member:
    found, rate = settings.get("model") or {}, (settings.get("train") or {}).get("lr")
    if found.get("init") != "mup" or rate is None:
        raise InputError("--tuned: the file needs `model.init: mup`, `model.mup` and `train.lr`, as `rmt tune` writes.")
    model = member.model.replace(init="mup", mup=MuP.from_dict(found.get("mup") or {}))
    return Member(member.name, model, member.train.replace(lr=float(rate)))


def ratio_of(name: str) -> float:
    """Tokens per parameter that a run is meant to see, from its name."""
    found = re.search(r"-x([\d.]+)$", name)
    if not found:
        raise InputError(f"{name} is not a run of a scaling law: its name must end in -x20 or the like.")
    return float(found[1])


def about_extended(members: Sequence[Member]) -> str:
    """Says which runs go on beyond their own budget, as the paper's largest RMT did."""
    found = []
    for member in members:
        budget = ratio_of(member.name) * count(member.model).non_embedding_params
        if member.tokens > LONGER * budget:
            found.append(
                f"{member.name} trains on for as many tokens as its transformer; its loss counts at {budget:,.0f}."
            )
    return " ".join(found)
