"""The frame of every HTML page of the product: one file, nothing loaded from elsewhere, light and dark.

Pages hand in a body and scripts; the frame brings the style, the theme button and a content security policy that
forbids every request, so that a page cannot load anything even by mistake. Text from files goes through `escape`,
data for scripts through `data_block`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
<button type="button" id="theme" aria-label="Switch between light and dark">Dark</button>
{body}
{scripts}
</body>
</html>
"""


def html(title: str, body: str, scripts: Iterable[str] = ()) -> str:
    """A whole page.

    Args:
        title: of the browser's tab, as plain text.
        body: HTML, already escaped where it comes from files.
        scripts: JavaScript, run in order after the body; `asset` and `plotly` return some.
    """
    blocks = "\n".join(f"<script>\n{script}\n</script>" for script in (asset("shell.js"), *scripts))
    return PAGE.format(policy=POLICY, title=escape(title), style=asset("shell.css"), body=body, scripts=blocks)


def asset(name: str) -> str:
    """A style sheet or script that comes with the package."""
    return (ASSETS / name).read_text(encoding="utf-8")


def plotly() -> str:
    """The plotting library, whole, so that the page works with no network. Use it once per page."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs().replace("</script", "<\\/script")


def data_block(name: str, value: Any) -> str:
    """Data for scripts: `JSON.parse(document.getElementById(name).textContent)`. NaN becomes null."""
    text = json.dumps(finite(value), allow_nan=False, separators=(",", ":"))
    safe = text.replace("<", "\\u003c")  # no text in it can end the script element
    return f'<script type="application/json" id="{escape(name)}">{safe}</script>'


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: bool = True) -> str:
    """A table of plain text. The first column names the row; the others are aligned as numbers or as text."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>')
    kind = "numbers" if numeric else "words"
    body = f"<thead><tr>{head}</tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody>"
    return f'<div class="scroll"><table class="{kind}">{body}</table></div>'


def section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(part for part in parts if part) + "\n</section>"


def details(summary: str, body: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>\n{body}\n</details>"


def paragraphs(text: str, kind: str = "") -> str:
    """Plain text as paragraphs, split at blank lines."""
    opening = f'<p class="{kind}">' if kind else "<p>"
    return "\n".join(f"{opening}{escape(part.strip())}</p>" for part in text.split("\n\n") if part.strip())
