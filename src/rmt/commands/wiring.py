"""`rmt wiring`: what each layer of a matrix model reads of what each layer wrote."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rmt.commands.base import ArgumentParser, Formatter, console, print_json
from rmt.errors import InputError, suggest

if TYPE_CHECKING:
    from rmt.hub.folder import Loaded
    from rmt.wires.findings import Findings

DESCRIPTION = """\
The wiring of a model with a matrix stream: every read (queries, keys and values of each head, feed-forward and
unembedding slots) against every write before it. In this stream the path from a write to a read is one number, the
inner product of two keys, so the whole map is exact. Writes a page (wiring.html), the table (wiring.npz, wiring.csv),
figures (wiring, load and, with --data, cuts; as PNG and SVG) and, with --text, what passed on the text (text.npz).

  rmt wiring runs/first
  rmt wiring runs/first --text "My fellow citizens of the Senate"     # contributions, logit lens, attribution
  rmt wiring runs/first --data tokens                                 # which connections matter: cuts the largest
  rmt wiring runs/first --data tokens --cut "layer3.ff <- layer1.ff" "layer2.head0.query <- token"
  rmt wiring runs/transformer --composition                           # a transformer's composition scores, to compare

Names of reads    layer3.head2.query (.key, .value), layer3.ff.slot1, unembedding.slot0; together: layer3.head2,
                  layer3.query, layer3.attention, layer3.ff, layer3, unembedding, all
Names of writes   token.slot0, position.slot0, layer1.head0, layer1.ff.slot2; together: token, position, embedding,
                  layer1.attention, layer1.ff, layer1, all
With grouped key/value heads their reads are layer3.group0.key and layer3.group0.value. An edge is "READ <- WRITE", in
quotes. Layers and heads count from 0. docs/wiring.md explains the numbers."""


def parser() -> ArgumentParser:
    result = ArgumentParser(prog="rmt wiring", description=DESCRIPTION, formatter_class=Formatter)
    result.add_argument("model", metavar="RUN|DIR", help="run directory or exported folder")
    result.add_argument("--text", type=str, help="follow this text through the wires")
    result.add_argument("--out", type=str, default="wiring", metavar="DIR", help="where the files go [wiring]")
    result.add_argument("--data", type=str, metavar="TOKENS", help="token dataset to measure the loss on")
    result.add_argument("--split", type=str, default="dev", help="of the token dataset [dev]")
    result.add_argument("--tokens", type=int, default=8192, help="of it to measure on [8192]")
    result.add_argument("--cut", type=str, nargs="+", metavar="EDGE", help="what the loss is without these edges")
    result.add_argument("--rank", type=int, default=20, metavar="N", help="with --data: cut the N first edges [20]")
    result.add_argument("--level", type=str, default="heads", help="of the ranking: slots, heads or cores [heads]")
    result.add_argument("--composition", action="store_true", help="of a transformer: its composition scores")
    result.add_argument("--top", type=int, default=10, help="edges to print [10]")
    result.add_argument("--checkpoint", type=str, default="best", help="of a run: best, latest or a step [best]")
    result.add_argument("--tokenizer", type=str, metavar="gpt2|DIR", help="instead of the model's own")
    result.add_argument("--device", type=str, help="cpu, cuda, mps (default: a GPU if there is one)")
    result.add_argument("--json", action="store_true", help="print the results as JSON")
    return result


def run(args: Any) -> None:
    check(args)
    from rmt.hub.folder import load_model
    from rmt.train.loop import find_device

    loaded = load_model(
        args.model, checkpoint=args.checkpoint, tokenizer=args.tokenizer, device=find_device(args.device)
    )
    out = Path(args.out).expanduser()
    try:
        if args.composition:
            compose(loaded, out, args)
        else:
            findings = find(loaded, args)
            show(findings, write(findings, out), args)
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}. Choose another --out.") from None


def check(args: Any) -> None:
    from rmt.wires.slots import LEVELS

    if args.level not in LEVELS:
        raise InputError(f"wiring: --level {args.level}: {suggest(args.level, LEVELS)}")
    if args.cut and not args.data:
        raise InputError("wiring: --cut needs something to measure the loss on: give --data TOKENS.")
    for name, least in (("tokens", 1), ("rank", 0), ("top", 0)):
        if getattr(args, name) < least:
            raise InputError(f"wiring: --{name} must be at least {least}, got {getattr(args, name)}.")


def find(loaded: "Loaded", args: Any) -> "Findings":
    """Everything that was asked for."""
    from rmt.wires.findings import Findings
    from rmt.wires.load import load
    from rmt.wires.table import wiring

    table = wiring(loaded.model)
    findings = Findings(loaded.name, loaded.record.get("step"), table, load(table), history(loaded))
    if args.text is not None:
        findings.text = follow(loaded, args.text)
    if args.data:
        from rmt.data import TokenDataset
        from rmt.wires.cut import cut_effects, rank_edges

        dataset = TokenDataset.open(args.data)
        if dataset.vocab_size > table.config.vocab_size:
            raise InputError(
                f"{args.data} has {dataset.vocab_size} token ids, the model {table.config.vocab_size}: "
                "give the dataset that belongs to the model."
            )
        measured = {"tokens": args.tokens, "split": args.split}
        if args.cut:
            findings.cuts = cut_effects(loaded.model, args.cut, dataset, **measured)
        elif args.rank:
            findings.ranking = rank_edges(loaded.model, dataset, top=args.rank, level=args.level, **measured)
    return findings


def follow(loaded: "Loaded", text: str) -> Any:
    """The text's trace, with its tokens as strings. As in training, the end-of-text token stands before it."""
    import torch

    from rmt.wires.findings import Followed
    from rmt.wires.trace import trace

    ids = [loaded.eot, *loaded.tokenizer.encode(text, add_special_tokens=False).ids]
    context = loaded.model.config.context
    if len(ids) == 1:
        raise InputError("wiring: the text is empty.")
    if len(ids) > context:
        raise InputError(f"wiring: the text has {len(ids)} tokens, the context is {context}: shorten it.")
    device = next(loaded.model.parameters()).device
    seen = trace(loaded.model, torch.tensor([ids], device=device))
    return Followed(seen, loaded.tokenizer)


