"""Our tokens per second against the bare Rust tokenizer on the same text, with the same number of cores.

Ours is the whole of `prepare`: read, split, tokenize, write, hash, rename. The bare tokenizer gets the text in memory
and keeps nothing, in two ways: the documents as they are, and cut into short texts, which it encodes fastest.
Runs are interleaved and medians compared, so that a slow minute of the machine slows all of them.

    python benchmarks/tokenizing.py corpus.txt --tokenizer gpt2 --workers 2 --json tokenize.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

BARE = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = json.load(open(sys.argv[2], encoding="utf-8"))
start = time.perf_counter()
encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
seconds = time.perf_counter() - start
print(json.dumps([seconds, sum(len(encoding.ids) for encoding in encodings)]))
"""


def bare(folder: Path, texts: Path, workers: int) -> tuple[float, int]:
    """Seconds and tokens of one `encode_batch` over all texts, in a fresh process with `workers` threads."""
    command = [sys.executable, "-c", BARE, str(folder / "tokenizer.json"), str(texts)]
    environment = os.environ | {"RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
    seconds, tokens = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    return seconds, tokens


def ours(source: str, tokenizer: str, out: Path, workers: int) -> tuple[float, int]:
    from rmt.data import prepare

    start = time.perf_counter()
    manifest = prepare([source], tokenizer, out, workers=workers, overwrite=True)
    seconds = time.perf_counter() - start
    return seconds, sum(split["tokens"] for split in manifest["splits"].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a text file")
    parser.add_argument("--tokenizer", default="gpt2", help="gpt2 or a folder")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes for ours, threads for bare")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here as well")
    args = parser.parse_args()

    from rmt.data.encoding import Encoder
    from rmt.data.sources import Corpus, find_sources
    from rmt.data.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load_tokenizer(args.tokenizer).save(folder)
        documents, size = [""], 0
        for piece in Corpus(find_sources([args.source])).pieces():
            documents[-1] += piece.text.decode()
            size += len(piece.text)
            if piece.last:
                documents.append("")
        documents = [text for text in documents if text]
        encoder = Encoder(folder / "tokenizer.json", eot=0, dtype="<u4")
        short = [text for document in documents for text in encoder.short_texts(document)]
        (folder / "documents.json").write_text(json.dumps(documents), encoding="utf-8")
        (folder / "short.json").write_text(json.dumps(short), encoding="utf-8")

        ways: dict[str, Callable[[], tuple[float, int]]] = {
            "bare, whole documents": lambda: bare(folder, folder / "documents.json", args.workers),
            "bare, short texts": lambda: bare(folder, folder / "short.json", args.workers),
            "ours": lambda: ours(args.source, args.tokenizer, folder / "out", args.workers),
        }
        runs: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
        for repeat in range(args.repeats):
            for name, way in ways.items():
                runs[name].append(way())
                print(f"run {repeat + 1}  {name:24}{runs[name][-1][0]:8.1f} s", file=sys.stderr, flush=True)

    rates = {name: statistics.median(tokens / seconds for seconds, tokens in found) for name, found in runs.items()}
    print(
        f"{args.source}: {size / 1e6:.1f} MB, tokenizer {args.tokenizer}, {args.workers} workers, {args.repeats} runs"
    )
    print(f"{'':24}{'tokens/s':>12}{'MB/s':>8}{'ours is':>10}")
    for name, rate in rates.items():
        megabytes = statistics.median(size / 1e6 / seconds for seconds, _ in runs[name])
        print(f"{name:24}{rate:12,.0f}{megabytes:8.1f}{rates['ours'] / rate:9.2f}x")
    if args.json:
        numbers = {
            "source": Path(args.source).name,
            "bytes": size,
            "tokenizer": args.tokenizer,
            "workers": args.workers,
            "tokens_per_second": rates,
            "ratio_to_bare": rates["ours"] / rates["bare, whole documents"],
            "ratio_to_bare_on_short_texts": rates["ours"] / rates["bare, short texts"],
            "runs": {name: [{"seconds": s, "tokens": t} for s, t in found] for name, found in runs.items()},
        }
        args.json.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
