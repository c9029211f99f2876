"""The report: one HTML page that says what came out of some runs, and shows it.

`write_report` loads the runs, groups them by seed and writes headline, table, curves, samples, configuration and
environment. The frame and its style are in `shell`, the drawing in assets/report.js.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rmt.errors import InputError
from rmt.report import shell
from rmt.report.looks import late_range, looks
from rmt.report.runs import (
    SMOOTHING_SHARE,
    Curve,
    Group,
    Run,
    dev_curve,
    find_runs,
    grad_norm_curve,
    group_runs,
    load_runs,
    lr_curve,
    settings,
    train_curve,
)
from rmt.report.summary import cells, group_row, headline, run_row
from rmt.train.run import write_text

MOST_POINTS = 600  # of a curve on the page; a longer one is thinned
MOST_COLUMNS = 4  # models side by side in a table; more become rows
SYMBOLS = {"o": "circle", "s": "square"}  # matplotlib's marker -> plotly's
SWITCHES = {
    "x": ("budget axis", ("log", "linear")),
    "y": ("loss axis", ("linear", "log")),
    "range": ("range", ("late", "all")),
}


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    title: str,
    introduction: str = "",
    table: list[dict] | None = None,
) -> Path:
    """Write one self-contained HTML page about some runs, finished or in progress.

    Args:
        runs: run directories, or folders that contain some.
        out: the page to write.
        title: its heading.
        introduction: plain text under the headline; a blank line starts a paragraph.
        table: rows to show in place of the computed table; the keys of the first are the column titles.
    """
    loaded = load_runs(find_runs(runs))
    groups = group_runs(loaded)
    body = "\n".join(
        part
        for part in (
            header(title, groups, introduction),
            results(groups, table),
            curves(groups),
            samples(groups),
            configuration(groups),
            environment(loaded),
            notes(),
            shell.data_block("report-data", chart_data(groups)),
        )
        if part
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, shell.html(title, body, [shell.plotly(), shell.asset("report.js")]))
    except OSError as error:
        raise InputError(f"cannot write the report to {out}: {error.strerror}. Choose another --out.") from None
    return out


def header(title: str, groups: Sequence[Group], introduction: str) -> str:
    first, *rest = map(unbroken, headline(groups))
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="headline">{escape(first)}</p>']
    if rest:
        parts.append(f"<p>{escape(' '.join(rest))}</p>")
    return "<header>\n" + "\n".join(parts) + f"\n{shell.paragraphs(introduction)}\n</header>"


def unbroken(sentence: str) -> str:
    """Keep numbers and their units on one line."""
    return re.sub(r"(?<=\d) (?=[%±kMGTPEZ]\b|[%±])|(?<=±) ", "\N{NO-BREAK SPACE}", sentence)


def results(groups: Sequence[Group], table: list[dict] | None) -> str:
    rows = [group_row(group) for group in groups]
    shown = cells(rows) if table is None else [{str(key): str(value) for key, value in row.items()} for row in table]
    parts = [cell_table(shown)]
    if any(len(group.runs) > 1 for group in groups):
        parts.append('<p class="note">Losses are means over seeds ± one standard deviation.</p>')
        single = [
            {"model": run.name, "run": run.name, "seeds": 1, "dev_loss_deviation": None, "train_loss_deviation": None}
            | run_row(run)
            for group in groups
            for run in group.runs
        ]
        parts.append(shell.details("Each run", cell_table(cells(single), rows_are_models=True)))
    return shell.section("Results", *parts)


def cell_table(rows: list[dict[str, str]], rows_are_models: bool = False) -> str:
    """Models as columns while they fit side by side, which reads best; else as rows."""
    if not rows:
        return ""
    lines = [list(rows[0]), *([row.get(key, "") for key in rows[0]] for row in rows)]
    if not rows_are_models and len(rows) <= MOST_COLUMNS:
        lines = [list(column) for column in zip(*lines, strict=True)]
    return shell.table(lines[0], lines[1:])


def curves(groups: Sequence[Group]) -> str:
    panels = "\n".join(f'<div class="plot" id="loss-{price}"></div>' for price in ("tokens", "flops", "seconds"))
    meaning = "Strong lines with points: dev loss. Pale lines: training loss, a running mean."
    if len(groups) > 2:
        meaning = "Dev loss."
    spread = " Bands: one standard deviation between seeds." if any(len(group.runs) > 1 for group in groups) else ""
    caption = (
        f"Cross-entropy in nats per token against what was spent. {meaning}{spread} "
        "Press a name to hide a model; drag to zoom, double-click to see everything."
    )
    loss = shell.section(
        "Loss",
        legend(groups),
        switches(),
        f'<figure><div class="panels">\n{panels}\n</div><figcaption>{escape(caption)}</figcaption></figure>',
    )
    plots = "".join(
        f'<figure><h3>{title}</h3><div class="plot" id="plot-{name}"></div></figure>\n'
        for name, title in (("lr", "Learning rate"), ("grad_norm", "Gradient norm (before clipping, running mean)"))
    )
    return loss + "\n" + shell.section("Optimisation", f'<div class="pair">\n{plots}</div>')


def legend(groups: Sequence[Group]) -> str:
    line = '<svg width="26" height="10" aria-hidden="true"><line x1="0" y1="5" x2="26" y2="5" stroke-width="3"/></svg>'
    buttons = "\n".join(
        f'<button type="button" aria-pressed="true">{line}{escape(group.label)}</button>' for group in groups
    )
    return f'<div class="legend">\n{buttons}\n</div>'


def switches() -> str:
    parts = []
    for name, (title, options) in SWITCHES.items():
        buttons = "".join(
            f'<button type="button" data-set="{name}" data-value="{option}" '
            f'aria-pressed="{"true" if option == options[0] else "false"}">{option}</button>'
            for option in options
        )
        parts.append(f'<span>{title} <span class="switch" role="group" aria-label="{title}">{buttons}</span></span>')
    return f'<div class="controls">{"".join(parts)}</div>'


def samples(groups: Sequence[Group]) -> str:
    """The last sample of each model's first run, the earlier ones folded away."""
    parts = []
    for group in groups:
        pieces = re.split(r"^=== step (\d+)\n", group.first.samples, flags=re.MULTILINE)
        found = [(step, text.strip()) for step, text in zip(pieces[1::2], pieces[2::2], strict=True) if text.strip()]
        if not found:
            continue
        shown = [f"<h3>{escape(group.label)}, step {step}</h3>{quotation(text)}" for step, text in found]
        earlier = shell.details("Earlier samples", "\n".join(shown[-2::-1])) if len(shown) > 1 else ""
        parts.append(f"<div>{shown[-1]}\n{earlier}</div>")
    if not parts:
        return ""
    grids = ['<div class="pair">' + "\n".join(some) + "</div>" for some in (parts[:MOST_COLUMNS], parts[MOST_COLUMNS:])]
    more = shell.details("Samples of the other models", grids[1]) if len(parts) > MOST_COLUMNS else ""
    return shell.section("Samples", grids[0], more)


