"""docs/results.md and its figures, from the runs kept in this folder.

    make results            (or: python results/build.py)

`page.md` is the page with a `$name` for each table and statement; everything behind such a name is computed here from
the compact runs, the searches and the step times beside this file, so the page cannot say what the runs do not.
"""

from __future__ import annotations

import argparse
import functools
import json
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rmt.experiments import residual_size, scaling_laws
from rmt.experiments.compare import PAPER_LOSS
from rmt.experiments.statistics import holm, mean_and_interval, paired_p_value
from rmt.experiments.sweep import Row, counted, read_row
from rmt.report.runs import find_runs
from rmt.report.style import new_figure, savefig, stream_colour, stream_name, styled
from rmt.report.sweeps import residual_size_figure, scaling_laws_figure
from rmt.report.tuning import coordinates_figure, slices_figure, transfer_figure
from rmt.train.run import RunConfig

HERE = Path(__file__).parent
Table = list[dict[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs", help="folder to write to")
    build(parser.parse_args().docs)


def build(docs: Path) -> None:
    """Write results.md and images/results_*.png."""
    parts = {name: part() for name, part in TEXTS.items()}
    for name, (caption, draw) in FIGURES.items():
        stem = f"results_{name.removesuffix('_figure')}"
        draw(docs / "images" / stem)
        (docs / "images" / f"{stem}.svg").unlink()  # the page shows the PNG; SVGs of many points are large
        parts[name] = f"![{caption}](images/{stem}.png)"
    text = string.Template((HERE / "page.md").read_text(encoding="utf-8")).substitute(parts)
    (docs / "results.md").write_text(text, encoding="utf-8")
    print(f"wrote {docs / 'results.md'}")


@functools.cache
def rows_of(experiment: str) -> list[Row]:
    """The runs of an experiment. The clock of a run beside others says little: its seconds are its steps times the
    seconds of a step as measured side by side (step_times.json)."""
    times = {key(item["model"]): item["seconds_per_step"] for item in load("step_times.json")["models"]}
    rows = []
    for run in find_runs([HERE / experiment]):
        row = read_row(run, run.parent.name)
        row["seconds"] = row["steps"] * times[key(RunConfig.load(run / "config.yaml").model.to_dict())]
        rows.append(row)
    return rows


def key(model: dict[str, Any]) -> str:
    return json.dumps(model, sort_keys=True)


def load(name: str) -> Any:
    return json.loads((HERE / name).read_text(encoding="utf-8"))


def markdown(table: Table) -> str:
    head = list(table[0])
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *([row[name] for name in head] for row in table)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def probability(p: float | None) -> str:
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def losses(rows: Sequence[Row]) -> list[float]:
    return [row["dev_loss"] for row in rows]


# --- streams ----------------------------------------------------------------------------------------------------------


def streams_table() -> str:
    """Every stream at its best learning rate, by loss, with the difference to the transformer and its p-value."""
    groups = counted(rows_of("variants"))
    seeds = min(len(rows) for rows in groups.values())
    base = losses(groups["vector"])[:seeds]
    others = [name for name in groups if name != "vector"]
    p_values = [paired_p_value(losses(groups[name])[:seeds], base) for name in others]
    corrected = dict(zip(others, holm([1.0 if p is None else p for p in p_values]), strict=True))
    plain = dict(zip(others, p_values, strict=True))
    step = groups["vector"][0]
    table = []
    for name, rows in sorted(groups.items(), key=lambda item: np.mean(losses(item[1])[:seeds])):
        values = losses(rows)[:seeds]
        mean, margin = mean_and_interval(values)
        change = float(np.mean(np.subtract(values, base)))
        first = rows[0]
        table.append(
            {
                "stream": stream_name(name),
                "dev loss": f"{mean:.4f} ± {margin:.4f}",
                "to the transformer": "–" if name == "vector" else f"{change:+.4f}",
                "p": probability(plain.get(name)),
                "p, corrected": probability(corrected.get(name)),
                "lr": f"{first['lr']:g}",
                "parameters": f"{first['parameters']:,}",
                "FLOPs / transformer": f"{first['flops'] / step['flops']:.2f}",
                "time / transformer": f"{first['seconds'] / step['seconds']:.2f}",
                "paper": f"{PAPER_LOSS[name] - PAPER_LOSS['vector']:+.4f}" if name in PAPER_LOSS else "–",
            }
        )
    return markdown(table)


def draw_streams(stem: Path) -> None:
    groups = counted(rows_of("variants"))
    order = sorted(groups, key=lambda name: -np.mean(losses(groups[name])))
    with styled():
        figure, (axes,) = new_figure(size=(6.4, 3.8))
        for place, name in enumerate(order):
            values = losses(groups[name])
            axes.plot(values, [place] * len(values), "o", color=stream_colour(name), alpha=0.5)
            axes.plot([np.mean(values)], [place], "|", color=stream_colour(name), markersize=18, markeredgewidth=2.5)
        axes.set_yticks(range(len(order)), [stream_name(name) for name in order])
        axes.set_xlabel("dev loss (nats per token)")
        savefig(figure, stem.with_suffix(".png"))


def learning_rates() -> str:
    """The first seed's loss at every learning rate that was tried."""
    rows = [row for row in rows_of("variants") if row["seed"] == 0]
    rates = sorted({row["lr"] for row in rows})
    found = {(row["name"], row["lr"]): row["dev_loss"] for row in rows}
    names = sorted({row["name"] for row in rows}, key=lambda name: min(found[name, lr] for lr in rates))
    return markdown(
        [{"stream": stream_name(name)} | {f"lr {lr:g}": f"{found[name, lr]:.4f}" for lr in rates} for name in names]
    )


def pair_statement() -> str:
    """RMT against transformer at equal tokens, over all seeds that both have."""
    groups = counted(rows_of("variants"))
    seeds = min(len(groups["matrix"]), len(groups["vector"]))
    ours, theirs = losses(groups["matrix"])[:seeds], losses(groups["vector"])[:seeds]
    mean, margin = mean_and_interval(np.subtract(ours, theirs).tolist())
    rmt, transformer = groups["matrix"][0], groups["vector"][0]
    return (
        f"At equal tokens ({rmt['tokens']:,}), over {seeds} seeds, the RMT's dev loss is {np.mean(ours):.4f}, the "
        f"transformer's {np.mean(theirs):.4f}: a difference of {mean:+.4f} ± {margin:.4f} (95 %), "
        f"p = {probability(paired_p_value(ours, theirs))}. Per token the RMT takes "
        f"{rmt['flops'] / transformer['flops']:.2f} of the transformer's FLOPs and "
        f"{rmt['seconds'] / transformer['seconds']:.2f} of its time (one thread), with "
        f"{rmt['non_embedding_parameters'] / transformer['non_embedding_parameters']:.2f} of its non-embedding "
        f"parameters. For the transformer's FLOPs it could see {transformer['flops'] / rmt['flops']:.2f} times the "
        f"tokens, for its seconds {transformer['seconds'] / rmt['seconds']:.2f} times: at equal FLOPs and at equal "
        "seconds the RMT leads by no less than at equal tokens, as far as more tokens do no harm. The ladder below "
        "asks the same of fits."
    )


# --- the size of the stream -------------------------------------------------------------------------------------------


@functools.cache
def sizes() -> dict[str, Any]:
    return residual_size.analyse(rows_of("residual_size"))


def steps_table() -> str:
    """From each size to the next, seed by seed."""
    return markdown(
        [
            {
                "key_dim": f"{item['from']} to {item['to']}",
                "change of the loss": f"{item['change']:+.4f}",
                "95 % interval": f"{item['interval'][0]:+.4f} to {item['interval'][1]:+.4f}",
            }
            for item in sizes()["neighbours"]
        ]
    )


# --- the ladder -------------------------------------------------------------------------------------------------------


@functools.cache
def ladder() -> dict[str, Any]:
    return scaling_laws.analyse(rows_of("scaling_laws"))


# --- muTransfer -------------------------------------------------------------------------------------------------------


def searches_table() -> str:
    """The best trial of each search, and how the others did."""
    table = []
    for stream in ("matrix", "vector"):
        found = load(f"tune/{stream}.json")
        finished = [trial["loss"] for trial in found["trials"] if trial["state"] == "finished"]
        best = found["best"]
        names = {name: f"{best[name]:.3g}" for name in ("lr", "alpha_in", "alpha_attn", "alpha_out", "sigma")}
        table.append(
            {"stream": stream_name(stream), "trials": str(len(found["trials"])), "best dev loss": f"{best['loss']:.4f}"}
            | {"median": f"{np.median(finished):.4f}"}
            | names
        )
    return markdown(table)


def importances_table() -> str:
    shares = {stream: load(f"tune/{stream}.json")["importances"] for stream in ("matrix", "vector")}
    return markdown(
        [
            {"stream": stream_name(stream)} | {name: f"{found[name]:.2f}" for name in sorted(shares["vector"])}
            for stream, found in shares.items()
        ]
    )


def draw_slices(stream: str, stem: Path) -> None:
    found = load(f"tune/{stream}.json")
    space = {name: tuple(bounds) for name, bounds in found["asked"]["space"].items()}
    slices_figure(found["trials"], space, stream, stem)


def transfer_table() -> str:
    table = []
    for curve in load("tune/transfer.json")["curves"]:
        cells = {"stream": stream_name(curve["stream"]), "init": curve["init"], "width": f"x {curve['width']}"}
        cells |= {f"lr {lr}": f"{np.mean(found):.4f}" for lr, found in curve["losses"].items()}
        table.append(cells | {"best lr": f"{curve['best_lr']:g}"})
    return markdown(table)


def coordinates_table() -> str:
    """Slopes of the change of each quantity against width, under muP and without."""
    table: dict[tuple[str, str], dict[str, str]] = {}
    for row in load("tune/coordinates.json")["rows"]:
        line = table.setdefault((row["stream"], row["quantity"]), {"stream": stream_name(row["stream"])})
        line["quantity"] = row["quantity"]
        for moment in ("end", "change"):
            slope = row[f"{moment}_slope"]
            what = {"end": "after the steps", "change": "change"}[moment]
            init = {"mup": "muP", "lecun": "standard"}[row["init"]]
            line[f"{init}: {what}"] = "–" if slope is None else f"{slope:+.2f}"
    return markdown(list(table.values()))


def draw_coordinates(stem: Path) -> None:
    found = load("tune/coordinates.json")
    coordinates_figure(found["rows"], found["steps"], stem)


TEXTS: dict[str, Callable[[], str]] = {
    "pair_statement": pair_statement,
    "streams_table": streams_table,
    "learning_rates": learning_rates,
    "sizes_table": lambda: markdown(residual_size.readable(sizes())),
    "sizes_steps": steps_table,
    "sizes_statement": lambda: sizes()["statement"],
    "ladder_table": lambda: markdown(scaling_laws.readable(ladder())),
    "ladder_savings": lambda: markdown(scaling_laws.readable_savings(ladder())),
    "ladder_laws": lambda: markdown(scaling_laws.readable_laws(ladder())),
    "ladder_statement": lambda: ladder()["statement"],
    "searches_table": searches_table,
    "importances_table": importances_table,
    "transfer_table": transfer_table,
    "coordinates_table": coordinates_table,
}
FIGURES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "streams_figure": ("Dev loss of every stream, a point per seed", draw_streams),
    "sizes_figure": ("Dev loss against stream size", lambda stem: residual_size_figure(sizes(), stem)),
    "ladder_figure": ("Dev loss against FLOPs and parameters", lambda stem: scaling_laws_figure(ladder(), stem)),
    "slices_matrix_figure": ("Trials of the RMT", functools.partial(draw_slices, "matrix")),
    "slices_vector_figure": ("Trials of the transformer", functools.partial(draw_slices, "vector")),
    "transfer_figure": (
        "Loss against learning rate at two widths",
        lambda stem: transfer_figure(load("tune/transfer.json")["curves"], stem),
    ),
    "coordinates_figure": ("Sizes inside the model against width", draw_coordinates),
}


if __name__ == "__main__":
    main()
