"""The paper's section 4.2: what came of a ladder of mirrored pairs (`rmt.experiments.ladder`).

Losses against FLOPs, tokens, parameters and seconds; the laws that fit them (`rmt.experiments.fits`); and what people
want to know: how much of each the RMT saves at equal loss, with an interval. All from rows of plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rmt.experiments.fits import Law, bootstrap, fit, interval
from rmt.experiments.ladder import LONGER, RATIO, STREAMS, ratio_of
from rmt.experiments.sweep import Row, counted, save_results
from rmt.experiments.variants import Scale
from rmt.report.style import stream_name
from rmt.report.summary import change

#: Final training losses of the paper's eight models.
PAPER_LOSS = {
    **{"rmt-46m": 3.9664, "rmt-134m": 3.3828, "rmt-206m": 3.2209, "rmt-305m": 2.9997},
    **{"transformer-49m": 4.0904, "transformer-160m": 3.4281, "transformer-260m": 3.2778, "transformer-405m": 3.0278},
}
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
    ratio = ratio_of(row["name"])
    budget = ratio * row["non_embedding_parameters"]
    share, loss = 1.0, row["dev_loss"]
    if row["tokens"] > LONGER * budget:
        share = budget / row["tokens"]
        at, values = np.array(row["curve"]).T
        loss = float(np.interp(budget, at, values))
    spent = {key: row[key] * share for key in ("tokens", "flops", "flops_without_logits", "seconds")}
    kept = ("name", "stream", "seed", "lr", "parameters", "non_embedding_parameters", "stream_size", "train_loss")
    rung = f"{row['layers']} x {row['heads'] * row['head_dim']}"
    return {**{key: row[key] for key in kept}, **spent, "rung": rung, "ratio": ratio, "dev_loss": loss}


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
