"""`rmt eval`: perplexity and downstream tasks, several models side by side."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmt.commands.base import ArgumentParser, Formatter, console, plain
from rmt.errors import InputError, suggest

if TYPE_CHECKING:
    from rmt.evaluate.tables import ModelResult
    from rmt.hub.folder import Loaded

DESCRIPTION = """\
Measure models: perplexity on a token dataset or a text, and lm-evaluation-harness tasks.

  rmt eval runs/rmt runs/transformer --data tokens
  rmt eval runs/rmt --text book.txt --window sliding --stride 64
  rmt eval runs/rmt runs/transformer --markdown table.md       # the paper's tasks, its numbers beside ours
  rmt eval exported/rmt --tasks lambada_openai piqa --local data/eval --limit 50   # no network

Without --data, --text or --tasks the paper's tasks run: lambada_openai, wikitext, arc_challenge, arc_easy, hellaswag,
piqa, winogrande. Any other task of the harness works too (pip install 'residual-matrix-transformer[eval]')."""

WINDOWS = ("full", "sliding")
FORMATS = ("plain", "wikitext")


def parser() -> ArgumentParser:
    result = ArgumentParser(prog="rmt eval", description=DESCRIPTION, formatter_class=Formatter)
    result.add_argument("models", nargs="+", metavar="RUN|DIR", help="run directories and exported folders")
    result.add_argument("--data", type=str, metavar="TOKENS", help="perplexity on a token dataset")
    result.add_argument("--split", type=str, default="dev", help="of the token dataset [dev]")
    result.add_argument("--text", type=str, metavar="FILE", help="perplexity on a text, or on those of a jsonl file")
    result.add_argument("--text-format", type=str, default="plain", help="plain, or wikitext (its raw form, by page)")
    result.add_argument("--window", type=str, default="full", help="full or sliding [full]")
    result.add_argument("--stride", type=int, help="tokens by which a sliding window moves [half the context]")
    result.add_argument("--tasks", type=str, nargs="+", metavar="TASK", help="harness tasks")
    result.add_argument("--local", type=str, metavar="DIR", help="the tasks' data as TASK_SPLIT.jsonl; no network")
    result.add_argument("--limit", type=int, help="only so many documents of each task, text or dataset")
    result.add_argument("--batch", type=int, help="sequences at a time (default: by the free memory)")
    result.add_argument("--checkpoint", type=str, default="best", help="of a run: best, latest or a step [best]")
    result.add_argument("--tokenizer", type=str, metavar="gpt2|DIR", help="instead of the models' own")
    result.add_argument("--device", type=str, help="cpu, cuda, mps (default: a GPU if there is one)")
    result.add_argument("--json", type=str, metavar="FILE|-", help="write the results as JSON; - prints them instead")
    result.add_argument("--markdown", type=str, metavar="FILE", help="write the table as Markdown")
    result.add_argument("--quiet", action="store_true", help="show no progress")
    return result


def run(args: Any) -> None:
    check(args)
    tasks = args.tasks or ([] if args.data or args.text else None)
    if tasks != []:
        from rmt.evaluate.harness import PAPER_TASKS, find_tasks

        tasks = list(tasks or PAPER_TASKS)
        find_tasks(tasks, local_folder(args))  # refuse an unknown task or a missing file before any work
    results = [measure(path, tasks, args) for path in args.models]
    name_apart(results)
    report(results, args)


def check(args: Any) -> None:
    for name, value, known in (("window", args.window, WINDOWS), ("text-format", args.text_format, FORMATS)):
        if value not in known:
            raise InputError(f"eval: --{name} {value}: {suggest(value, known)}")
    for name in ("limit", "stride", "batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise InputError(f"eval: --{name} must be at least 1, got {value}.")
    if args.text and not Path(args.text).expanduser().is_file():
        raise InputError(f"there is no file {args.text}.")


def local_folder(args: Any) -> Path | None:
    return Path(args.local).expanduser() if args.local else None


def measure(path: str, tasks: list[str], args: Any) -> "ModelResult":
    from rmt.evaluate.memory import batch_that_fits
    from rmt.evaluate.tables import ModelResult
    from rmt.hub.folder import load_model
    from rmt.theory.accounting import count
    from rmt.train.loop import find_device

    device = find_device(args.device)
    loaded = load_model(path, checkpoint=args.checkpoint, tokenizer=args.tokenizer, device=device)
    batch = args.batch or batch_that_fits(loaded.model.config, device)
    measured = {Path(name).name: score_one(loaded, kind, batch, args) for kind, name in sources(args)}
    found = {}
    if tasks:
        from rmt.evaluate.harness import run_tasks

        found = run_tasks(loaded, tasks, local=local_folder(args), limit=args.limit, batch=batch)
    return ModelResult(loaded.name, str(path), int(count(loaded.model.config).params), measured, found)


def sources(args: Any) -> list[tuple[str, str]]:
    return [(kind, name) for kind, name in (("data", args.data), ("text", args.text)) if name]


def score_one(loaded: "Loaded", kind: str, batch: int, args: Any) -> dict[str, Any]:
    from itertools import islice

    from rmt.evaluate.perplexity import dataset_sequence, read_texts, score, text_sequences

    if kind == "data":
        sequences = [dataset_sequence(loaded, args.data, args.split, args.limit)]
    else:
        texts = islice(read_texts(Path(args.text), args.text_format), args.limit)
        sequences = list(text_sequences(loaded, texts))
    total = sum(len(sequence.tokens) - 1 for sequence in sequences)
    with progress(f"{loaded.name}: {kind}", total, args.quiet) as advance:
        found = score(loaded.model, sequences, window=args.window, stride=args.stride, batch=batch, progress=advance)
    return found.to_dict()


@contextmanager
def progress(title: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)


def name_apart(results: list["ModelResult"]) -> None:
    """Models from folders of the same name are called by their paths."""
    names = [result.name for result in results]
    for result in results:
        if names.count(result.name) > 1:
            result.name = result.path


def report(results: list["ModelResult"], args: Any) -> None:
    from rmt.evaluate.tables import cells, markdown, rows

    answer = {"models": results, "rows": rows(results), "settings": settings(args)}
    text = json.dumps(answer, indent=2, default=plain)
    for name, content in ((args.json, text + "\n"), (args.markdown, markdown(results, note(args)))):
        if name and name != "-":
            write(Path(name).expanduser(), content)
    if args.json == "-":
        print(text)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    header, *lines = cells(results)
    for place, title in enumerate(header):
        table.add_column(title, justify="left" if place < 2 else "right")
    for line in lines:
        table.add_row(*line)
    console.print(table, markup=False)
    console.print(note(args), markup=False)


def settings(args: Any) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    names = ("data", "split", "text", "text_format", "window", "stride", "tasks", "local", "limit", "checkpoint")
    versions: dict[str, str | None] = {}
    for package in ("residual-matrix-transformer", "lm_eval", "transformers", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {**{name: getattr(args, name) for name in names}, "versions": versions}


def note(args: Any) -> str:
    parts = ["Accuracies in percent, perplexities per token, word or byte."]
    if args.limit:
        parts.append(f"Only the first {args.limit} documents of each: not comparable with full results.")
    if sources(args):
        windows = f"sliding windows, stride {args.stride or 'half the context'}"
        parts.append(f"Own perplexities in {windows if args.window == 'sliding' else 'windows side by side'}.")
    return " ".join(parts)


def write(path: Path, content: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}.") from None
