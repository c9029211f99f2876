"""docs/results.md and its figures, from the runs kept in this folder.

    make results            (or: python results/build.py)

`page.md` is the page with a `$name` for each table and statement; everything behind such a name is computed here from
the compact runs, the searches and the step times beside this file, so the page cannot say what the runs do not.
"""

from __future__ import annotations

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
from rmt.report.tuning import coordinates_figure, importance_figure, slices_figure, transfer_figure
from rmt.train.run import RunConfig

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "results.md"
IMAGES = HERE.parent / "docs" / "images"
Table = list[dict[str, str]]


def main() -> None:
    parts = {name: part() for name, part in PARTS.items()}
    text = string.Template((HERE / "page.md").read_text(encoding="utf-8")).substitute(parts)
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(HERE.parent)}")


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


def streams_figure() -> str:
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
        savefig(figure, IMAGES / "results_streams.png")
    return "![Dev loss of every stream, a point per seed](images/results_streams.png)"


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
        "parameters."
    )


# --- the size of the stream -------------------------------------------------------------------------------------------


def sizes_table() -> str:
    return markdown(residual_size.readable(residual_size.analyse(rows_of("residual_size"))))


def sizes_statement() -> str:
    return residual_size.analyse(rows_of("residual_size"))["statement"]


def sizes_figure() -> str:
    residual_size_figure(residual_size.analyse(rows_of("residual_size")), IMAGES / "results_residual_size")
    return "![Dev loss against the size of the residual stream](images/results_residual_size.png)"


# --- the ladder -------------------------------------------------------------------------------------------------------


def ladder_table() -> str:
    return markdown(scaling_laws.readable(scaling_laws.analyse(rows_of("scaling_laws"))))


def ladder_statement() -> str:
    return scaling_laws.analyse(rows_of("scaling_laws"))["statement"]


def ladder_figure() -> str:
    scaling_laws_figure(scaling_laws.analyse(rows_of("scaling_laws")), IMAGES / "results_scaling_laws")
    return "![Dev loss against FLOPs and parameters](images/results_scaling_laws.png)"


PARTS: dict[str, Callable[[], str]] = {
    "pair_statement": pair_statement,
    "streams_table": streams_table,
    "streams_figure": streams_figure,
    "learning_rates": learning_rates,
    "sizes_table": sizes_table,
    "sizes_statement": sizes_statement,
    "sizes_figure": sizes_figure,
    "ladder_table": ladder_table,
    "ladder_statement": ladder_statement,
    "ladder_figure": ladder_figure,
}


if __name__ == "__main__":
    main()