def quotation(text: str) -> str:
    return f"<blockquote>{escape(text)}</blockquote>"


def configuration(groups: Sequence[Group]) -> str:
    """What sets the models apart, then everything."""
    columns = []
    for group in groups:
        values = settings(group.first)
        if len(group.runs) > 1:
            values["train.seed"] = ", ".join(str(run.config.train.seed) for run in group.runs)
        columns.append(values)
    intro = '<p class="note">The settings in which the models differ.</p>' if len(groups) > 1 else ""
    return compared("Configuration", [group.label for group in groups], columns, intro, "All other settings")


def environment(runs: Sequence[Run]) -> str:
    columns = [flat(run.environment) for run in runs]
    if not any(columns):
        return ""
    return compared("Environment", [run.name for run in runs], columns, "", "What all runs share")


def compared(title: str, names: list[str], columns: list[dict[str, Any]], intro: str, rest: str) -> str:
    """A section with the keys whose values differ between columns, and the others folded away."""
    keys = list(dict.fromkeys(key for values in columns for key in values))
    different = [key for key in keys if any(values.get(key) != columns[0].get(key) for values in columns)]
    parts = []
    if different:
        parts.append(intro)
        lines = [[key, *(plain(values.get(key)) for values in columns)] for key in different]
        if len(names) > MOST_COLUMNS:
            lines = [
                [name, *cells]
                for name, cells in zip(names, zip(*(line[1:] for line in lines), strict=True), strict=True)
            ]
            grid = shell.table(["", *different], lines, numeric=False)
            parts.append(grid if len(names) <= 4 * MOST_COLUMNS else shell.details("What differs", grid))
        else:
            parts.append(shell.table(["", *names], lines, numeric=False))
    common = [[key, plain(columns[0].get(key))] for key in keys if key not in different]
    if common:
        parts.append(shell.details(rest if different else "All", shell.table(["", "value"], common, numeric=False)))
    return shell.section(title, *parts)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted names."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result


def plain(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    return value if isinstance(value, str) else json.dumps(value)


def notes() -> str:
    text = (
        "Dev loss: the last evaluation. Train loss, without the z-loss: the mean over the last "
        f"{100 * SMOOTHING_SHARE:.0f} % of the steps. "
        "FLOPs: forward and backward, logits included, attention over the full context. Time: "
        "training steps only, without evaluation and checkpoints; per step and per second: medians. Share of peak: of "
        "a matrix multiplication measured on the same machine."
    )
    return f"<footer><p>{text}</p></footer>"


def chart_data(groups: Sequence[Group]) -> dict[str, Any]:
    """What assets/report.js draws."""
    models = []
    for group, look in zip(groups, looks(groups), strict=True):
        models.append(
            {
                "label": group.label,
                "light": look.light,
                "dark": look.dark,
                "dash": look.dash,
                "symbol": SYMBOLS.get(look.marker, "circle"),
                "dev": series(dev_curve(group)),
                "train": series(train_curve(group)),
                "lr": series(lr_curve(group)),
                "grad_norm": series(grad_norm_curve(group)),
            }
        )
    return {"models": models, "late": late_range(groups)}


def series(curve: Curve) -> dict[str, Any]:
    """A curve as plain numbers, thinned to what a screen can show."""
    points = min(len(curve.step), MOST_POINTS)
    keep = np.linspace(0, max(0, len(curve.step) - 1), points).round().astype(int)
    values = {name: getattr(curve, name) for name in ("tokens", "flops", "seconds", "mean", "deviation")}
    data = {
        name: None if array is None else [float(f"{value:.6g}") for value in array[keep]]
        for name, array in values.items()
    }
    return data | {"step": [int(step) for step in curve.step[keep]]}
