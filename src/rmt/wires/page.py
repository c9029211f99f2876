"""The wiring as one self-contained HTML page: the map of layers and heads, a text's way through it, load, and cuts.

The frame and its style are those of the report (`rmt.report.shell`), the drawing is in assets/wiring.js. Large tables
travel as 16-bit numbers, so that the page of a 300M model stays below some megabytes.
"""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from rmt.report import shell
from rmt.train.run import write_text
from rmt.wires.findings import Findings, Followed, top_edges
from rmt.wires.slots import Slot, grouped

INTRODUCTION = """\
In the Residual Matrix Transformer the residual stream of a token is a matrix. A head, a feed-forward core or the \
embedding writes to it by adding the outer product of a learned key and a vector; it reads by contracting the \
normalised matrix with another learned key. So what a read receives of a write is that write's vector times one \
number, the inner product of their two keys. This page shows all of these numbers, and what they do."""

MAP = """\
Rows read, columns write, both in the order of depth; a read sees only what was written before it, so half of the map \
is empty. “3 attn” is layer 3's attention, “3 ff” its feed-forward core, “out” the unembedding, “token” and \
“position” the embeddings. “Keys” is how well the keys of two cores fit: the root mean square of their normalised \
inner products. Unrelated keys would give {random:.2f}, the neutral colour; red pairs are wired together, blue ones \
keep out of each other's way. {text}Click a cell to see its heads below."""

MAP_TEXT = """\
“Text” is what passed on the text further down, over all of it or at the token chosen there: the share that a column \
supplied of what a row saw. A row sums to 100 %; a negative share worked against the rest. """

HEADS = """\
One row for each vector that the chosen core reads, one column for each vector written before it. Red: the write \
arrives with its sign; blue: with the opposite sign. Click a row to list where that read gets its input from."""

SOURCES = """\
The writes with the largest numbers for one read. Normalised is between −1 and 1; raw, with the lengths of both keys, \
is the factor by which the written vector arrives (before the division by the token's deviation).{spread}"""

SPREAD = """ This model's norm has a gain for every entry of the stream, so the factor differs between value \
indices: raw is its mean, ± its standard deviation over them."""

TEXT = """\
Darker tokens were predicted better from those before them. Click a token to see how its successor was predicted. \
The lens reads the stream after each core as the unembedding would if it came next: what the model would say at that \
depth. The bars take the logit itself apart: what each core's writes contributed to it, exactly; they sum to it."""

LOAD = """\
A stream of K key dimensions can keep K vectors apart. Models write more, so keys overlap, and a read receives a \
little of what it did not ask for. Interference is the mean squared cosine between the keys of different writes, at \
each depth, beside what random keys would have and the least that so many keys can have. The effective rank says how \
many directions the keys fill."""

CUTS = """\
A cut takes away exactly what one side contributes to what the other reads, at every token, and leaves the rest of the \
stream alone; everything later is computed anew. The loss change says what the connection was worth."""


def write_page(findings: Findings, path: Path) -> Path:
    """Write the page."""
    title = f"Wiring of {findings.name}"
    body = "\n".join(
        part
        for part in (
            f"<style>{shell.asset('wiring.css')}</style>",
            f'<header><h1>{escape(title)}</h1><p class="headline">{escape(findings.summary())}</p>',
            f"{shell.paragraphs(INTRODUCTION)}</header>",
            map_section(findings),
            text_section(findings.text),
            load_section(findings),
            cut_section(findings),
            footer(findings),
            shell.data_block("wiring-data", page_data(findings)),
        )
        if part
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, shell.html(title, body, [shell.plotly(), shell.asset("wiring.js")]))
    return path


def map_section(findings: Findings) -> str:
    switch = ""
    if findings.text is not None:
        switch = (
            '<div class="controls"><span>show <span class="switch" role="group" aria-label="show">'
            '<button type="button" data-view="keys" aria-pressed="true">keys</button>'
            '<button type="button" data-view="text" aria-pressed="false">text</button></span></span></div>'
        )
    intro = MAP.format(random=findings.random, text=MAP_TEXT if findings.text is not None else "")
    is_full = findings.table.config.norm_gain == "full"
    return shell.section(
        "The map",
        shell.paragraphs(intro),
        switch,
        '<h3 id="map-title">Layers</h3><div class="plot map" id="map-layers"></div>',
        '<h3 id="heads-title">Heads</h3>',
        shell.paragraphs(HEADS, "note"),
        '<div class="plot map" id="map-heads"></div>',
        '<h3 id="sources-title">Sources</h3>',
        '<p class="controls"><label>read <select id="read-choice"></select></label></p>',
        shell.paragraphs(SOURCES.format(spread=SPREAD if is_full else ""), "note"),
        '<div class="pair"><div class="plot" id="sources"></div><div id="source-list"></div></div>',
    )


def text_section(text: Followed | None) -> str:
    if text is None:
        return ""
    return shell.section(
        "A text on the wires",
        shell.paragraphs(TEXT),
        '<div id="tokens" role="group" aria-label="tokens"></div>',
        '<h3 id="token-title">Token</h3>',
        '<h3>Lens: the likeliest next tokens at each depth</h3><div id="lens"></div>',
        '<h3 id="attribution-title">Where the logit comes from</h3><div class="plot" id="attribution"></div>',
    )


