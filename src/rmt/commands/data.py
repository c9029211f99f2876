"""`rmt data`: text to token shards (`prepare`), and two looks at the result (`verify`, `show`)."""

from itertools import islice
from typing import Any

from rich.table import Table

from rmt.commands.base import ArgumentParser, Formatter, console, print_json
from rmt.data import TokenDataset, prepare, verify
from rmt.data.manifest import SPLITS
from rmt.errors import InputError

DESCRIPTION = """Turn text into a token dataset, check it, look at it.

  rmt data prepare novel.txt --tokenizer train:4096 --out data/novel
  rmt data verify data/novel
  rmt data show data/novel
"""

PREPARE = """Turn text into a folder of token shards with checksums: complete, or not there at all.

Sources, as many as you like and in this order:
  notes.txt  books/              text files and folders (.txt .text .md, .jsonl .ndjson, .parquet; also .gz and .zst)
  pile.jsonl.zst  web.parquet    one document per line or row, its text in --field
  -                              standard input, as text
  openwebtext                    a Hugging Face dataset (or wikitext:wikitext-103-raw-v1), streamed

In a text file a line <|endoftext|> separates documents; without one, a file is one document.
An interrupted run goes on where it stopped when the same command is given again.

  rmt data prepare novel.txt --tokenizer train:4096 --out data/novel
  rmt data prepare corpus/ --tokenizer gpt2 --out data/corpus --workers 8
  rmt data prepare news.jsonl.zst --field body --tokenizer gpt2 --out data/news
  zcat dump.gz | rmt data prepare - --tokenizer gpt2 --out data/dump
"""

VERIFY = """Read every byte of a token dataset and compare it with the checksums in its manifest.

  rmt data verify data/novel
"""

SHOW = """Show what is in a token dataset, with the beginning of a few documents as text.

  rmt data show data/novel
  rmt data show data/novel --split dev --documents 5
  rmt data show data/novel --document 12 --characters 2000
"""


def parser() -> ArgumentParser:
    whole = ArgumentParser(prog="rmt data", description=DESCRIPTION, formatter_class=Formatter)
    actions = whole.add_subcommands(dest="action", required=False, metavar="prepare|verify|show")
    for name, one, what in (
        ("prepare", prepare_parser(), "text -> token shards"),
        ("verify", verify_parser(), "compare every byte with the checksums"),
        ("show", show_parser(), "sizes, and a few documents as text"),
    ):
        actions.add_subcommand(name, one, help=what)
        one.prog = f"rmt data {name}"
    return whole


def prepare_parser() -> ArgumentParser:
    one = ArgumentParser(prog="rmt data prepare", description=PREPARE, formatter_class=Formatter)
    one.add_argument("sources", nargs="+", metavar="SRC", help="file, folder, - or Hugging Face dataset")
    one.add_argument("--tokenizer", required=True, metavar="T", help="gpt2, a folder, or train:4096")
    one.add_argument("--out", required=True, metavar="DIR", help="the dataset to write")
    one.add_argument("--field", default="text", help="field of jsonl, column of parquet (default: text)")
    one.add_argument("--dev", type=float, default=0.01, metavar="SHARE", help="share held out (default: 0.01; 0: none)")
    one.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core; same result)")
    one.add_argument("--strict", action="store_true", help="refuse invalid UTF-8 instead of replacing it")
    one.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens in a shard file")
    one.add_argument("--overwrite", action="store_true", help="replace the dataset if it exists")
    one.add_argument("--json", action="store_true", help="print the manifest as JSON")
    return one


def verify_parser() -> ArgumentParser:
    one = ArgumentParser(prog="rmt data verify", description=VERIFY, formatter_class=Formatter)
    one.add_argument("dataset", metavar="DIR")
    one.add_argument("--json", action="store_true", help="print the result as JSON")
    return one


