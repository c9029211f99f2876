"""The paper's section 4.2: a ladder of mirrored pairs, each trained for 20 tokens per non-embedding parameter.

A `Ladder` declares rungs (dimensions and batch size), streams, and how many tokens per parameter each model sees. With
one ratio, size and data grow together, as in the paper; with several (10, 20, 40) the law L(N, D) can tell them apart.
Each model counts its own parameters, so a transformer sees more tokens than the RMT that mirrors it.

What comes out: losses against FLOPs, tokens, parameters and seconds, fitted laws, and what the RMT saves at equal loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rmt.config import PAPER_PRESETS, ModelConfig, MuP, TrainConfig, preset, recipe
from rmt.errors import InputError
from rmt.experiments.fits import Law, bootstrap, fit, interval
from rmt.experiments.match import mirror
from rmt.experiments.sweep import Member, Row, counted, save_results
from rmt.experiments.variants import Scale
from rmt.report.style import stream_name
from rmt.report.summary import change
from rmt.theory.accounting import count

STREAMS = ("matrix", "vector")
NAMES = {"matrix": "rmt", "vector": "transformer"}
RATIO = 20.0
#: Final training losses of the paper's eight models.
PAPER_LOSS = {
    **{"rmt-46m": 3.9664, "rmt-134m": 3.3828, "rmt-206m": 3.2209, "rmt-305m": 2.9997},
    **{"transformer-49m": 4.0904, "transformer-160m": 3.4281, "transformer-260m": 3.2778, "transformer-405m": 3.0278},
}


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
        return Ladder(preset("rmt-134m"), recipe("rmt-134m").replace(tokens=1, micro_batch=16), paper_rungs())
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


# What came out ------------------------------------------------------------------------------------------------------

#: What a loss can be paid in: a field of a point, and its name in sentences.
RESOURCES = {
    "flops": ("FLOPs", "fewer"),
    "flops_without_logits": ("FLOPs without logits", "fewer"),
    "tokens": ("tokens", "fewer"),
    "non_embedding_parameters": ("non-embedding parameters", "fewer"),
    "parameters": ("parameters", "fewer"),
    "seconds": ("seconds", "fewer"),
}
FEWEST_FOR_FLOOR = 5  # rungs from which on a law in one variable gets an irreducible loss
LONGER = 1.1  # a run this many times as long as its name says was extended
Point = dict[str, Any]


def analyse(rows: Sequence[Row], scale: Scale = "tiny") -> dict[str, Any]:
    """Points, laws, savings and a statement, from the rows of the runs.

    The laws in one variable, and the savings, use the runs at one number of tokens per parameter (20, if there are
    such); the law in parameters and tokens uses all runs, and needs several ratios to tell the two apart.
    """
    points = [point(row) for runs in counted(rows).values() for row in runs]
    ratios = sorted({item["ratio"] for item in points})
    main = RATIO if RATIO in ratios else ratios[len(ratios) // 2]
    chosen = {stream: [p for p in points if p["stream"] == stream and p["ratio"] == main] for stream in STREAMS}
    for part in chosen.values():  # in the same order for both streams: they are resampled in pairs
        part.sort(key=lambda p: (p["non_embedding_parameters"], p["seed"]))
    fitted = {
        resource: {stream: Fitted.of([p[resource] for p in part], part) for stream, part in chosen.items()}
        for resource in RESOURCES
        if all(len({p["rung"] for p in part}) >= 2 for part in chosen.values())
    }
    result: dict[str, Any] = {
        "models": [model_line(runs, scale) for runs in grouped(points)],
        "ratio": main,
        "ratios": ratios,
        "points": points,
        "laws": {name: {stream: found.to_dict() for stream, found in pair.items()} for name, pair in fitted.items()},
        "joint_laws": {stream: joint_law([p for p in points if p["stream"] == stream]) for stream in STREAMS},
        "savings": savings(chosen, fitted) if fitted else [],
    }
    result["statement"] = statement(result)
    return result


def point(row: Row) -> Point:
    """A run as a point of the laws. Of an extended run, what it had spent and reached at its own budget."""
    ratio = ratio_of(row)
    budget = ratio * row["non_embedding_parameters"]
    share, loss = 1.0, row["dev_loss"]
    if row["tokens"] > LONGER * budget:
        share = budget / row["tokens"]
        loss = float(np.interp(budget, *zip(*row["curve"], strict=True)))
    spent = {key: row[key] * share for key in ("tokens", "flops", "flops_without_logits", "seconds")}
    kept = ("name", "stream", "seed", "lr", "parameters", "non_embedding_parameters", "stream_size", "train_loss")
    rung = f"{row['layers']} x {row['heads'] * row['head_dim']}"
    return {**{key: row[key] for key in kept}, **spent, "rung": rung, "ratio": ratio, "dev_loss": loss}


def ratio_of(row: Row) -> float:
    """Tokens per parameter that a run was meant to see, from its name."""
    found = re.search(r"-x([\d.]+)$", row["name"])
    if not found:
        raise InputError(f"{row['name']} is not a run of a scaling law: its name must end in -x20 or the like.")
    return float(found[1])


def grouped(points: Sequence[Point]) -> list[list[Point]]:
    """The seeds of each model and ratio together."""
    groups: dict[str, list[Point]] = {}
    for item in points:
        groups.setdefault(item["name"], []).append(item)
    return list(groups.values())


def model_line(runs: Sequence[Point], scale: Scale) -> dict[str, Any]:
    first, losses = runs[0], [run["dev_loss"] for run in runs]
    paper = PAPER_LOSS.get(first["name"].rpartition("-x")[0]) if scale == "paper" and first["ratio"] == RATIO else None
    return {
        **{key: first[key] for key in ("name", "stream", "rung", "ratio", "parameters", "non_embedding_parameters")},
        **{key: first[key] for key in ("tokens", "flops", "flops_without_logits", "lr")},
        "seconds": float(np.mean([run["seconds"] for run in runs])),
        "seeds": len(runs),
        "dev_loss": float(np.mean(losses)),
        "dev_loss_spread": float(np.std(losses, ddof=1)) if len(losses) > 1 else None,
        "train_loss": float(np.mean([run["train_loss"] for run in runs])),
        "paper_loss": paper,
    }


@dataclass(frozen=True)
class Fitted:
    """A law in one resource with its resamples."""

    law: Law
    resampled: list[Law]

    @classmethod
    def of(cls, spent: Sequence[float], runs: Sequence[Point]) -> Fitted:
        losses = [run["dev_loss"] for run in runs]
        law = fit([spent], losses, floor=len({run["rung"] for run in runs}) >= FEWEST_FOR_FLOOR)
        return cls(law, bootstrap(law, [spent], losses))

    def to_dict(self) -> dict[str, Any]:
        law = self.law
        return {
            **{"E": law.floor, "A": law.scales[0], "exponent": law.exponents[0], "error": law.error},
            "exponent_interval": interval([other.exponents[0] for other in self.resampled]),
        }


def joint_law(runs: Sequence[Point]) -> dict[str, Any] | None:
    """L = E + A / N^a + B / D^b over all runs of a stream, or None where they cannot tell N from D."""
    if len({run["name"] for run in runs}) < 6 or len({run["ratio"] for run in runs}) < 2:
        return None
    variables = [[run[key] for run in runs] for key in ("non_embedding_parameters", "tokens")]
    losses = [run["dev_loss"] for run in runs]
    law = fit(variables, losses)
    others = bootstrap(law, variables, losses)
    values: dict[str, Callable[[Law], float]] = {
        "E": lambda found: found.floor,
        "A": lambda found: found.scales[0],
        "a": lambda found: found.exponents[0],
        "B": lambda found: found.scales[1],
        "b": lambda found: found.exponents[1],
    }
    intervals = {f"{key}_interval": interval([value(other) for other in others]) for key, value in values.items()}
    return {**{key: value(law) for key, value in values.items()}, **intervals, "error": law.error, "runs": len(runs)}


def savings(chosen: dict[str, list[Point]], fitted: dict[str, dict[str, Fitted]]) -> list[dict[str, Any]]:
    """What the RMT needs to reach the loss of each transformer, as a share of what that one spent, by resource.

    Both losses and needs are taken from the fitted laws, which average over the noise of single runs; `interpolated`
    is the share without any fit, read off between the RMTs on both sides of the transformer's own loss.
    """
    lines = []
    for runs in grouped(chosen["vector"]):
        line: dict[str, Any] = {"name": runs[0]["name"], "rung": runs[0]["rung"]}
        line["dev_loss"] = float(np.mean([run["dev_loss"] for run in runs]))
        for resource, pair in fitted.items():
            spent = float(np.mean([run[resource] for run in runs]))
            share = share_needed(pair["matrix"].law, pair["vector"].law, spent)
            pairs = zip(pair["matrix"].resampled, pair["vector"].resampled, strict=True)
            needed = spent * share
            largest = max(item[resource] for item in chosen["matrix"])
            line[resource] = {
                "spent": spent,
                "needed": needed,
                "share": share,
                "interval": interval([share_needed(ours, theirs, spent) for ours, theirs in pairs]),
                "interpolated": interpolated(chosen["matrix"], resource, line["dev_loss"], spent),
                "is_extrapolated": bool(needed > largest),
            }
        lines.append(line)
    return lines


def share_needed(ours: Law, theirs: Law, spent: float) -> float:
    return ours.needed(float(theirs.loss(spent))) / spent


def interpolated(runs: Sequence[Point], resource: str, loss: float, spent: float) -> float | None:
    """On a straight line in loss and the logarithm of the resource, between neighbouring models."""
    means = sorted((np.mean([r["dev_loss"] for r in g]), np.mean([r[resource] for r in g])) for g in grouped(runs))
    losses, needs = [item[0] for item in means], [item[1] for item in means]
    if not losses[0] <= loss <= losses[-1]:
        return None
    return float(np.exp(np.interp(loss, losses, np.log(needs))) / spent)


def statement(result: dict[str, Any]) -> str:
    """What the RMT saves, in sentences: at the loss of the largest transformer, and over all rungs."""
    if not result["savings"]:
        return "Two rungs at least are needed to say what the RMT saves."
    last = result["savings"][-1]
    told = ("flops", "tokens", "non_embedding_parameters", "seconds")
    words = [f"{change(last[key]['share'], 1.0, *RESOURCES[key])} ({span(last[key]['interval'])})" for key in told]
    is_far = any(last[key]["is_extrapolated"] for key in told)
    means = [float(np.exp(np.mean([np.log(line[key]["share"]) for line in result["savings"]]))) for key in told]
    average = [change(mean, 1.0, *RESOURCES[key]) for mean, key in zip(means, told, strict=True)]
    sentences = [
        f"At the loss of the largest transformer ({last['name']}, {last['dev_loss']:.4f}), by laws fitted at "
        f"{result['ratio']:g} tokens per parameter, the RMT needs {listed(words)}.",
        f"In the mean over the {len(result['savings'])} rungs: {listed(average)}.",
    ]
    if is_far:
        sentences.append("Some of these needs lie beyond the largest RMT that was trained: an extrapolation.")
    return " ".join(sentences)


def span(shares: Sequence[float]) -> str:
    """[0.4, 0.7] -> 95 %: -60 to -30 %."""
    low, high = (100 * (min(share, 100.0) - 1) for share in shares)
    return f"95 %: {low:+.0f} to {high:+.0f} %"


def listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def readable(result: dict[str, Any]) -> list[dict[str, str]]:
    """A line per model, for people."""
    lines = []
    for item in result["models"]:
        spread = item["dev_loss_spread"]
        cells = {
            "model": item["name"],
            "non-embedding": f"{item['non_embedding_parameters']:,}",
            "parameters": f"{item['parameters']:,}",
            "tokens": f"{item['tokens']:,.0f}",
            "FLOPs": f"{item['flops']:.3g}",
            "without logits": f"{item['flops_without_logits']:.3g}",
            "lr": f"{item['lr']:.3g}",
            "train loss": f"{item['train_loss']:.4f}",
            "dev loss": f"{item['dev_loss']:.4f}" + ("" if spread is None else f" ± {spread:.4f}"),
        }
        if any(other["paper_loss"] is not None for other in result["models"]):
            cells["paper"] = "–" if item["paper_loss"] is None else f"{item['paper_loss']:.4f}"
        lines.append(cells)
    return lines


def readable_savings(result: dict[str, Any]) -> list[dict[str, str]]:
    """What the RMT needs at the loss of each transformer, as a change, with its interval."""

    def cell(found: dict[str, Any]) -> str:
        return f"{100 * (found['share'] - 1):+.0f} % ({span(found['interval'])[6:]})"

    return [
        {"at the loss of": line["name"], "dev loss": f"{line['dev_loss']:.4f}"}
        | {what: cell(line[key]) for key, (what, _) in RESOURCES.items() if key != "parameters"}
        for line in result["savings"]
    ]


def readable_laws(result: dict[str, Any]) -> list[dict[str, str]]:
    """The fitted laws, a line each; in one variable at one ratio, in two over all runs."""

    def bounds(found: Sequence[float]) -> str:
        return f"{found[0]:.3f} to {found[1]:.3f}"

    lines = []
    for key, pair in result["laws"].items():
        for stream, law in pair.items():
            floor = f"{law['E']:.3f} + " if law["E"] > 0 else ""
            text = f"{floor}{law['A']:.4g} x^-{law['exponent']:.4f}"
            names = {"stream": stream_name(stream), "x": RESOURCES[key][0]}
            lines.append(names | {"law": text, "exponent, 95 %": bounds(law["exponent_interval"])})
    for stream, law in result["joint_laws"].items():
        if law is not None:
            text = f"{law['E']:.3f} + {law['A']:.4g} N^-{law['a']:.3f} + {law['B']:.4g} D^-{law['b']:.3f}"
            exponents = f"N {bounds(law['a_interval'])}; D {bounds(law['b_interval'])}"
            lines.append({"stream": stream_name(stream), "x": "N, D", "law": text, "exponent, 95 %": exponents})
    return lines


def write(result: dict[str, Any], rows: Sequence[Row], out: Path) -> list[Path]:
    """Figures, the rows with what was computed from them, and the page, for a folder of runs."""
    from rmt.report.page import write_report
    from rmt.report.sweeps import scaling_laws_figure

    figures = scaling_laws_figure(result, out / "scaling-laws")
    runs = [out / row["run"] for same in counted(rows).values() for row in same]
    page = write_report(
        runs, out / "report.html", title="Scaling laws", introduction=result["statement"], table=readable(result)
    )
    return [page, *figures, save_results(out / "results.json", rows, result)]
