"""Results of several models side by side, the paper's Tables 6 and 7 beside ours; as rows, Markdown or for the screen.

The paper does not say which accuracy it reports; `acc` is shown against it and `acc_norm` without comparison. Its
OpenWebText and Pile perplexities come from files that are not published; `rmt eval --data` or `--text` gives such
numbers for files at hand.
"""

from dataclasses import dataclass
from typing import Any

#: (task, metric) -> the largest transformer (405M) and RMT (305M) after 6B tokens; accuracies in percent.
PAPER = {
    ("lambada_openai", "perplexity"): (61.34, 25.21),
    ("wikitext", "word_perplexity"): (76.35, 55.94),
    ("arc_challenge", "acc"): (19.7, 20.6),
    ("arc_easy", "acc"): (44.3, 46.1),
    ("hellaswag", "acc"): (28.7, 30.5),
    ("piqa", "acc"): (61.9, 63.7),
    ("winogrande", "acc"): (49.5, 52.5),
}
PAPER_COLUMNS = ("paper: transformer 405M", "paper: RMT 305M")
ACCURACIES = ("acc", "acc_norm", "exact_match", "em", "f1")
PERPLEXITY_ROWS = ("token_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")


@dataclass
class ModelResult:
    """What was measured of one model."""

    name: str
    path: str
    params: int
    perplexity: dict[str, dict[str, Any]]  # by the name of the file or dataset
    tasks: dict[str, dict[str, Any]]


def rows(results: list[ModelResult]) -> list[dict[str, Any]]:
    """One row per measured number: what, lower or higher is better, each model's value, the paper's two."""
    table = []
    for where in dict.fromkeys(name for result in results for name in result.perplexity):
        for metric in PERPLEXITY_ROWS:
            values = [result.perplexity.get(where, {}).get(metric) for result in results]
            table.append(row(where, metric, values, None))
    tasks = dict.fromkeys(name for result in results for name in result.tasks)
    order = {task: place for place, (task, _) in enumerate(PAPER)}
    for task in sorted(tasks, key=lambda name: order.get(name, len(order))):
        names = dict.fromkeys(name for result in results for name in result.tasks.get(task, {}))
        for metric in (name for name in names if not name.endswith("_stderr") and name != "samples"):
            values = [result.tasks.get(task, {}).get(metric) for result in results]
            errors = [result.tasks.get(task, {}).get(f"{metric}_stderr") for result in results]
            table.append(row(task, metric, values, PAPER.get((task, metric)), errors))
    return table


def row(
    what: str,
    metric: str,
    values: list[float | None],
    paper: tuple[float, float] | None,
    errors: list[float | None] | None = None,
) -> dict[str, Any]:
    percent = 100.0 if metric in ACCURACIES else 1.0
    scaled = [None if value is None else value * percent for value in values]
    spread = [None if error is None else error * percent for error in errors or [None] * len(values)]
    better = "higher" if metric in ACCURACIES else "lower"
    return {"what": what, "metric": metric, "better": better, "values": scaled, "stderr": spread, "paper": paper}


def cells(results: list[ModelResult]) -> list[list[str]]:
    """A header and the rows as text. The paper's columns are there if one of its numbers is."""
    table = rows(results)
    has_paper = any(line["paper"] for line in table)
    lines = [["", "metric", *(result.name for result in results), *(PAPER_COLUMNS if has_paper else ())]]
    for line in table:
        arrow = "↑" if line["better"] == "higher" else "↓"
        values = [show(value, error) for value, error in zip(line["values"], line["stderr"], strict=True)]
        paper = [show(value) for value in line["paper"] or (None, None)] if has_paper else []
        lines.append([line["what"], f"{line['metric']} {arrow}", *values, *paper])
    return lines


def show(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "–"
    text = f"{value:.2f}" if abs(value) < 1e4 else f"{value:.3g}"
    if abs(value) < 10:
        text = f"{value:.3f}"
    return f"{text} ± {error:.2g}" if error else text


def markdown(results: list[ModelResult], note: str) -> str:
    header, *body = cells(results)
    lines = [header, ["---", "---", *["---:"] * (len(header) - 2)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{note}\n"