def show_parser() -> ArgumentParser:
    one = ArgumentParser(prog="rmt data show", description=SHOW, formatter_class=Formatter)
    one.add_argument("dataset", metavar="DIR")
    one.add_argument("--split", default="train", help="train or dev (default: train)")
    one.add_argument("--documents", type=int, default=3, metavar="N", help="how many documents (default: 3)")
    one.add_argument("--document", type=int, metavar="N", help="only document N, counted from 0")
    one.add_argument("--characters", type=int, default=300, metavar="N", help="how much of each (default: 300)")
    one.add_argument("--json", action="store_true", help="print the manifest and the documents as JSON")
    return one


def run(args: Any) -> None:
    actions = {"prepare": run_prepare, "verify": run_verify, "show": run_show}
    if args.action is None:
        raise InputError("data: say what to do: prepare, verify or show. `rmt data --help` has examples.")
    actions[args.action](args[args.action])


def run_prepare(args: Any) -> None:
    manifest = prepare(
        args.sources,
        args.tokenizer,
        args.out,
        field=args.field,
        dev=args.dev,
        workers=args.workers,
        strict=args.strict,
        shard_tokens=args.shard_tokens,
        overwrite=args.overwrite,
        progress=True,
    )
    if args.json:
        return print_json(manifest)
    print_summary(args.out, manifest)


def run_verify(args: Any) -> None:
    report = verify(args.dataset)
    if args.json:
        return print_json(report)
    tokens = ", ".join(f"{count:,} {split}" for split, count in report["tokens"].items())
    plain(f"{args.dataset} is intact: {report['shards']} shards, {tokens} tokens, {report['bytes'] / 1e6:,.1f} MB.")


def run_show(args: Any) -> None:
    dataset = TokenDataset.open(args.dataset)
    documents = chosen_documents(dataset, args)
    if args.json:
        return print_json({"manifest": dataset.manifest, "documents": documents})
    print_summary(args.dataset, dataset.manifest)
    for document in documents:
        plain(f"\n--- {args.split} document {document['number']}, {document['tokens']:,} tokens")
        plain(document["text"])


def chosen_documents(dataset: TokenDataset, args: Any) -> list[dict[str, Any]]:
    first, count = (args.document, 1) if args.document is not None else (0, args.documents)
    if first < 0 or count < 0 or args.characters < 0:
        raise InputError("data show: documents and characters are counted from 0 up.")
    tokenizer = dataset.tokenizer()
    found = []
    for number, tokens in islice(enumerate(dataset.documents(args.split)), first, first + count):
        # A token has at least one byte and a character at most four, so this many tokens are always enough.
        text = tokenizer.decode(tokens[: 4 * args.characters].tolist(), skip_special_tokens=False)
        shown = text[: args.characters] + ("…" if len(text) > args.characters else "")
        found.append({"number": number, "tokens": len(tokens), "text": shown})
    if args.document is not None and not found:
        total = dataset.manifest["splits"][args.split]["documents"]
        raise InputError(f"there is no document {args.document}: {args.split} has {total}, counted from 0.")
    return found


def print_summary(path: str, manifest: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("split")
    for name in ("documents", "tokens", "text MB", "bytes/token", "shards"):
        table.add_column(name, justify="right")
    for split in SPLITS:
        entry = manifest["splits"][split]
        per_token = f"{entry['bytes'] / entry['tokens']:.2f}" if entry["tokens"] else "-"
        sizes = (f"{entry['documents']:,}", f"{entry['tokens']:,}", f"{entry['bytes'] / 1e6:,.2f}", per_token)
        table.add_row(split, *sizes, str(len(entry["shards"])))
    plain(f"{path}: tokenizer {manifest['tokenizer']['name']}, {manifest['vocab_size']:,} tokens in its vocabulary")
    console.print(table)
    if manifest["invalid_sequences"]:
        plain(f"{manifest['invalid_sequences']:,} invalid UTF-8 sequences were replaced by U+FFFD.")
    plain(f"fingerprint {manifest['fingerprint']}")


def plain(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
