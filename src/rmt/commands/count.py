"""`rmt count`: parameters, FLOPs and memory of one model or of several side by side."""

from pathlib import Path
from typing import Any

from rich.table import Table

from rmt.commands.base import ArgumentParser, Formatter, add_settings, console, print_json, resolve_settings
from rmt.config import PRESETS, recipe
from rmt.errors import InputError
from rmt.theory.accounting import Count, count

DESCRIPTION = """\
Count the parameters, FLOPs and bytes of a model, by part, without building it; next to them, what the paper's own
formulas give.

examples:
  rmt count rmt-134m                                   one preset
  rmt count rmt-134m transformer-160m                  a mirrored pair side by side
  rmt count rmt-134m --model.key_dim 64                the same with a residual stream twice as wide
  rmt count rmt-305m --batch 8 --recompute full        training memory for 8 sequences with recomputation
  rmt count --config model.yaml --json                 your own model, for machines
  rmt count --figure resources.png                     parameters and FLOPs against residual stream size (and .svg)
"""

PARTS = {
    "token_embedding": "token embedding",
    "position_embedding": "position embedding",
    "embedding": "embedding (a lookup)",
    "stream_writes": "stream writes",
    "stream_reads": "stream reads",
    "norms": "norms",
    "attention": "attention core",
    "softmax": "softmax",
    "feed_forward": "feed-forward",
    "unembedding": "unembedding",
    "logits": "logits",
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "AdamW moments",
    "activations": "activations (estimate)",
    "loss": "loss, in chunks",
    "kv_cache": "key/value cache",
    "stream_state": "stream state",
}


def parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="rmt count",
        usage="rmt count MODEL ... [--model.KEY VALUE ...] [options]",
        description=DESCRIPTION,
        formatter_class=Formatter,
    )
    parser.add_argument(
        "models",
        nargs="*",
        type=str,
        default=[],
        metavar="MODEL",
        help=f"a YAML file, or a preset: {', '.join(PRESETS)}",
    )
    parser.add_argument("--batch", type=int, default=1, help="sequences of a full context, for the memory")
    parser.add_argument(
        "--recompute",
        type=str,
        default="none",
        metavar="WHAT",
        help="not kept for the backward pass: none, gelu, ff, full",
    )
    parser.add_argument("--tokens", type=float, metavar="N", help="training tokens (default: those of the preset)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--figure", metavar="FILE.png", help="draw parameters and FLOPs against residual stream size")
    add_settings(parser, "model")
    return parser


def run(args: Any) -> int:
    if args.figure:
        from rmt.report.figure_resources import draw_resources

        for path in draw_resources(Path(args.figure)):
            console.print(f"wrote {path}", soft_wrap=True)
        if not args.models and not args.config:
            return 0
    counts = {}
    for name in args.models or [None]:
        counts[name or args.config] = count_model(args, name)
    tokens = {name: training_tokens(args, name) for name in counts}
    if args.json:
        answers = [to_json(name, counts[name], tokens[name]) for name in counts]
        print_json(answers[0] if len(answers) == 1 else answers)
    else:
        print_tables(counts, tokens)
    return 0


def count_model(args: Any, name: str | None) -> Count:
    if name is None and not args.config and "model" not in args:
        raise InputError("count: name a preset or a file, for example `rmt count rmt-134m`; `--help` shows more.")
    is_file = name is not None and name.endswith((".yaml", ".yml"))
    if is_file:
        if args.config:
            raise InputError(f"count: give {name} or --config {args.config}, not both.")
        args = args.clone()
        args.config = name
    settings = resolve_settings(args, None if is_file else name)
    return count(settings.model, batch=args.batch, recompute=args.recompute)


def training_tokens(args: Any, name: str | None) -> float | None:
    if args.tokens is not None and not args.tokens > 0:
        raise InputError(f"count: --tokens {args.tokens:g}: must be greater than zero.")
    return args.tokens or (recipe(name).tokens if name in PRESETS else None)


def to_json(name: str | None, counted: Count, tokens: float | None) -> dict[str, Any]:
    answer = {"name": name, **counted.to_dict()}
    if tokens:
        answer["flops"]["training"] = {
            "tokens": int(tokens),
            "total": counted.flops.training(tokens),
            "non_embedding": counted.flops.training(tokens, logits=False),
        }
    return answer