def history(loaded: "Loaded") -> list[tuple[int, list]]:
    """The load at every checkpoint of a run, if there are several."""
    from rmt.hub.folder import load_model
    from rmt.train.checkpoint import listing
    from rmt.wires.load import load
    from rmt.wires.table import wiring

    steps = [int(path.name.removeprefix("step-")) for path in listing(loaded.path / "checkpoints")]
    if len(steps) < 2:
        return []
    return [(step, load(wiring(load_model(loaded.path, checkpoint=step).model))) for step in steps]


def write(findings: "Findings", out: Path) -> list[Path]:
    from rmt.wires.figures import draw_effects, draw_load, draw_map
    from rmt.wires.page import write_page

    paths = [write_page(findings, out / "wiring.html"), *draw_map(findings, out / "wiring.png")]
    paths += draw_load(findings, out / "load.png")
    if findings.ranking or findings.cuts:
        paths += draw_effects(findings, out / "cuts.png")
    paths += findings.table.save(out)
    if findings.text is not None:
        paths.append(findings.text.save(out / "text.npz"))
    return paths


def show(findings: "Findings", paths: list[Path], args: Any) -> None:
    from rmt.wires.findings import top_edges

    edges = top_edges(findings.table, args.top)
    if args.json:
        print_json(
            {
                "model": findings.name,
                "step": findings.step,
                "reads": len(findings.table.reads),
                "writes": len(findings.table.writes),
                "edges": int(findings.table.causal.sum()),
                "top": edges,
                "load": findings.load,
                "cuts": findings.cuts,
                "ranking": findings.ranking,
                "files": [str(path) for path in paths],
            }
        )
        return
    console.print(findings.summary(), markup=False)
    if edges:
        strongest = [(e["read"], e["write"], f"{e['normalised']:+.3f}", f"{e['raw']:+.3f}") for e in edges]
        print_table("Strongest edges by their keys", ("read", "write", "normalised", "raw"), strongest)
    for title, header, lines in findings.effect_tables():
        print_table(title, header, lines)
    for path in paths:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in header:
        table.add_column(name, justify="left" if name in ("read", "write", "edge") else "right")
    for line in lines:
        table.add_row(*line)
    console.print(f"\n{title}", markup=False)
    console.print(table, markup=False)


def compose(loaded: "Loaded", out: Path, args: Any) -> None:
    from rmt.wires.composition import composition
    from rmt.wires.figures import draw_composition

    found = composition(loaded.model)
    paths = [found.save(out), *draw_composition(found, out / "composition.png", loaded.name)]
    top = found.top(args.top)
    if args.json:
        pairs = [{"read": read, "write": write, "score": score} for read, write, score in top]
        print_json({"model": loaded.name, "random": found.random, "top": pairs, "files": [str(path) for path in paths]})
        return
    lines = [(read, write, f"{score:.4f}") for read, write, score in top]
    title = f"{loaded.name}: strongest composition scores (random matrices: {found.random:.4f})"
    print_table(title, ("read", "write", "score"), lines)
    for path in paths:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