def load_section(findings: Findings) -> str:
    header = ("core that reads", "writes", "per key dim", "effective rank", "random", "interference", "random", "least")
    rows = [
        (
            one.core,
            str(one.writes),
            f"{one.writes_per_key_dim:.2f}",
            f"{one.effective_rank:.2f}",
            f"{one.effective_rank_random:.2f}",
            f"{one.interference:.4f}",
            f"{one.interference_random:.4f}",
            f"{one.interference_least:.4f}",
        )
        for one in findings.load
    ]
    noise = ""
    if findings.text is not None:
        noise = (
            "<h3>Crosstalk on the text</h3>"
            + shell.paragraphs(
                "Read a write back with its own key, at the end of the stream: the energy of what other writes mix in, "
                "by the write's own energy (logarithmic). Below the grey marks the keys avoid each other better than "
                "random ones.",
                "note",
            )
            + '<div class="plot" id="plot-crosstalk"></div>'
        )
    return shell.section(
        "Load",
        shell.paragraphs(LOAD),
        '<div class="pair"><figure><h3>Interference, by depth</h3><div class="plot" id="plot-load"></div></figure>',
        f"<figure><h3>{'Over training' if findings.history else 'Effective rank, by depth'}</h3>",
        '<div class="plot" id="plot-history"></div></figure></div>',
        shell.details("All numbers", shell.table(header, rows)),
        noise,
    )


def cut_section(findings: Findings) -> str:
    parts = [
        shell.paragraphs(f"{title}.", "note") + shell.table(header, lines)
        for title, header, lines in findings.effect_tables()
    ]
    return shell.section("Cuts", shell.paragraphs(CUTS), *parts) if parts else ""


def footer(findings: Findings) -> str:
    config = findings.table.config
    strongest = [
        (one["read"], one["write"], f"{one['normalised']:+.3f}", f"{one['raw']:+.3f}")
        for one in top_edges(findings.table, 20)
    ]
    rows = [(f"{read} ← {write}", *numbers) for read, write, *numbers in strongest]
    table = shell.details("The 20 strongest edges", shell.table(("edge", "normalised", "raw"), rows))
    facts = (
        f"{config.layers} layers, {config.heads} heads of {config.head_dim}, key_dim {config.key_dim}, {config.norm}, "
        f"norm_gain {config.norm_gain}. The whole table is in wiring.npz and wiring.csv beside this page. Layers and "
        "heads count from 0. Normalised: the inner product of two keys by the product of their lengths."
    )
    return f"{table}\n<footer><p>{escape(facts)}</p></footer>"


def page_data(findings: Findings) -> dict[str, Any]:
    """What assets/wiring.js draws."""
    table = findings.table
    blocks = table.blocks("cores")
    lengths = np.outer(table.read_norm, table.write_norm)
    spread = np.divide(table.spread, lengths, out=np.zeros_like(table.spread), where=lengths > 0)
    return {
        "random": findings.random,
        "reads": slots_data(table.reads, table.read_norm),
        "writes": slots_data(table.writes, table.write_norm),
        "cores": np.where(blocks.causal, blocks.values, np.nan).round(4).tolist(),
        "normalised": packed(table.normalised),
        "spread": packed(spread) if table.config.norm_gain == "full" else None,
        "text": text_data(findings.text) if findings.text is not None else None,
        "load": [one.to_dict() for one in findings.load],
        "history": [{"step": step, **rows[-1].to_dict()} for step, rows in findings.history],
    }


def slots_data(slots: list[Slot], norm: np.ndarray) -> dict[str, Any]:
    cores, place = grouped(slots, "cores")
    return {
        "names": [slot.name for slot in slots],
        "sites": [slot.site for slot in slots],
        "cores": cores,
        "core": place.tolist(),
        "norm": [float(f"{value:.5g}") for value in norm],
    }


def text_data(text: Followed) -> dict[str, Any]:
    table = text.seen.table
    writes, place = grouped(table.writes, "cores")

    def by_core(ids: Any) -> list[list[float]]:
        parts_TC = np.zeros((len(text.tokens), len(writes)))
        np.add.at(parts_TC.T, place, text.attribution(ids).T)
        return parts_TC.round(4).tolist()

    lens = text.lens
    whole = np.stack([weighted_rows(text, site) for site in range(text.core_shares.shape[1])])
    return {
        "tokens": text.tokens,
        "predicted": [text.word(one) for one in text.predicted.tolist()],
        "shares": packed(text.total_shares),
        "coreShares": packed(text.core_shares),
        "coreShare": np.where(table.blocks("cores").causal, whole, np.nan).round(4).tolist(),
        "attribution": {"predicted": by_core(text.predicted), "followed": by_core(text.followed)},
        "lens": {
            "after": lens.after,
            "words": [[[text.word(i) for i in row] for row in site] for site in lens.ids[:, 0].tolist()],
            "probability": np.array(lens.probability[:, 0].tolist()).round(4).tolist(),
            "followed": np.array(lens.target[:, 0].tolist()).round(5).tolist(),
        },
        "crosstalk": [[one.write, float(f"{one.noise:.4g}"), float(f"{one.random:.4g}")] for one in text.crosstalk],
    }


def weighted_rows(text: Followed, site: int) -> np.ndarray:
    """A core's shares over the whole text: the tokens' shares, weighted by the squared length of what was read."""
    length_T = text.seen.read[site][0].square().sum((-2, -1)).cpu().numpy()
    return (text.core_shares[:, site] * length_T[:, None]).sum(0) / max(float(length_T.sum()), 1e-30)


def packed(values: np.ndarray) -> dict[str, Any]:
    """An array as 16-bit numbers in base64, with the factor that undoes the scaling."""
    largest = float(np.abs(values).max()) or 1.0
    numbers = np.round(values * (32767 / largest)).astype("<i2")
    return {
        "factor": largest / 32767,
        "shape": list(values.shape),
        "data": base64.b64encode(numbers.tobytes()).decode("ascii"),
    }