def print_tables(counts: dict[Any, Count], tokens: dict[Any, float | None]) -> None:
    models = list(counts.values())
    names = [str(name or "model") for name in counts]
    first = new_table("parameters", names)
    add_parts(first, [model.params.parts for model in models], [int(model.params) for model in models])
    first.add_row("without embeddings", *(f"{model.non_embedding_params:,}" for model in models))
    first.add_row("stream size per token", *(f"{model.config.stream_size:,}" for model in models))
    second = new_table("forward FLOPs per token", names)
    add_parts(
        second, [model.flops.per_token.parts for model in models], [int(model.flops.per_token) for model in models]
    )
    second.add_row("without logits", *(f"{model.flops.non_embedding_per_token:,}" for model in models))
    second.add_row("per example", *(f"{model.flops.per_example:.4g}" for model in models))
    third = new_table("training FLOPs (backward = 2 x forward)", names)
    third.add_row("per token", *(f"{model.flops.training_per_token:.4g}" for model in models))
    if any(tokens.values()):
        pairs = list(zip(models, tokens.values(), strict=True))
        third.add_row("tokens", *(f"{budget:.4g}" if budget else "-" for _, budget in pairs))
        third.add_row("whole run", *(f"{model.flops.training(n):.4g}" if n else "-" for model, n in pairs))
        third.add_row(
            "whole run without logits",
            *(f"{model.flops.training(n, logits=False):.4g}" if n else "-" for model, n in pairs),
        )
    for table in (first, second, third, *memory_tables(models, names), paper_table(models, names)):
        if table is not None:
            title, table.title = table.title, None  # a table's own title is wrapped to the width of its columns
            console.print(f"[bold]{title}[/bold]")
            console.print(table)
            console.print()
    if any("activations" not in model.memory.training.parts for model in models):
        console.print("Where activations are missing they have not been derived for that stream; the total lacks them.")


def memory_tables(models: list[Count], names: list[str]) -> list[Table]:
    memory = models[0].memory
    sequences = f"{memory.batch} x {models[0].config.context} tokens" if len(models) == 1 else f"batch {memory.batch}"
    training = new_table(f"training memory, MiB (float32, {sequences}, recompute {memory.recompute})", names)
    add_parts(
        training,
        [model.memory.training.parts for model in models],
        [int(model.memory.training) for model in models],
        mebibytes,
    )
    training.add_row("most at one moment", *(mebibytes(model.memory.peak) for model in models))
    inference = new_table(f"decoding memory, MiB (float32, {sequences})", names)
    add_parts(
        inference,
        [model.memory.inference.parts for model in models],
        [int(model.memory.inference) for model in models],
        mebibytes,
    )
    return [training, inference]


def paper_table(models: list[Count], names: list[str]) -> Table | None:
    if all(model.paper is None for model in models):
        return None
    table = new_table("the paper's printed formulas (docs/errata.md explains the differences)", names)
    table.add_row("parameters", *(model.paper.params_formula if model.paper else "-" for model in models))
    table.add_row("", *(f"{model.paper.params:,}" if model.paper else "-" for model in models))
    table.add_row(
        "  paper - exact", *(difference(model.paper.params, model.params) if model.paper else "-" for model in models)
    )
    table.add_row("FLOPs per example", *(model.paper.flops_formula if model.paper else "-" for model in models))
    table.add_row("", *(f"{model.paper.flops_per_example:.4g}" if model.paper else "-" for model in models))
    table.add_row(
        "  paper - exact",
        *(
            difference(model.paper.flops_per_example, model.flops.per_example, ".4g") if model.paper else "-"
            for model in models
        ),
    )
    return table


def difference(theirs: int, ours: int, form: str = ",") -> str:
    return f"{theirs - ours:+{form}} ({theirs / ours - 1:+.1%})"


def new_table(title: str, names: list[str]) -> Table:
    table = Table(title=title, box=None, padding=(0, 3, 0, 0))
    table.add_column("", min_width=24)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    return table


def add_parts(table: Table, parts: list[dict[str, int]], totals: list[int], form: Any = "{:,}".format) -> None:
    for part in parts[0] | parts[-1]:
        table.add_row(PARTS[part], *(form(values[part]) if part in values else "-" for values in parts))
    table.add_row("total", *map(form, totals), style="bold")


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f}"
